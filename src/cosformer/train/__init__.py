"""cosformer train: one run, model + task + arguments -> a model, its scores and everything needed to go on or do it again.

OUT/run.json          the settings, resolved            OUT/checkpoint-N/    the last and the best, to resume from
OUT/metrics.jsonl     what was logged                   OUT/config.json ...  the best model, as from_pretrained reads it
OUT/result.json       the final scores; there when the run is finished
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from transformers import PreTrainedModel, PrinterCallback, Seq2SeqTrainingArguments, TrainerCallback
from transformers.utils import logging

from .. import models, tasks
from .loop import Loop, Stopped, last_checkpoint, remove_incomplete
from .progress import OWN, Bar, Interrupt, Metrics, clock, show
from .settings import DEFAULTS, Run, SettingsError, merge, parse, parser

__all__ = ["Run", "SettingsError", "Stopped", "train"]


def train(run: Run, *, resume: bool = False, watch: TrainerCallback | None = None) -> dict[str, Any]:
    """Carry out a run and return its result; a finished one is not done again.

    `resume` goes on from the last complete checkpoint of `run.out`, or begins if there is none. `watch` is shown the progress
    in the place of a bar. Raises `Stopped` where training cannot go on or was interrupted; it can then be resumed.
    """
    out = Path(run.out)
    if (out / "run.json").exists() and not resume:
        raise SettingsError(f"{out} already holds a run; resume it, or choose another folder")
    if resume and (out / "run.json").exists() and (saved := Run.load(out / "run.json")) != run:
        raise SettingsError(f"{out} holds another run: {difference(saved, run)}")
    if (out / "result.json").exists():
        return json.loads((out / "result.json").read_text())
    task = tasks.build(run.task, **run.task_settings)
    out.mkdir(parents=True, exist_ok=True)
    run.save(out / "run.json")
    start = run.start
    if run.pretrain is not None:
        start = pretrain(run, task, resume=resume, watch=watch)
    return _train(run, task, start=start, watch=watch)


def pretrain(run: Run, task: tasks.Task, *, resume: bool, watch: TrainerCallback | None) -> str:
    """Masked pre-training on the task's own inputs; where its model is."""
    out = Path(run.out) / "pretrain"
    first = dataclasses.replace(
        run, out=str(out), training=run.training | (run.pretrain or {}), pretrain=None, about=f"pre-training of: {run.about}"
    )
    if not (out / "result.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        _train(first, tasks.pretraining(task, seed=first.training.get("seed", DEFAULTS["seed"])), start=run.start, watch=watch)
    return str(out)


def _train(run: Run, task: tasks.Task, *, start: str | None, watch: TrainerCallback | None) -> dict[str, Any]:
    out = Path(run.out)
    remove_incomplete(out)
    began = time.perf_counter()
    with Interrupt() as interrupt:
        model = new_model(run, task, start=start)
        trainer = trainer_of(run, task, model, [interrupt, Metrics(out / "metrics.jsonl"), watch or Bar()])
        if trainer.is_world_process_zero() and watch is None:
            announce(run, task, trainer.model)
        last = last_checkpoint(out)
        trainer.args.eval_on_start &= last is None  # the start is behind
        try:
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
        except OSError as error:
            raise Stopped(f"{error}; {trainer.what_is_left()}") from error
        if interrupt.asked is not None and trainer.state.global_step < trainer.state.max_steps:
            raise Stopped(f"interrupted by {interrupt.asked} at step {trainer.state.global_step}; {trainer.what_is_left()}")
    trainer.save_model(str(out))
    found = {split: scores(trainer, task, split, examples=run.test_examples) for split in ("validation", "test")}
    result = {
        "task": task.name,
        "mixer": run.mixer,
        "metric": task.metric,
        "greater_is_better": task.greater_is_better,
        **found,
        "best_step": trainer.state.best_global_step,
        "steps": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "seconds": round(time.perf_counter() - began, 1),
        "parameters": models.parameters(trainer.model),
    }
    if trainer.is_world_process_zero():
        draft = out / "result.json.draft"
        draft.write_text(json.dumps(result, indent=1) + "\n")
        draft.rename(out / "result.json")
    return result


def trainer_of(run: Run, task: tasks.Task, model: PreTrainedModel, callbacks: list[TrainerCallback]) -> Loop:
    """The Trainer of a run, ready to train or to evaluate."""
    given = DEFAULTS | run.training
    given.setdefault("per_device_eval_batch_size", given["per_device_train_batch_size"])
    steps = given["max_steps"]
    keep = given.pop("save_total_limit", 2)
    if given.get("eval_strategy", "steps") == "steps":
        given.setdefault("eval_steps", max(1, steps // 10) if steps > 0 else 500)
        given.setdefault("save_steps", given["eval_steps"])
    given = {
        "eval_strategy": "steps",
        "load_best_model_at_end": given.get("eval_strategy", "steps") != "no",
        "metric_for_best_model": task.metric,
        "greater_is_better": task.greater_is_better,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # a NaN is to be seen
        "remove_unused_columns": False,  # collate knows what a model reads
        "include_num_input_tokens_seen": "all",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "report_to": ["tensorboard"] if have_tensorboard() else [],
        "use_cpu": not torch.cuda.is_available(),
        **given,
    }
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
    seed = run.training.get("seed", DEFAULTS["seed"])
    if start is None:
        return models.build(task, mixer=run.mixer, size=run.size, fields=run.model_fields, seed=seed)
    torch.manual_seed(seed)
    labels = {}
    if task.num_labels is not None:
        labels = {"num_labels": task.num_labels, "id2label": dict(enumerate(task.labels))}
        labels["label2id"] = {label: i for i, label in enumerate(task.labels)}
    model = models.load(start, task.kind, **labels, **run.model_fields)
    if model.config.vocab_size != task.vocab_size:
        raise SettingsError(
            f"{start} has a vocabulary of {model.config.vocab_size}, the task one of {task.vocab_size}; give the tokenizer it was "
            f"trained with (--tokenizer {start})"
        )
    if model.config.max_position_embeddings < task.max_length:
        raise SettingsError(f"{start} has {model.config.max_position_embeddings} positions; --length {task.max_length} is more")
    return model


def announce(run: Run, task: tasks.Task, model) -> None:
    """Say what is about to be trained."""
    count, more = models.parameters(model), ""
    if run.start is None:
        share = models.parameters_beside_softmax(model, task, size=run.size, fields=run.model_fields)
        more = f" ({share:+.1%} beside softmax)"
        if task.published is not None and share > task.published.extra_parameters:
            more += f": more than the {task.published.extra_parameters:.0%} this benchmark allows"
    sets = ", ".join(f"{len(getattr(task, split)):,} {split}" for split in tasks.SPLITS)
    print(f"{task.name}, {run.mixer}: {count:,} parameters{more}; {sets} examples of up to {task.max_length:,} tokens", flush=True)


def scores(trainer: Loop, task: tasks.Task, split: str, *, examples: int | None = None) -> dict[str, float]:
    """The scores of the trainer's model on a split."""
    dataset = part(getattr(task, split), examples)
    found: dict[str, float] = {}
    for generate in (False, True) if task.kind == "seq2seq" else (False,):  # a writer is scored word by word, and as it writes
        trainer.args.predict_with_generate, trainer.args.generation_max_length = generate, task.max_target_length
        found |= trainer.evaluate(dataset, metric_key_prefix=split)
    return {key.removeprefix(f"{split}_"): found[key] for key in found if key.startswith(split) and not key.endswith(OWN)}


def part(dataset, count: int | None):
    """`count` examples spread evenly over a set; all of it if None."""
    if count is None or count >= len(dataset):
        return dataset
    return Subset(dataset, [i * len(dataset) // count for i in range(count)])


def have_tensorboard() -> bool:
    import importlib.util

    return importlib.util.find_spec("tensorboard") is not None


def difference(saved: Run, given: Run) -> str:
    """The first setting in which two runs differ."""
    a, b = dataclasses.asdict(saved), dataclasses.asdict(given)
    name = next(name for name in a if a[name] != b[name])
    return f"its {name} is {a[name]!r}, not {b[name]!r}"


def main(argv: list[str]) -> None:
    p = parser("cosformer train", "Train any mixer on a task.", task="?")
    p.add_argument("--start", metavar="DIR", help="a saved model to start from, such as a pre-trained one")
    p.add_argument("--pretrain-first", action="store_true", help="masked pre-training on the task's own inputs before it")
    p.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    p.add_argument("--dry-run", action="store_true", help="check the settings: all shapes, two small steps; data is not needed")
    command(p, argv)


def quieten() -> None:
    """transformers' own remarks and bars are about code, not about a run."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def command(p: argparse.ArgumentParser, argv: list[str]) -> None:
    given, rest = parse(p, argv)
    quieten()
    try:
        settings = merge(given, rest)
        if getattr(given, "pretrain_first", False):
            settings["pretrain"] = settings.get("pretrain") or {}
        resume = getattr(given, "resume", False)
        run = Run(**settings)
        if getattr(given, "dry_run", False):
            from .dryrun import dry_run

            return dry_run(run)
        result = train(run, resume=resume)
    except (SettingsError, tasks.DataError) as error:
        raise SystemExit(f"{p.prog}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Stopped as error:
        print(f"{p.prog}: {error}", file=sys.stderr)
        if "no checkpoint" not in str(error):
            print("Go on with the same command and --resume.", file=sys.stderr)
        raise SystemExit(130 if "interrupted" in str(error) else 1) from None
    print(summary(result, run.out))


def summary(result: dict[str, Any], out: str) -> str:
    lines = [f"{split:<10} {show(result[split])}" for split in ("validation", "test")]
    took = f"{result['steps']:,} steps, {result['tokens']:,} tokens, {clock(result['seconds'])}"
    return "\n".join([*lines, f"{took}; the model is in {out}"])
