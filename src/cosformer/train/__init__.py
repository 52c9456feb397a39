"""cosformer train: one run, model + task + arguments -> a model, its scores and everything needed to go on or do it again.

OUT/run.json          the settings, as given            OUT/checkpoint-N/    the last and the best, to resume from
OUT/resolved.json     all of them, and the versions     OUT/config.json ...  the best model, as from_pretrained reads it
OUT/metrics.jsonl     what was logged                   OUT/result.json      the final scores; there when the run is finished

The same command works under torchrun: every process runs this code, and the first one writes.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.utils.data import Dataset, Subset
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.utils import logging

from .. import tasks
from ..tasks.contract import Rows
from ..tasks.table import Table
from . import models
from .loop import UNWRITABLE, Interrupted, Loop, NotFinite, Stopped, last_checkpoint, remove_incomplete
from .progress import OWN, Bar, Interrupt, Metrics, clock, show, write
from .settings import DEFAULTS, Run, SettingsError, merge, parse, parser

SPREAD = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
    "fsdp",
    "fsdp_config",
)

__all__ = ["Interrupted", "NotFinite", "Run", "SettingsError", "Stopped", "train"]


def train(run: Run, *, resume: bool = False, watch: TrainerCallback | None = None) -> dict[str, Any]:
    """Carry out a run and return its result; a finished one is not done again.

    `resume` goes on from the last complete checkpoint of `run.out`, or begins if there is none. `watch` is shown the progress
    in the place of a bar. Raises `SettingsError` where a setting cannot be, and `Stopped` where training cannot go on;
    `Interrupted` is a `Stopped`.
    """
    out = Path(run.out)
    if (out / "run.json").exists() and not resume:
        raise SettingsError(f"{out} already holds a run; go on with --resume, or choose another --out")
    if not (out / "run.json").exists() and any(out.glob("checkpoint-*")):
        raise SettingsError(
            f"{out} holds checkpoints of something else (there is no run.json); choose another --out"
        )
    if (out / "run.json").exists() and (difference := first_difference(Run.load(out / "run.json"), run)):
        raise SettingsError(f"{out} holds another run: {difference}")
    if (out / "result.json").exists():
        return json.loads((out / "result.json").read_text())
    processes = PartialState(cpu=not torch.cuda.is_available())
    with (
        processes.main_process_first()
    ):  # it prepares the data, the others find it; all have looked at the folder by then
        task = build_task(run)
    new = processes.is_main_process and not (out / "run.json").exists()
    if new:
        with refused(OSError, "out"):
            out.mkdir(parents=True, exist_ok=True)
            run.save(out / "run.json")
    try:
        start = run.start if run.pretrain is None else pretrain(run, task, watch=watch)
        return _train(run, task, start=start, watch=watch)
    except SettingsError:
        if new:  # it never was a run; the next attempt finds the folder free
            (out / "run.json").unlink()
        raise


@contextmanager
def refused(errors: Any, what: str) -> Iterator[None]:
    """What a setting made others raise, as a SettingsError that names it."""
    try:
        yield
    except (SettingsError, tasks.DataError):
        raise
    except errors as error:
        raise SettingsError(f"{what}: {' '.join(str(error).split())}") from error


def build_task(run: Run) -> tasks.Task:
    with refused((ValueError, TypeError, OSError), f"task {run.task!r}"):
        return tasks.build(run.task, **run.task_settings)


def pretrain(run: Run, task: tasks.Task, *, watch: TrainerCallback | None) -> str:
    """Masked pre-training on the task's own inputs; where its model is."""
    out = Path(run.out) / "pretrain"
    first = dataclasses.replace(
        run,
        out=str(out),
        training=run.training | (run.pretrain or {}),
        pretrain=None,
        about=f"pre-training of: {run.about}",
    )
    if not (out / "result.json").exists():
        with refused(ValueError, "pretrain"):
            before = tasks.pretraining(task, seed=first.training.get("seed", DEFAULTS["seed"]))
        out.mkdir(parents=True, exist_ok=True)
        _train(first, before, start=run.start, watch=watch)
    return str(out)


def _train(run: Run, task: tasks.Task, *, start: str | None, watch: TrainerCallback | None) -> dict[str, Any]:
    out = Path(run.out)
    began = time.perf_counter()
    with Interrupt() as interrupt:
        model = new_model(run, task, start=start)
        metrics = Metrics(out / "metrics.jsonl")
        trainer = trainer_of(run, task, model, [interrupt, metrics, watch or Bar()])
        if (
            getattr(model.config, "pooling", None) == "normed-mean"
            and trainer.args.train_batch_size * trainer.args.world_size == 1
        ):
            raise SettingsError(
                "model.pooling=normed-mean normalises over a batch; --per_device_train_batch_size must be 2 or more"
            )
        first = trainer.is_world_process_zero()
        if first:
            remove_incomplete(out)
            if watch is None:
                announce(run, task, model)
        trainer.accelerator.wait_for_everyone()
        last = last_checkpoint(out)
        if last is not None:
            check_batch(out, trainer)
        trainer.args.eval_on_start &= last is None  # the start is behind
        try:
            if first:
                write(
                    out / "resolved.json",
                    json.dumps(resolved(run, task, trainer, last), indent=1, default=str) + "\n",
                )
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
            if interrupt.asked is not None and trainer.state.global_step < trainer.state.max_steps:
                at = f"interrupted by {interrupt.asked} at step {trainer.state.global_step}"
                raise Interrupted(f"{at}; {trainer.what_is_left()}")
            trainer.save_model(str(out))
            found = {
                split: scores(trainer, task, split, examples=run.test_examples)
                for split in ("validation", "test")
            }
            result = {
                "task": task.name,
                "mixer": run.mixer,
                "metric": task.metric,
                "greater_is_better": task.greater_is_better,
                **found,
                "best_step": trainer.state.best_global_step,
                "steps": trainer.state.global_step,
                "tokens": trainer.state.num_input_tokens_seen,
                "seconds": round(
                    metrics.seconds + time.perf_counter() - began, 1
                ),  # and those before it was resumed
                "parameters": models.parameters(model),
            }
            if first:
                write(out / "result.json", json.dumps(result, indent=1) + "\n")
            if (
                interrupt.asked is not None
            ):  # during the last evaluation; what comes after this run must not begin
                raise Interrupted(
                    f"interrupted by {interrupt.asked} after the last step; the run in {out} is complete"
                )
        except UNWRITABLE as error:
            raise Stopped(f"{error}; {trainer.what_is_left()}") from error
    return result


def check_batch(out: Path, trainer: Loop) -> None:
    """A run may go on with another number of processes, but not with other batches."""
    before, now = (
        json.loads((out / "resolved.json").read_text())["batch"],
        trainer.get_total_train_batch_size(trainer.args),
    )
    if before != now:
        raise SettingsError(
            f"{out} was trained with {before} examples a step, now it would be {now}; per_device_train_batch_size x "
            f"gradient_accumulation_steps x {trainer.args.world_size} process(es) must be {before}"
        )


def resolved(run: Run, task: tasks.Task, trainer: Loop, last: Path | None) -> dict[str, Any]:
    """Everything a run depends on, defaults included, to be read by people."""
    packages = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")
    return {
        "run": run.plain(),
        "task": dict(task.settings),
        "model": trainer.model.config.to_dict(),
        "training": trainer.args.to_dict(),
        "processes": trainer.args.world_size,
        "batch": trainer.get_total_train_batch_size(trainer.args),
        "device": str(trainer.args.device),
        "resumed_from": None if last is None else last.name,
        "versions": {"cosformer": version("cosformer"), "python": platform.python_version()}
        | {p: version(p) for p in packages},
        "machine": platform.platform(),
    }


def trainer_of(run: Run, task: tasks.Task, model: PreTrainedModel, callbacks: list[TrainerCallback]) -> Loop:
    """The Trainer of a run, ready to train or to evaluate."""
    given = DEFAULTS | run.training
    if "num_train_epochs" in run.training and "max_steps" not in run.training:
        given["max_steps"] = -1  # or our default would win
    steps, batch = given["max_steps"], given["per_device_train_batch_size"]
    keep = given.pop("save_total_limit", 2)
    if given.get("eval_strategy", "steps") == "steps":
        given.setdefault("eval_steps", max(1, steps // 10) if steps > 0 else 0.1)
        given.setdefault("save_steps", given["eval_steps"])
    given = {
        "eval_strategy": "steps",
        "save_strategy": given.get("eval_strategy", "steps")
        if given.get("eval_strategy") != "no"
        else "steps",
        "load_best_model_at_end": "no" not in (given.get("eval_strategy"), given.get("save_strategy")),
        "metric_for_best_model": task.metric,
        "greater_is_better": task.greater_is_better,
        "per_device_eval_batch_size": batch,
        "data_seed": given["seed"],  # or the order of the data would depend on the number of processes
        "dataloader_drop_last": len(task.train)
        >= batch * PartialState().num_processes,  # batches of one size, for the same reason
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # a NaN is to be seen
        "remove_unused_columns": False,  # collate knows what a model reads
        "include_num_input_tokens_seen": "all",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "report_to": ["tensorboard"] if importlib.util.find_spec("tensorboard") else [],
        "use_cpu": not torch.cuda.is_available(),
        **given,
    }
    with refused((ValueError, TypeError, ImportError), "training arguments"):
        args = Seq2SeqTrainingArguments(output_dir=run.out, **given)
        trainer = Loop(
            model=model,
            args=args,
            train_dataset=task.train,
            eval_dataset=part(task.validation, run.eval_examples),
            data_collator=task.collate,
            compute_metrics=task.compute_metrics,
            preprocess_logits_for_metrics=task.preprocess_logits_for_metrics,
            processing_class=task.tokenizer,
            callbacks=callbacks,
            keep=keep,
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def new_model(run: Run, task: tasks.Task, *, start: str | None) -> PreTrainedModel:
    """The run's model: new, or a saved one with the head this task needs."""
    with refused(
        (ValueError, TypeError, OSError), f"model {run.mixer!r}" if start is None else f"start {start}"
    ):
        known = models.CLASSES[task.kind].config_class()
        if unknown := [name for name in run.model_fields if not hasattr(known, name)]:
            raise SettingsError(f"model has no field {unknown[0]!r}; see {type(known).__name__}")
        seed = run.training.get("seed", DEFAULTS["seed"])
        if start is None:
            return models.build(task, mixer=run.mixer, size=run.size, fields=run.model_fields, seed=seed)
        check_start(start, task)
        torch.manual_seed(seed)
        fields: dict[str, Any] = dict(run.model_fields)
        if task.num_labels is not None:
            fields |= {
                "num_labels": task.num_labels,
                "id2label": dict(enumerate(task.labels)),
                "ignore_mismatched_sizes": True,
            }
            fields["label2id"] = {label: i for i, label in enumerate(task.labels)}
        return models.load(start, task.kind, **fields)


def check_start(start: str, task: tasks.Task) -> None:
    """Refuse a saved model that cannot read this task's input."""
    if not (Path(start) / "config.json").exists():
        raise SettingsError(f"{start} holds no model (config.json)")
    saved, needed = (
        AutoConfig.from_pretrained(start, local_files_only=True),
        models.CLASSES[task.kind].config_class,
    )
    if saved.model_type != needed.model_type:
        raise SettingsError(
            f"{start} is a {saved.model_type} model; task {task.name!r} needs a {needed.model_type} model"
        )
    advice = f"give the tokenizer it was trained with (--tokenizer {start})"
    if saved.vocab_size != task.vocab_size:
        raise SettingsError(
            f"{start} has a vocabulary of {saved.vocab_size}, the task one of {task.vocab_size}; {advice}"
        )
    has_tokens = task.tokenizer is not None and (Path(start) / "tokenizer.json").exists()
    if (
        has_tokens
        and AutoTokenizer.from_pretrained(start, local_files_only=True).get_vocab()
        != task.tokenizer.get_vocab()
    ):
        raise SettingsError(f"{start} has another vocabulary than the task, of the same size; {advice}")
    if saved.max_position_embeddings < task.max_length:
        raise SettingsError(
            f"{start} has {saved.max_position_embeddings} positions; --length {task.max_length} is more"
        )


def announce(run: Run, task: tasks.Task, model) -> None:
    """Say what is about to be trained."""
    count, more = models.parameters(model), ""
    if run.start is None:
        share = models.parameters_beside_softmax(model, task, size=run.size, fields=run.model_fields)
        more = f" ({share:+.1%} beside softmax)"
        if task.published is not None and share > task.published.extra_parameters:
            more += f": more than the {task.published.extra_parameters:.0%} this benchmark allows"
    sets = ", ".join(f"{len(getattr(task, split)):,} {split}" for split in tasks.SPLITS)
    print(
        f"{task.name}, {run.mixer}: {count:,} parameters{more}; {sets} examples of up to {task.max_length:,} tokens",
        flush=True,
    )
    if isinstance(task.train, Table) and task.tokenizer is not None:
        full = int((task.train.lengths("input_ids") == task.max_length).sum())
        if full:
            print(
                f"{full:,} training texts reach {task.max_length:,} tokens, where longer ones are cut; --length sets it",
                flush=True,
            )


def scores(trainer: Loop, task: tasks.Task, split: str, *, examples: int | None = None) -> dict[str, float]:
    """The scores of the trainer's model on a split."""
    dataset = part(getattr(task, split), examples)
    found: dict[str, float] = {}
    for generate in (
        (False, True) if task.kind == "seq2seq" else (False,)
    ):  # a writer is scored word by word, and as it writes
        trainer.args.predict_with_generate, trainer.args.generation_max_length = (
            generate,
            task.max_target_length,
        )
        found |= trainer.evaluate(dataset, metric_key_prefix=split)
    return {
        key.removeprefix(f"{split}_"): found[key]
        for key in found
        if key.startswith(split) and not key.endswith(OWN)
    }


def part(dataset: Rows, count: int | None) -> Dataset:
    """`count` examples spread evenly over a set; all of it if None."""
    if count is None or count >= len(dataset):
        return dataset
    return Subset(dataset, [i * len(dataset) // count for i in range(count)])


def first_difference(saved: Run, given: Run) -> str | None:
    """The first setting in which two runs differ, besides where they are and how their batches are spread over processes."""
    a, b = saved.plain(), given.plain()
    for run in (a, b):
        run["training"] = {key: value for key, value in run["training"].items() if key not in SPREAD}
    name = next((name for name in a if name != "out" and a[name] != b[name]), None)
    return (
        name
        and f"its {name} is {a[name]!r}, not {b[name]!r}; to train it further: --start {given.out} and another --out"
    )


def main(argv: list[str]) -> None:
    p = parser("cosformer train", "Train any mixer on a task.", task="?")
    p.add_argument("--start", metavar="DIR", help="a saved model to start from, such as a pre-trained one")
    p.add_argument(
        "--pretrain-first", action="store_true", help="masked pre-training on the task's own inputs before it"
    )
    p.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    p.add_argument(
        "--dry-run",
        action="store_true",
        help="check the settings: all shapes, two small steps; data is not needed",
    )
    command(p, argv)


def quieten() -> None:
    """transformers' own remarks and bars are about code, not about a run."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def one_line(prog: str) -> Iterator[None]:
    """What stops a command, as one line of text and an exit code."""
    try:
        yield
    except (SettingsError, tasks.DataError, Stopped) as error:
        code, said = 130 if isinstance(error, Interrupted) else 1, str(error)
    except KeyboardInterrupt:
        code, said = 130, "stopped at once"
    else:
        return
    if os.environ.get("RANK", "0") == "0":  # one of the processes speaks
        print(f"{prog}: {said}", file=sys.stderr)
    raise SystemExit(code)


def command(p: argparse.ArgumentParser, argv: list[str], *, task: str | None = None) -> None:
    quieten()
    with one_line(p.prog):
        given, training = parse(p, argv)
        settings = merge(given, training, task=task)
        if getattr(given, "pretrain_first", False):
            settings["pretrain"] = settings.get("pretrain") or {}
        run = Run(**settings)
        if getattr(given, "dry_run", False):
            from .dryrun import dry_run

            return dry_run(run)
        result = train(run, resume=getattr(given, "resume", False))
    if PartialState().is_main_process:
        print(summary(result, run.out))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def summary(result: dict[str, Any], out: str) -> str:
    lines = [f"{split:<10} {show(result[split])}" for split in ("validation", "test")]
    took = f"{result['steps']:,} steps, {result['tokens']:,} tokens, {clock(result['seconds'])}"
    return "\n".join([*lines, f"{took}; the model is in {out}"])
