"""What a run is: its settings, from a recipe (TOML) and the command line, as one object that is saved beside the model.

about, mixer, size, out, start, eval_examples, test_examples: as on the command line
[task]      name, and the settings of that task (cosformer.tasks.settings): data, length ...
[model]     fields of the model's config
[train]     arguments of transformers' Seq2SeqTrainingArguments
[pretrain]  the same, for masked pre-training on the task's own inputs before it
"""

import argparse
import dataclasses
import json
import tomllib
import typing
from pathlib import Path
from typing import Any

from .. import tasks
from . import models
from .progress import write

DEFAULTS: dict[str, Any] = {  # of ours, where transformers' are for large runs on GPUs
    "max_steps": 1000,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
    "logging_steps": 10,
    "seed": 0,
}


class SettingsError(ValueError):
    """A setting that cannot be; the message names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run. What is not given has the task's, the size's or `DEFAULTS`' value."""

    task: str
    out: str
    mixer: str = "cosformer"
    size: str = "tiny"
    start: str | None = None  # a saved model to start from
    eval_examples: int | None = (
        None  # validate on this many examples while training; the final scores take all
    )
    test_examples: int | None = None  # and the final scores on this many
    about: str = ""
    task_settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    model_fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    pretrain: dict[str, Any] | None = None  # a dict, even an empty one: pre-train first

    def __post_init__(self):
        for name in ("task", "out", "mixer", "size", "about"):
            check_type(name, getattr(self, name), str)
        check_type("start", self.start, str | None)
        if self.task not in tasks.names():
            raise SettingsError(f"task is {self.task!r}; one of {', '.join(tasks.names())}")
        try:
            models.mixer_fields(self.mixer)
        except ValueError as error:
            raise SettingsError(str(error)) from None
        if self.size not in (*models.SIZES, "published"):
            raise SettingsError(f"size is {self.size!r}; one of {', '.join(models.SIZES)}, published")
        known = tasks.settings(self.task)
        if unknown := [key for key in self.task_settings if key not in known]:
            raise SettingsError(
                f"task {self.task!r} has no setting {unknown[0]!r}; it takes {', '.join(known)}"
            )
        types = training_types()
        for table in (self.training, self.pretrain or {}):
            if unknown := [key for key in table if key not in types]:
                raise SettingsError(
                    f"{unknown[0]!r} is no argument of transformers' Seq2SeqTrainingArguments"
                )
            for key, value in table.items():
                check_type(key, value, types[key])
            if "output_dir" in table:
                raise SettingsError("output_dir is the run's --out; leave it out")
            if table.get("max_steps", 1) < 1 and "num_train_epochs" not in table:
                raise SettingsError(
                    f"max_steps is {table['max_steps']}; it must be at least 1, or give num_train_epochs instead"
                )
        for name in ("eval_examples", "test_examples"):
            value = getattr(self, name)
            check_type(name, value, int | None)
            if value is not None and value < 1:
                raise SettingsError(f"{name} is {value}; it must be at least 1")

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


def training_types() -> dict[str, Any]:
    """The arguments of transformers' Seq2SeqTrainingArguments and what each may be."""
    from transformers import Seq2SeqTrainingArguments

    hints = typing.get_type_hints(Seq2SeqTrainingArguments)  # not field.type, which HfArgumentParser rewrites
    hints["fsdp"] = bool | str | None  # said to be a string, and taken as a bool
    return {
        field.name: hints[field.name] for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init
    }


def check_type(name: str, value: Any, kind: Any) -> None:
    """Refuse a string where a number is meant, and the like; what is more than plain types is left to its owner."""
    kinds = typing.get_args(kind) or (kind,)
    if not all(k in (int, float, bool, str, type(None)) for k in kinds):
        return
    accepted = {*kinds, *({int} if float in kinds else set())}
    if type(value) not in accepted:
        names = " or ".join(sorted(k.__name__ for k in kinds if k is not type(None)))
        raise SettingsError(f"{name} is {value!r}; it must be {names}")


KEYS = ("about", "mixer", "size", "out", "start", "eval_examples", "test_examples")
TABLES = {"task": "task_settings", "model": "model_fields", "train": "training", "pretrain": "pretrain"}


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


def parser(prog: str, description: str, *, task: str | None) -> argparse.ArgumentParser:
    """Our arguments; `task` says whether the task is asked for ("?": a recipe may name it)."""
    p = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="Every argument of transformers' Seq2SeqTrainingArguments is taken, too: --max_steps 500 --learning_rate 3e-4 "
        "--per_device_train_batch_size 16 --gradient_accumulation_steps 4 --bf16 ...",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    if task:
        p.add_argument("task", nargs=task, help=f"one of {', '.join(tasks.names())}")
    p.add_argument("--recipe", type=Path, help="a TOML file with the same settings; the command line wins")
    p.add_argument("--mixer", help=f"one of {', '.join(models.names())}; softmax+rope (default: cosformer)")
    p.add_argument(
        "--size", help=f"{', '.join(f'{name} ({size})' for name, size in models.SIZES.items())}, published"
    )
    p.add_argument(
        "--data",
        help="a text file, CSV, TSV or JSONL file, or a folder of them (default: what the task makes itself)",
    )
    p.add_argument("--length", type=int, help="tokens a sequence has at most")
    p.add_argument("--tokenizer", help='"bytes" (default), "bpe:8000" (trained on the data) or a path')
    p.add_argument("--out", help="the run's folder (default: runs/TASK-MIXER)")
    p.add_argument("--eval-examples", type=int, help="validate on this many examples while training")
    p.add_argument("--test-examples", type=int, help="take the final scores on this many examples")
    p.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="task.KEY, model.KEY, train.KEY or pretrain.KEY, as in a recipe",
    )
    return p


def parse(p: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Our arguments, and what was said of transformers'. Theirs are taken out first, or a value of theirs could be our task."""
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    theirs = HfArgumentParser(
        Seq2SeqTrainingArguments,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        exit_on_error=False,
    )
    for action in theirs._actions:
        action.default, action.required = argparse.SUPPRESS, False
    try:
        training, rest = theirs.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise SettingsError(str(error)) from None
    given, unknown = p.parse_known_args(rest)
    if unknown:
        raise SettingsError(f"unknown argument {unknown[0]!r}; see --help")
    return given, vars(training)


def merge(given: argparse.Namespace, training: dict[str, Any], *, task: str | None = None) -> dict[str, Any]:
    """The settings of a recipe, if there is one, under those of the command line; `task` if neither names one."""
    said = vars(given)
    found = read_recipe(said["recipe"]) if "recipe" in said else {}
    found |= {key: said[key] for key in (*KEYS, "task") if key in said}
    found.setdefault("task", task)
    for key in ("data", "length", "tokenizer"):
        if key in said:
            found.setdefault("task_settings", {})[key] = said[key]
    for assignment in said.get("set", []):
        place, equals, value = assignment.partition("=")
        table, dot, key = place.partition(".")
        if not (equals and dot and key and table in TABLES):
            raise SettingsError(
                f"--set {assignment}: it takes {' or '.join(f'{name}.KEY=VALUE' for name in TABLES)}"
            )
        if found.get(TABLES[table]) is None:
            found[TABLES[table]] = {}
        found[TABLES[table]][key] = _value(value)
    found["training"] = found.get("training", {}) | training
    if found["task"] is None:
        raise SettingsError("no task: name one, or give a --recipe that does")
    found.setdefault("out", f"runs/{found['task']}-{found.get('mixer', 'cosformer')}")
    return found


def _value(text: str) -> Any:
    """A TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text
