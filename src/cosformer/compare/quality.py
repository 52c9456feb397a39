"""One cell of the quality tables: a mixer trained on a subject with a seed -> a row of results."""

import json
import math
import re
import shlex
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from .. import tasks, train
from ..bench.measure import Watch
from ..results import Quality, Search, Status
from ..train import models
from ..train.progress import read
from .plan import EVALUATIONS, Subject


@dataclass(frozen=True)
class TrainingCell:
    subject: Subject
    mixer: str
    seed: int
    out: Path  # of the comparison

    def __str__(self) -> str:
        return f"{self.subject.name}, {self.mixer}" + (f", seed {self.seed}" if self.seed else "")

    def folder(self, subject: str) -> Path:
        """Where the model of this mixer and seed for a subject is."""
        return self.out / "cells" / f"{subject}-{re.sub(r'[^a-z0-9+_-]+', '_', self.mixer)}-{self.seed}"

    def run(self, steps: int, rate: float) -> train.Run:
        """The training run. The tokenizer "start" is that of the model it starts from."""
        subject, settings = self.subject, dict(self.subject.settings)
        start = str(self.folder(subject.after)) if subject.after else None
        if settings.get("tokenizer") == "start":  # if there is none, the row will say so
            settings["tokenizer"] = start if start and Path(start).exists() else "bytes"
        training = {
            "max_steps": steps,
            "eval_steps": max(1, steps // EVALUATIONS),
            "logging_steps": max(1, steps // 40),
            "eval_on_start": True,
            "report_to": [],
            "seed": self.seed,
            "learning_rate": rate,
            "per_device_train_batch_size": subject.batch // subject.parts,
            "per_device_eval_batch_size": subject.batch // subject.parts,
            "gradient_accumulation_steps": subject.parts,
            **subject.training,
        }
        return train.Run(
            task=subject.task,
            mixer=self.mixer,
            size=subject.size,
            out=str(self.folder(subject.name)),
            start=start,
            eval_examples=subject.eval_examples,
            test_examples=subject.test_examples,
            task_settings=settings,
            model_fields=subject.fields,
            training=training,
            pretrain=subject.pretrain,
        )

    def problem(self, run: train.Run) -> tuple[Status, str] | None:
        """Why it cannot be trained, if so: the mixer refuses, or there is no model to start from."""
        if run.start and not Path(run.start, "config.json").exists():
            return "failed", f"{self.subject.after} left no model to start from"
        task = task_of(run)  # bad data is not the mixer's fault
        try:
            with torch.device("meta"):
                models.build(task, mixer=run.mixer, size=run.size, fields=run.model_fields)
        except ValueError as error:
            return "refused", str(error)
        return None


def task_of(run: train.Run) -> tasks.Task:
    return _task(run.task, json.dumps(run.task_settings))


@lru_cache(maxsize=1)  # the same for all mixers of a subject
def _task(name: str, settings: str) -> tasks.Task:
    return tasks.build(name, **json.loads(settings))


def command(run: train.Run) -> str:
    """The command that repeats the run."""
    words = ["cosformer", "train", run.task, "--mixer", run.mixer, "--size", run.size]
    words += ["--out", Path(run.out).name]
    words += ["--start", Path(run.start).name] if run.start else []
    words += ["--pretrain-first"] if run.pretrain is not None else []
    words += ["--eval-examples", str(run.eval_examples), "--test-examples", str(run.test_examples)]
    tables = {"task": run.task_settings, "model": run.model_fields, "pretrain": run.pretrain or {}}
    for table, values in tables.items():
        for key, value in values.items():
            words += ["--set", f"{table}.{key}={json.dumps(value)}"]
    for key, value in run.training.items():
        if value != []:
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def shared_fields(cell: TrainingCell, run: train.Run, steps: int, rate: float) -> dict[str, Any]:
    """The fields that rows of a training and of a search share."""
    task = task_of(run)
    known = {"subject": cell.subject.name, "mixer": cell.mixer, "seed": cell.seed, "steps": steps}
    judged = {"metric": task.metric, "greater_is_better": task.greater_is_better}
    return {**known, "rate": rate, **judged, "command": command(run)}


def trained(cell: TrainingCell, steps: int, rate: float, watch: TrainerCallback) -> Quality:
    """Train, or resume. A mixer that refuses, or whose training breaks off, gets a row with the reason."""
    subject, run = cell.subject, cell.run(steps, rate)
    problem, task = cell.problem(run), task_of(run)
    shape = models.size_of(run.size, task)
    known = shared_fields(cell, run, steps, rate) | {
        **{name: getattr(subject, name) for name in ("group", "task", "title", "data", "batch", "note")},
        "settings": {**subject.settings, **subject.fields, **subject.training},
        "published": subject.published.get(cell.mixer),
        "size": str(replace(shape, layers=subject.fields.get("num_hidden_layers", shape.layers))),
        "length": task.max_length,
        "examples": min(subject.test_examples, len(task.test)),
    }
    if problem:
        return Quality(**known, status=problem[0], reason=problem[1])
    try:
        with Watch() as others:
            result = train.train(run, resume=True, watch=watch)
    except train.NotFinite as stopped:
        # Anything else, such as a full disk, is not the mixer's fault: the next start resumes.
        return Quality(**known, status="failed", reason=str(stopped).split(";")[0])
    for checkpoint in Path(run.out).rglob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    lines = read(Path(run.out) / "metrics.jsonl")
    speed = speed_of(lines)
    curve = [point(line, task.metric, speed) for line in lines]
    return Quality(
        **known,
        status="done",
        value=result["test"][task.metric],
        metrics=result["test"],
        validation=result["validation"],
        most_frequent=most_frequent(task, known["examples"]),
        curve=[entry for entry in curve if len(entry) > 3],
        parameters=result["parameters"],
        tokens=result["tokens"],
        seconds=round(result["tokens"] / speed, 3),
        tokens_per_second=speed,
        waited=round(others.waited, 4),
    )


def search_rate(cell: TrainingCell, steps: int, rate: float, watch: TrainerCallback) -> Search:
    """A short run with one rate, judged on the validation set; its model is not kept."""
    run = cell.run(steps, rate)
    run = replace(
        run,
        out=str(cell.out / "search" / Path(run.out).name / f"{rate:g}"),
        pretrain=None,  # the same for every rate, and longer than the search
        test_examples=run.eval_examples,
        training=run.training | {"eval_on_start": False, "eval_steps": steps},
    )
    known = shared_fields(cell, run, steps, rate)
    try:
        result = train.train(run, resume=True, watch=watch)
    except train.NotFinite as stopped:
        return Search(**known, status="failed", reason=str(stopped).split(";")[0])
    shutil.rmtree(run.out)
    scores, seconds = result["validation"], result["seconds"]
    return Search(**known, status="done", value=scores[known["metric"]], loss=scores["loss"], seconds=seconds)


def most_frequent(task: tasks.Task, examples: int) -> float | None:
    """The share of the most frequent answer in the test set; None unless the metric is accuracy."""
    if task.metric != "accuracy":
        return None
    chosen = (task.test[i * len(task.test) // examples]["labels"] for i in range(examples))
    answers = Counter(label for labels in chosen for label in torch.as_tensor(labels).flatten().tolist())
    del answers[tasks.IGNORE]
    return max(answers.values()) / answers.total() if answers else None


def point(line: dict[str, Any], metric: str, speed: float) -> dict[str, float]:
    """A line of metrics as a point of a learning curve; its seconds count training alone."""
    kept = {"step": line["step"], "tokens": line["tokens"], "seconds": round(line["tokens"] / speed, 3)}
    for name, key in (("loss", "loss"), ("eval_loss", "eval_loss"), ("value", f"eval_{metric}")):
        if key in line and math.isfinite(line[key]):
            kept[name] = round(line[key], 6)
    return kept


def speed_of(lines: list[dict[str, Any]]) -> float:
    """Tokens per second of training, without evaluation.

    Not the median of the lines: where batches differ in length, the long ones hold most tokens and time.
    """
    timed = [line for line in lines if "tokens_per_second" in line]
    tokens = [now["tokens"] - before for now, before in zip(timed, [0, *(line["tokens"] for line in timed)])]
    return sum(tokens) / sum(count / line["tokens_per_second"] for count, line in zip(tokens, timed))
