"""From a run's settings to its task, model, trainer and scores; what cannot be is refused by its name."""

import dataclasses
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch.utils.data import Dataset, Subset
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, Seq2SeqTrainingArguments, TrainerCallback

from .. import tasks
from ..hf.reach import most_tokens
from ..seal import damage
from ..tasks.contract import Rows
from . import models
from .alive import watched
from .progress import OWN, say
from .settings import DEFAULTS, Run, SettingsError
from .trainer import Trainer

LEAST = 100  # examples of the final scores at least, if there are so many


@contextmanager
def refused(errors: Any, what: str) -> Iterator[None]:
    """Turns `errors` raised by others into a SettingsError that names the setting."""
    try:
        yield
    except (SettingsError, tasks.DataError):
        raise
    except errors as error:
        raise SettingsError(f"{what}: {' '.join(str(error).split())}") from error


def build_task(run: Run, *, model: str | None = None) -> tasks.Task:
    """The run's task; a saved model keeps its own tokenizer and length unless told otherwise."""
    chosen, saved = dict(run.task_settings), Path(model or run.start or "")
    if (fault := damage(saved, model=True)) is not None:
        way = "another checkpoint of the run may be whole; train --resume makes a finished model again"
        raise SettingsError(f"{saved} is damaged: {fault}; {way}")
    if (saved / "config.json").exists():
        accepted = tasks.settings(run.task)
        if "tokenizer" in accepted and (saved / "tokenizer.json").exists():
            chosen.setdefault("tokenizer", str(saved))
        if {"tokenizer", "length"} <= accepted.keys():  # of a text: else it would be taken from the data
            with refused(OSError, f"model {saved}"):
                config = AutoConfig.from_pretrained(saved, local_files_only=True)
            trained = facts_of(saved).get("task", {}).get("length")  # perhaps longer than its first model's
            chosen.setdefault("length", trained or config.max_position_embeddings)
    with refused((ValueError, TypeError, OSError), f"task {run.task!r}"):
        return tasks.build(run.task, **chosen)


def build_model(run: Run, task: tasks.Task, *, start: str | None) -> PreTrainedModel:
    """The run's model: new, or a saved one with the head this task needs."""
    what = f"model {run.mixer!r}" if start is None else f"start {start}"
    with refused((ValueError, TypeError, OSError, SafetensorError), what):
        if start is None:
            fields = run.model_fields
            return models.build(task, mixer=run.mixer, size=run.size, fields=fields, seed=run.seed)
        check_start(start, task)
        models.check_fields(task.kind, run.model_fields)
        torch.manual_seed(run.seed)
        labels = models.label_fields(task)
        fields = run.model_fields | labels
        return models.load(start, task.kind, ignore_mismatched_sizes=bool(labels), **fields)


def check_start(start: str, task: tasks.Task) -> None:
    """Refuse a saved model that cannot read this task's input."""
    if not (Path(start) / "config.json").exists():
        raise SettingsError(f"{start} holds no model (config.json)")
    saved = AutoConfig.from_pretrained(start, local_files_only=True)
    needed = models.CLASSES[task.kind].config_class.model_type
    if saved.model_type != needed:
        told = f"{start} is a {saved.model_type} model"
        raise SettingsError(f"{told}; task {task.name!r} needs a {needed} model")
    advice = f"give the tokenizer it was trained with (--tokenizer {start})"
    if saved.vocab_size != task.vocab_size:
        sizes = f"a vocabulary of {saved.vocab_size}, the task one of {task.vocab_size}"
        raise SettingsError(f"{start} has {sizes}; {advice}")
    if task.tokenizer is not None and (Path(start) / "tokenizer.json").exists():
        vocabulary = AutoTokenizer.from_pretrained(start, local_files_only=True).get_vocab()
        if vocabulary != task.tokenizer.get_vocab():
            raise SettingsError(f"{start} has another vocabulary than the task, of the same size; {advice}")
    most = most_tokens(saved)
    if most < task.max_length:
        raise SettingsError(f"{start} reads at most {most} tokens; --length {task.max_length} is more")


def build_trainer(
    run: Run, task: tasks.Task, model: PreTrainedModel, callbacks: list[TrainerCallback]
) -> Trainer:
    """The Trainer of a run, ready to train or to evaluate."""
    given = arguments(run, task)
    keep = given.pop("save_total_limit")  # upstream would delete too early
    loss = getattr(model.config, "loss", "softmax")
    if given.get("label_smoothing_factor") and loss != "softmax":  # upstream would take the full softmax
        smoothed = f"--label_smoothing_factor {given['label_smoothing_factor']}"
        raise SettingsError(f"{smoothed} goes with --loss softmax; the loss is {loss!r}")
    with refused((ValueError, TypeError, ImportError, RuntimeError), "training arguments"):
        trainer = Trainer(
            model=model,
            args=Seq2SeqTrainingArguments(output_dir=run.out, **given),
            train_dataset=task.train,
            eval_dataset=task.validation,
            data_collator=task.collate,
            compute_metrics=task.compute_metrics,
            preprocess_logits_for_metrics=task.preprocess_logits_for_metrics,
            processing_class=task.tokenizer,
            callbacks=callbacks,
            keep=keep,
            sequence_parallel=run.sequence_parallel,
        )
    examples = run.eval_examples or eval_examples_while_training(trainer)
    trainer.eval_dataset = spread_subset(task.validation, examples)
    return trainer


def eval_examples_while_training(trainer: Trainer) -> int:
    """Examples per evaluation while training: a sixth of those trained on between two evaluations.

    Evaluating an example, metrics included, takes less than half as long as training on it, so evaluations
    take less than a tenth of the time. The number comes from the settings, not from a clock: it is the same
    when a run is repeated or resumed.
    """
    args, batch = trainer.args, trainer.get_total_train_batch_size(trainer.args)
    every = args.eval_steps if args.eval_strategy == "steps" else len(trainer.train_dataset) / batch
    every = every * steps_of(trainer) if every < 1 else every
    return max(batch, int(every * batch / 6))


def final_examples(trainer: Trainer) -> int:
    """Examples of each set for the final scores: an eighth of those trained on, so that scoring takes a tenth
    of the time; smaller sets, as most are after a run of some length, are scored whole."""
    return max(LEAST, steps_of(trainer) * trainer.get_total_train_batch_size(trainer.args) // 8)


def steps_of(trainer: Trainer) -> int:
    """The number of steps of a run."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    return int(args.num_train_epochs * len(trainer.train_dataset) / trainer.get_total_train_batch_size(args))


def arguments(run: Run, task: tasks.Task) -> dict[str, Any]:
    """transformers' training arguments: those given, and defaults that suit the task and this machine."""
    given = DEFAULTS | {"per_device_train_batch_size": run.batch(task)} | run.training
    if "num_train_epochs" in run.training and "max_steps" not in run.training:
        given["max_steps"] = -1  # else our default would win
    steps, batch = given["max_steps"], given["per_device_train_batch_size"]
    evaluates = given.setdefault("eval_strategy", "steps")
    saves = given.setdefault("save_strategy", "steps" if evaluates == "no" else evaluates)
    if evaluates == "steps":
        every = max(1, steps // 10) if steps > 0 else 0.1
        given.setdefault("eval_steps", fitting(every, given.get("save_steps") if saves == "steps" else None))
        given.setdefault("save_steps", given["eval_steps"])
    on_gpu, rows = torch.cuda.is_available(), batch * PartialState().num_processes // run.sequence_parallel
    return {
        "save_total_limit": 2,
        "load_best_model_at_end": "no" not in (evaluates, saves),
        "metric_for_best_model": task.metric,
        "greater_is_better": task.greater_is_better,
        "per_device_eval_batch_size": batch,
        # The order of the data and the size of its batches must not depend on the number of processes.
        "data_seed": given["seed"],
        "dataloader_drop_last": len(task.train) >= rows,
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # log NaN as it is
        "remove_unused_columns": False,  # collate returns only what a model reads
        "include_num_input_tokens_seen": "all",
        "dataloader_pin_memory": on_gpu,
        "report_to": ["tensorboard"] if importlib.util.find_spec("tensorboard") else [],
        "use_cpu": not on_gpu,
        **given,
    }


def fitting(every: float, save: float | None) -> float:
    """Steps between evaluations, about `every`, so that every save falls on one, as the best model needs."""
    if save is None or save <= 0:  # 0: never saved
        return every
    if every < 1 or save != int(save):  # a fraction of all steps
        return save
    return next((steps for steps in range(int(every), int(save)) if save % steps == 0), save)


def spread_subset(dataset: Rows, count: int | None) -> Dataset:
    """`count` examples spread evenly over a set; all of it if None."""
    if count is None or count >= len(dataset):
        return dataset
    return Subset(dataset, [i * len(dataset) // count for i in range(count)])


def scores(trainer: Trainer, task: tasks.Task, split: str, *, examples: int | None) -> dict[str, float]:
    """The scores of the trainer's model on a split; for seq2seq with teacher forcing and with generation."""
    dataset = spread_subset(getattr(task, split), examples)
    found: dict[str, float] = {}
    trainer.args.generation_max_length = task.max_target_length
    for generate in (False, True) if task.kind == "seq2seq" else (False,):
        trainer.args.predict_with_generate = generate
        found |= trainer.evaluate(dataset, metric_key_prefix=split)
    mine = [key for key in found if key.startswith(split) and not key.endswith(OWN)]
    return {key.removeprefix(f"{split}_"): found[key] for key in mine}


def evaluate(run: Run, model: str | Path, *, split: str = "test", other: bool = False) -> dict[str, float]:
    """The scores of the model saved in a folder on one split of a run's task, and on how many examples.

    `other`: the run's data may be other than the model was trained on. If it is, and names no splits, all of
    it is scored.
    """
    with refused(ValueError, f"model {model}"):
        head = json.loads((Path(model) / "config.json").read_text()).get("architectures") or [None]
    task, accepted = None, tasks.settings(run.task)
    if other and "whole" in accepted:
        settings = {"whole": split, **run.task_settings}
        if "labels" in accepted and head[0] == models.CLASSES["sequence-classification"].__name__:
            settings.setdefault("labels", models.labels_of(str(model)))
        task = build_task(dataclasses.replace(run, task_settings=settings), model=str(model))
        if task.fingerprint == facts_of(Path(model)).get("data"):
            task = None
        else:
            say("this is other data than the model was trained on: what names no splits is scored whole")
    if task is None:
        task = build_task(run, model=str(model))
    if head[0] != models.CLASSES[task.kind].__name__:
        told = f"{model} is a {head[0]}, which knows nothing of task {task.name!r} yet"
        raise SettingsError(f"{told}; cosformer finetune trains it")
    if task.num_labels is not None and (labels := models.labels_of(str(model))) != list(task.labels):
        told = f"{model} tells {', '.join(labels)} apart; the data has {', '.join(task.labels)}"
        raise SettingsError(told)
    with tempfile.TemporaryDirectory() as nowhere:
        training = run.training | {"report_to": []}
        run = dataclasses.replace(run, out=nowhere, model_fields={}, training=training)
        trainer = build_trainer(run, task, build_model(run, task, start=str(model)), [])
        with watched():
            found = scores(trainer, task, split, examples=run.test_examples)
    rows = len(getattr(task, split))
    return found | {"examples": min(rows, run.test_examples or rows)}


def facts_of(model: Path) -> dict[str, Any]:
    """What resolved.json says about the run that left a model or checkpoint; nothing if it is not known."""
    path = (model.parent if model.name.startswith("checkpoint-") else model) / "resolved.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
