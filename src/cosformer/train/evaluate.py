"""cosformer evaluate: score a saved model on its task's sets, or on other data."""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

from .. import tasks
from . import Run, SettingsError, new_model, quieten, scores, trainer_of
from .settings import merge, parse, parser


def evaluate(run: Run, model: str | Path, *, split: str = "test") -> dict[str, float]:
    """The scores of the model saved in a folder on one split of a run's task."""
    task = tasks.build(run.task, **run.task_settings)
    with tempfile.TemporaryDirectory() as nowhere:
        run = dataclasses.replace(run, out=nowhere, training=run.training | {"report_to": []})
        return scores(trainer_of(run, task, new_model(run, task, start=str(model)), []), task, split, examples=run.test_examples)


def main(argv: list[str]) -> None:
    p = parser("cosformer evaluate", __doc__.split("\n")[0], task=None)
    p.add_argument("model", metavar="MODEL", type=Path, help="a folder that cosformer train wrote, or a checkpoint in it")
    p.add_argument("task", nargs="?", help="another task than the one it was trained on")
    p.add_argument("--split", choices=tasks.SPLITS, default="test")
    p.add_argument("--json", action="store_true", default=False, help="print one JSON object")
    given, rest = parse(p, argv)
    quieten()
    try:
        found = evaluate(run_of(given, rest), given.model, split=given.split)
    except (SettingsError, tasks.DataError, OSError) as error:
        raise SystemExit(f"cosformer evaluate: {error}") from None
    print(json.dumps(found) if given.json else "\n".join(f"{key:<20} {value:.6g}" for key, value in found.items()))


def run_of(given: argparse.Namespace, rest: list[str]) -> Run:
    """The run a model comes from, with what the command line changes of its task."""
    if not (given.model / "config.json").exists():
        raise SettingsError(f"{given.model} holds no model (config.json)")
    folder = next((path for path in (given.model, given.model.parent) if (path / "run.json").exists()), None)
    saved = dataclasses.asdict(Run.load(folder / "run.json")) if folder else {}
    if not saved and getattr(given, "task", None) is None:
        raise SettingsError(f"{given.model} has no run.json, so name the task")
    given.task = getattr(given, "task", None) or saved["task"]
    said = merge(given, rest)
    if saved and said["task"] == saved["task"]:
        said["task_settings"] = saved["task_settings"] | said.get("task_settings", {})
    return Run(**said)
