"""What a run is: its settings, from a recipe (TOML) or the command line, in one object saved with the model.

about, mixer, size, out, start, eval_examples, test_examples: as on the command line
[task]      name, and the settings of that task (cosformer.tasks.settings): data, length ...
[model]     fields of the model's config
[train]     arguments of transformers' Seq2SeqTrainingArguments
[pretrain]  the same, for masked pre-training on the task's own inputs, which comes first
"""

import dataclasses
import json
import math
import tomllib
import typing
from pathlib import Path
from typing import Any

from transformers import Seq2SeqTrainingArguments

from .. import mixers, tasks
from ..hf.checks import wanted
from ..seal import write
from . import models

DEFAULTS: dict[str, Any] = {  # ours; transformers' are for large runs on GPUs
    "max_steps": 1000,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
    "logging_steps": 10,
    "seed": 0,
}
TOKENS, ROWS = 4096, (8, 64)  # of the default batch: this many tokens, if that is within this range of rows
RANGES: dict[str, tuple[float, float]] = {  # of transformers' arguments, which it checks too late or never
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), (1, math.inf)),
    "gradient_accumulation_steps": (1, math.inf),
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm", "adam_epsilon"), (0, math.inf)),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), (0, 1)),
}
KEYS = ("about", "mixer", "size", "out", "start", "eval_examples", "test_examples", "sequence_parallel")
TABLES = {"task": "task_settings", "model": "model_fields", "train": "training", "pretrain": "pretrain"}


class SettingsError(ValueError):
    """An invalid setting; the message names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run. What is not given comes from the task, the size or `DEFAULTS`."""

    task: str
    out: str
    mixer: str = "cosformer"
    size: str = "tiny"
    start: str | None = None  # a saved model to start from
    eval_examples: int | None = None  # validate on this many; None: build.eval_examples_while_training
    test_examples: int | None = None  # take the final scores on this many; None: build.final_examples
    sequence_parallel: int = 1  # processes that share each sequence
    about: str = ""
    task_settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    model_fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    pretrain: dict[str, Any] | None = None  # any dict, even an empty one: pre-train first

    def __post_init__(self):
        for name, kind in typing.get_type_hints(type(self)).items():
            check_type(name, getattr(self, name), kind)
        if self.size not in (*models.SIZES, "published"):
            raise SettingsError(f"size is {self.size!r}; one of {', '.join(models.SIZES)}, published")
        try:
            mixers.pattern(self.mixer)
            tasks.check(self.task, self.task_settings)
        except (ValueError, TypeError) as error:
            raise SettingsError(str(error)) from None
        for name in ("eval_examples", "test_examples", "sequence_parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name} is {value}; it must be at least 1")
        for table in (self.training, self.pretrain or {}):
            check_training(table)

    @property
    def seed(self) -> int:
        return (DEFAULTS | self.training)["seed"]

    def batch(self, task: tasks.Task) -> int:
        """Rows per step and process: as asked for, else the more the shorter they are."""
        rows = min(ROWS[1], max(ROWS[0], TOKENS // task.max_length))
        return self.training.get("per_device_train_batch_size", rows)

    def plain(self) -> dict[str, Any]:
        """The settings as JSON gives them back: a tuple is a list, a path a string."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    def save(self, path: Path) -> None:
        write(path, json.dumps(self.plain(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Run":
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, json.JSONDecodeError) as error:
            raise SettingsError(f"{path} is no run of this version: {error}") from None


def check_type(name: str, value: Any, kind: Any) -> None:
    """Refuse a string for a number, and the like."""
    if asked := wanted(value, kind):
        raise SettingsError(f"{name} is {value!r}; it must be {asked}")


def check_training(table: dict[str, Any]) -> None:
    """Refuse what is not an argument of transformers' Seq2SeqTrainingArguments, or has the wrong type."""
    types = typing.get_type_hints(Seq2SeqTrainingArguments)  # not field.type, which HfArgumentParser rewrites
    types["fsdp"] = bool | str | None  # declared a string, but taken as a bool
    known = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init}
    for key, value in table.items():
        if key not in known:
            raise SettingsError(f"{key!r} is no argument of transformers' Seq2SeqTrainingArguments")
        check_type(key, value, types[key])
    if "output_dir" in table:
        raise SettingsError("output_dir is the run's --out; leave it out")
    for key, (least, below) in RANGES.items():
        value = table.get(key)
        if value is not None and not (least <= value and (value < below or below == math.inf)):
            accepted = f"at least {least:g}" + (f" and less than {below:g}" if below < math.inf else "")
            raise SettingsError(f"{key} is {value}; it must be {accepted}")
    if table.get("max_steps", 1) < 1 and "num_train_epochs" not in table:
        steps = table["max_steps"]
        raise SettingsError(f"max_steps is {steps}; it must be at least 1, or give num_train_epochs instead")


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe's settings as `Run` takes them."""
    try:
        recipe = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SettingsError(f"recipe {path}: there is no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"recipe {path}: {error}") from None
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        if key in TABLES and isinstance(value, dict):
            found[TABLES[key]] = value
        elif key in KEYS and not isinstance(value, dict):
            found[key] = value
        else:
            known = ", ".join([*KEYS, *(f"[{table}]" for table in TABLES)])
            raise SettingsError(f"recipe {path}: unknown {key!r}; it may have {known}")
    if "name" in (table := found.get("task_settings", {})):
        found["task"] = table.pop("name")
    return found
