"""cosformer train, finetune and evaluate: their arguments, what they print, and each stop as one line."""

import argparse
import contextlib
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import HfArgumentParser, Seq2SeqTrainingArguments

from .. import mixers, tasks
from ..hf import CosformerConfig
from . import models
from .alive import Lost
from .build import evaluate
from .checkpoints import last_checkpoint
from .dryrun import dry_run
from .malloc import keep_memory
from .progress import clock, quieten, say, show
from .run import train
from .settings import KEYS, TABLES, Run, SettingsError, read_recipe
from .trainer import Interrupted, Stopped

MODEL = "a folder that cosformer train wrote, or a checkpoint in it"
THEIRS = (
    "Every argument of transformers' Seq2SeqTrainingArguments is taken, too: --max_steps 500 "
    "--learning_rate 3e-4 --per_device_train_batch_size 16 --gradient_accumulation_steps 4 --bf16 ..."
)
# Those of them that matter when nothing is trained.
SCORING = ("per_device_eval_batch_size", "eval_accumulation_steps", "generation_num_beams",
           "dataloader_num_workers", "bf16", "bf16_full_eval", "fp16", "fp16_full_eval", "tf32",
           "torch_compile", "use_cpu")  # fmt: skip


def train_verb(argv: list[str]) -> None:
    train_and_say(train_parser(), argv)


def finetune_verb(argv: list[str]) -> None:
    says = "Train a saved model further on another task, its body with a new head; mlm -> classify."
    p = training_parser("cosformer finetune", says)
    p.add_argument("start", metavar="MODEL", help=MODEL)
    p.add_argument("task", nargs="?", help="classify by default")
    train_and_say(p, argv, task="classify")


def evaluate_verb(argv: list[str]) -> None:
    p = parser("cosformer evaluate", "Score a saved model on its task's sets, or on other data.")
    p.epilog = f"Of transformers' Seq2SeqTrainingArguments it takes --{', --'.join(SCORING)}."
    p.add_argument("model", metavar="MODEL", type=Path, help=MODEL)
    p.add_argument("task", nargs="?", help="another task than the one it was trained on")
    p.add_argument("--split", choices=tasks.SPLITS, default="test", help="a part of the data (default: test)")
    p.add_argument("--json", action="store_true", default=False, help="print one JSON object")
    quieten()
    with one_line(p.prog):
        given, training = parse(p, argv)
        run = saved_run(given, training)
        found = evaluate(run, given.model, split=given.split, other=is_other(run, run_of(given.model)))
    lines = "\n".join(f"{key:<20} {value:.6g}" for key, value in found.items())
    say(json.dumps(found) if given.json else lines, to=sys.stdout)


# An argument's dest is its setting: a field of `Run` or, with a dot, TABLE.KEY.
# fmt: off
def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The arguments all three commands take."""
    none = argparse.SUPPRESS
    p = argparse.ArgumentParser(prog=prog, description=description, argument_default=none, allow_abbrev=False)
    add = p.add_argument
    add("--data", dest="task.data", metavar="DATA",
        help="a text, CSV, TSV or JSONL file, or a folder (default: the task's own)")
    add("--length", dest="task.length", metavar="N", type=int, help="tokens a sequence has at most")
    add("--tokenizer", dest="task.tokenizer", metavar="TOKENIZER",
        help='"bpe" (default: made from the data), "bpe:8000", "bytes" or a path')
    add("--skip-bad-rows", dest="task.skip_bad_rows", type=int, metavar="N",
        help="leave out up to N rows that cannot be read (default: 0, the first is an error)")
    add("--sequence-parallel", type=int, metavar="W",
        help="processes that share each sequence, under torchrun (default: 1)")
    add("--test-examples", type=int, metavar="N", help="take the final scores on this many examples")
    add("--set", action="append", metavar="TABLE.KEY=VALUE", help="any other setting, as in a recipe")
    return p


def training_parser(prog: str, description: str) -> argparse.ArgumentParser:
    p = parser(prog, description)
    p.epilog = THEIRS
    add = p.add_argument
    add("--recipe", type=Path, help="a TOML file with the same settings; the command line wins")
    add("--out", help="the run's folder (default: runs/TASK-MIXER)")
    add("--loss", dest="model.loss", metavar="LOSS",
        help="softmax (default), chunked: the same in less memory, or one-vs-each: a bound whose"
        " cost does not grow with the vocabulary")
    add("--loss-samples", dest="model.loss_samples", type=int, metavar="N",
        help=f"classes one-vs-each draws (default: {CosformerConfig.loss_samples})")
    add("--eval-examples", type=int, metavar="N",
        help="validate on this many examples while training (default: for less than a tenth of the time)")
    add("--resume", action="store_true",
        help="go on from the newest whole checkpoint in --out; with a larger --max_steps a finished run, too")
    return p


def train_parser() -> argparse.ArgumentParser:
    p = training_parser("cosformer train", "Train any mixer on a task.")
    add = p.add_argument
    add("task", nargs="?", help=f"one of {', '.join(tasks.names())}")
    add("--mixer", help="what mixes tokens: " + mixers.SAID)
    sizes = ", ".join(f"{name} ({size})" for name, size in models.SIZES.items())
    add("--size", help=f"{sizes}, published (default: tiny)")
    add("--start", metavar="DIR", help="a saved model to start from, such as a pre-trained one")
    add("--pretrain-first", action="store_true", help="first masked pre-training on the task's inputs")
    add("--dry-run", action="store_true", help="check all shapes, take two steps; needs no data")
    return p
# fmt: on


def parse(p: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Our arguments, and transformers'. Theirs are parsed first: their values could pass for our task."""
    none = argparse.SUPPRESS
    options: dict[str, Any] = {"allow_abbrev": False, "add_help": False, "exit_on_error": False}
    theirs = HfArgumentParser(Seq2SeqTrainingArguments, argument_default=none, **options)
    for action in theirs._actions:
        action.default, action.required = none, False
    try:
        training, rest = theirs.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise SettingsError(str(error)) from None
    given, unknown = p.parse_known_args(rest)
    if unknown:
        raise SettingsError(f"unknown argument {unknown[0]!r}; see --help")
    return given, vars(training)


def merge(given: argparse.Namespace, training: dict[str, Any], *, task: str | None = None) -> dict[str, Any]:
    """A recipe's settings, if any, overridden by the command line's; `task` if neither names one."""
    options = vars(given)
    chosen = read_recipe(options["recipe"]) if "recipe" in options else {}
    chosen |= {key: options[key] for key in (*KEYS, "task") if key in options}
    chosen.setdefault("task", task)
    if chosen["task"] is None:
        raise SettingsError("no task: name one, or give a --recipe that does")
    places = {place: value for place, value in options.items() if "." in place}
    for place, value in (places | dict(map(assigned, options.get("set", [])))).items():
        table, _, key = place.partition(".")
        chosen[TABLES[table]] = (chosen.get(TABLES[table]) or {}) | {key: value}
    if options.get("pretrain_first"):
        chosen["pretrain"] = chosen.get("pretrain") or {}
    chosen["training"] = chosen.get("training", {}) | training
    if chosen.get("start") and (saved := run_of(Path(chosen["start"]))):
        for key in ("mixer", "size"):
            its = getattr(saved, key)
            if chosen.setdefault(key, its) != its:
                raise SettingsError(f"{key} is {chosen[key]!r}, but {chosen['start']} has {its!r}: leave it")
    chosen.setdefault("out", f"runs/{chosen['task']}-{chosen.get('mixer', 'cosformer')}")
    return chosen


def assigned(text: str) -> tuple[str, Any]:
    """TABLE.KEY=VALUE -> (TABLE.KEY, value): a TOML value, or one of JSON, or else the bare text."""
    place, equals, value = text.partition("=")
    table, _, key = place.partition(".")
    if not (equals and key and table in TABLES):
        accepted = " or ".join(f"{name}.KEY=VALUE" for name in TABLES)
        raise SettingsError(f"--set {text}: it takes {accepted}")
    for read in (lambda text: tomllib.loads(f"x = {text}")["x"], json.loads):
        with contextlib.suppress(ValueError):
            return place, read(value)
    return place, value


def run_of(model: Path) -> Run | None:
    """The run that left a model or a checkpoint, if any."""
    folder = model.parent if model.name.startswith("checkpoint-") else model
    return Run.load(folder / "run.json") if (folder / "run.json").exists() else None


def saved_run(given: argparse.Namespace, training: dict[str, Any]) -> Run:
    """The run a model comes from, with the command line's changes."""
    if not (given.model / "config.json").exists():
        saved = last_checkpoint(given.model) if given.model.is_dir() else None
        way = f": its run is not finished, but {saved} is a model" if saved else ""
        raise SettingsError(f"{given.model} holds no model (config.json){way}")
    if idle := [name for name in training if name not in SCORING]:
        raise SettingsError(f"--{idle[0]} changes nothing where nothing is trained; see --help")
    run = run_of(given.model)
    if run is None and "task" not in given:
        raise SettingsError(f"{given.model} has no run.json, so name the task")
    chosen = merge(given, training, task=None if run is None else run.task)
    if idle := [table for table in ("model_fields", "pretrain") if table in chosen]:
        raise SettingsError(f"--set takes task.KEY=VALUE here: {idle[0]} are of training")
    if run is not None and chosen["task"] == run.task:
        kept = dict(run.task_settings)
        if str(kept.get("tokenizer")).startswith("bpe"):  # it is saved beside the model, and need not be made
            del kept["tokenizer"]
        chosen["task_settings"] = kept | chosen.get("task_settings", {})
        chosen["training"] = {key: run.training[key] for key in run.training if "fsdp" not in key} | training
        chosen.setdefault("test_examples", run.test_examples)
    return Run(**chosen)


def is_other(run: Run, trained: Run | None) -> bool:
    """Whether a run's data lies elsewhere than what a model was trained on."""
    data = run.task_settings.get("data")
    own = None if trained is None else trained.task_settings.get("data")
    return data is not None and (own is None or Path(data).resolve() != Path(own).resolve())


def train_and_say(p: argparse.ArgumentParser, argv: list[str], *, task: str | None = None) -> None:
    quieten()
    with one_line(p.prog):
        given, training = parse(p, argv)
        run = Run(**merge(given, training, task=task))
        if "dry_run" in given:
            dry_run(run)
            return
        keep_memory()
        result = train(run, resume="resume" in given)
    if PartialState().is_main_process:
        for split in ("validation", "test"):
            print(f"{split:<10} {show(result[split])}")
        took = f"{result['steps']:,} steps, {result['tokens']:,} tokens, {clock(result['seconds'])}"
        print(f"{took}; the model is in {run.out}", *remarks(result, run.out), sep="\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def remarks(result: dict[str, Any], out: str) -> list[str]:
    """What must not be overlooked in a result."""
    lines = list(result["left_out"])
    if result["examples"] < result["of"]:
        part = f"{result['examples']:,} of {result['of']:,} test examples, as suits a run so short"
        lines.append(f"scored on {part}; cosformer evaluate {out} takes all")
    if (usual := result["most_frequent"]) is not None:
        score, noise = result["test"]["accuracy"], 2 * (usual * (1 - usual) / result["examples"]) ** 0.5
        if score <= usual + noise:
            told = f"IT HAS NOT LEARNED: accuracy {score:.1%} is no better than the most frequent class alone"
            told += f" ({usual:.1%})"
            if score > usual:
                chance = f"on {result['examples']:,} test examples chance adds up to {noise:.1%}; score more"
                told = (
                    f"accuracy {score:.1%} may be luck: the most frequent class has {usual:.1%}, and {chance}"
                )
            lines.append(f"{told}. Train longer, or with another --learning_rate")
    return lines


@contextlib.contextmanager
def one_line(prog: str) -> Iterator[None]:
    """Turns what stops a command into one line of text and an exit code."""
    try:
        yield
    except (SettingsError, tasks.DataError, Stopped, Lost) as error:
        code, message = 130 if isinstance(error, Interrupted) else 1, str(error)
    except KeyboardInterrupt:
        code, message = 130, "stopped at once"
    else:
        return
    say(f"{prog}: {message}")
    raise SystemExit(code)
