"""Scores of a model on a task's sets: a run's own at its end, or a saved model's, on other data if asked."""

import dataclasses
import json
import tempfile
from pathlib import Path

from .. import tasks
from . import models
from .build import build_model, build_task, build_trainer, part, refused
from .progress import OWN
from .settings import Run, SettingsError
from .trainer import Trainer


def scores(trainer: Trainer, task: tasks.Task, split: str, *, examples: int | None) -> dict[str, float]:
    """The scores of the trainer's model on a split; of one that writes, by words and as it writes."""
    dataset = part(getattr(task, split), examples)
    found: dict[str, float] = {}
    trainer.args.generation_max_length = task.max_target_length
    for generate in (False, True) if task.kind == "seq2seq" else (False,):
        trainer.args.predict_with_generate = generate
        found |= trainer.evaluate(dataset, metric_key_prefix=split)
    mine = [key for key in found if key.startswith(split) and not key.endswith(OWN)]
    return {key.removeprefix(f"{split}_"): found[key] for key in mine}


def evaluate(run: Run, model: str | Path, *, split: str = "test") -> dict[str, float]:
    """The scores of the model saved in a folder on one split of a run's task."""
    task = build_task(run, model=str(model))
    with refused(ValueError, f"model {model}"):
        head = json.loads((Path(model) / "config.json").read_text()).get("architectures") or [None]
    if head[0] != models.CLASSES[task.kind].__name__:
        told = f"{model} is a {head[0]}, which knows nothing of task {task.name!r} yet"
        raise SettingsError(f"{told}; cosformer finetune trains it")
    if task.num_labels is not None and (labels := models.labels_of(str(model))) != list(task.labels):
        told = f"{model} tells {', '.join(labels)} apart; the data has {', '.join(task.labels)}"
        way = f"name them all: --set task.labels={','.join(labels)}"
        raise SettingsError(f"{told}. If it is a part of them, {way}")
    with tempfile.TemporaryDirectory() as nowhere:
        training = run.training | {"report_to": []}
        run = dataclasses.replace(run, out=nowhere, model_fields={}, training=training)
        trainer = build_trainer(run, task, build_model(run, task, start=str(model)), [])
        return scores(trainer, task, split, examples=run.test_examples)
