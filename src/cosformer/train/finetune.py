"""cosformer finetune: train a saved model further on another task, its body with a new head; mlm -> classify."""

from . import command
from .settings import parser


def main(argv: list[str]) -> None:
    p = parser("cosformer finetune", __doc__.split("\n")[0], task=None)
    p.add_argument(
        "start", metavar="MODEL", help="a folder that cosformer train wrote, or a checkpoint in it"
    )
    p.add_argument("task", nargs="?", help="classify by default")
    p.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    command(p, argv, task="classify")
