"""cosformer evaluate: score a saved model on its task's sets, or on other data."""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from .. import tasks
from . import Run, SettingsError, build_task, models, new_model, one_line, quieten, scores, trainer_of
from .settings import merge, parse, parser


def evaluate(run: Run, model: str | Path, *, split: str = "test") -> dict[str, float]:
    """The scores of the model saved in a folder on one split of a run's task."""
    task = build_task(run)
    head = json.loads((Path(model) / "config.json").read_text()).get("architectures") or [None]
    if head[0] != models.CLASSES[task.kind].__name__:
        raise SettingsError(
            f"{model} is a {head[0]}, which knows nothing of task {task.name!r} yet; cosformer finetune trains it"
        )
    if task.num_labels is not None:
        labels = models.labels_of(str(model))
        if labels != list(task.labels):
            told = f"{model} tells {', '.join(labels)} apart; the data has {', '.join(task.labels)}"
            raise SettingsError(
                f"{told}. If it is a part of them, name them all: --set task.labels='{json.dumps(labels)}'"
            )
    with tempfile.TemporaryDirectory() as nowhere:
        run = dataclasses.replace(
            run, out=nowhere, model_fields={}, training=run.training | {"report_to": []}
        )
        return scores(
            trainer_of(run, task, new_model(run, task, start=str(model)), []),
            task,
            split,
            examples=run.test_examples,
        )


def main(argv: list[str]) -> None:
    p = parser("cosformer evaluate", __doc__.split("\n")[0], task=None)
    p.add_argument(
        "model", metavar="MODEL", type=Path, help="a folder that cosformer train wrote, or a checkpoint in it"
    )
    p.add_argument("task", nargs="?", help="another task than the one it was trained on")
    p.add_argument(
        "--split", choices=tasks.SPLITS, default="test", help="which part of the data (default: test)"
    )
    p.add_argument("--json", action="store_true", default=False, help="print one JSON object")
    quieten()
    with one_line(p.prog):
        given, training = parse(p, argv)
        found = evaluate(run_of(given, training), given.model, split=given.split)
    print(
        json.dumps(found)
        if given.json
        else "\n".join(f"{key:<20} {value:.6g}" for key, value in found.items())
    )


def run_of(given: argparse.Namespace, training: dict[str, Any]) -> Run:
    """The run a model comes from, with what the command line changes."""
    if not (given.model / "config.json").exists():
        raise SettingsError(f"{given.model} holds no model (config.json)")
    folder = given.model.parent if given.model.name.startswith("checkpoint-") else given.model
    saved: dict[str, Any] = {}
    if (folder / "run.json").exists():
        saved = dataclasses.asdict(Run.load(folder / "run.json"))
    if not saved and getattr(given, "task", None) is None:
        raise SettingsError(f"{given.model} has no run.json, so name the task")
    said = merge(given, training, task=saved.get("task"))
    if said["task"] == saved.get("task"):
        for table in ("task_settings", "training"):
            said[table] = saved[table] | said.get(table, {})
        said["training"] = {
            key: value for key, value in said["training"].items() if not key.startswith("fsdp")
        }
        said = {"test_examples": saved["test_examples"], **said}
    return Run(**said)
