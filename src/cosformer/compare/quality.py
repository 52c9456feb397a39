"""One cell of the quality tables: a mixer trained on a subject -> a row of results."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from .. import train
from ..train import models
from ..train.progress import read
from .plan import EVALUATIONS, Subject


def folder_of(subject: Subject, mixer: str, seed: int, *, out: Path) -> Path:
    """Where a cell's model is."""
    return out / "cells" / f"{subject.name}-{mixer}-{seed}"


def run_of(subject: Subject, mixer: str, seed: int, *, steps: int, out: Path) -> train.Run:
    training = {
        "max_steps": steps,
        "eval_steps": max(1, steps // EVALUATIONS),
        "logging_steps": max(1, steps // 40),
        "eval_on_start": True,
        "report_to": [],
        "seed": seed,
        **subject.training,
    }
    return train.Run(
        task=subject.task,
        mixer=mixer,
        size=subject.size,
        out=str(folder_of(subject, mixer, seed, out=out)),
        start=str(out / "cells" / f"{subject.after}-{mixer}-{seed}") if subject.after else None,
        eval_examples=subject.eval_examples,
        test_examples=subject.test_examples,
        task_settings=subject.task_settings,
        model_fields=subject.model_fields,
        training=training,
    )


def command(run: train.Run) -> str:
    """The command that does the run again."""
    words = [
        "cosformer",
        "train",
        run.task,
        "--mixer",
        run.mixer,
        "--size",
        run.size,
        "--out",
        Path(run.out).name,
    ]
    words += ["--start", Path(run.start).name] if run.start else []
    words += ["--eval-examples", str(run.eval_examples), "--test-examples", str(run.test_examples)]
    for table, values in (("task", run.task_settings), ("model", run.model_fields)):
        for key, value in values.items():
            words += ["--set", f"{table}.{key}={json.dumps(value)}"]
    for key, value in run.training.items():
        words += (
            [f"--{key}", *(map(str, value if isinstance(value, list) else [value]))] if value != [] else []
        )
    return shlex.join(words)


def cell(
    subject: Subject, mixer: str, seed: int, *, steps: int, out: Path, watch: TrainerCallback
) -> dict[str, Any]:
    """Train, or go on training, and return the row. What a mixer refuses or cannot train is a row, too, with the reason."""
    task = subject.build()
    row: dict[str, Any] = {
        "kind": "quality",
        "subject": subject.name,
        "group": subject.group,
        "task": subject.task,
        "title": subject.title,
        "data": subject.data,
        "mixer": mixer,
        "seed": seed,
        "steps": steps,
        "examples": min(subject.test_examples, len(task.test)),
        "length": task.max_length,
        "batch": subject.training["per_device_train_batch_size"],
        "size": f"{subject.size} ({models.size_of(subject.size, task)})",
        "metric": task.metric,
        "greater_is_better": task.greater_is_better,
        "settings": {**subject.task_settings, **subject.model_fields, **subject.training},
    }
    run = run_of(subject, mixer, seed, steps=steps, out=out)
    row["command"] = command(run)
    try:
        with torch.device("meta"):
            models.build(task, mixer=mixer, size=subject.size, fields=subject.model_fields)
    except ValueError as error:
        return row | {"status": "refused", "reason": str(error)}
    if run.start and not Path(run.start, "config.json").exists():
        return row | {"status": "failed", "reason": f"{subject.after} left no model to start from"}
    try:
        result = train.train(run, resume=True, watch=watch)
    except (
        train.NotFinite
    ) as stopped:  # anything else, an interruption or a full disk, is not the mixer's: the next start goes on
        return row | {"status": "failed", "reason": str(stopped).split(";")[0]}
    for checkpoint in Path(run.out).glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    speed = speed_of(run.out)
    curve = [point(line, task.metric, speed) for line in read(Path(run.out) / "metrics.jsonl")]
    curve = [entry for entry in curve if len(entry) > 3]
    value = result["test"][task.metric]
    row |= {
        "status": "done",
        "reason": None,
        "value": value,
        "metrics": result["test"],
        "validation": result["validation"],
    }
    row |= {
        "curve": curve,
        "start": next((c for c in curve if "value" in c), {}),
        "parameters": result["parameters"],
    }
    return row | {
        "tokens": result["tokens"],
        "seconds": round(result["tokens"] / speed, 3),
        "tokens_per_second": speed,
    }


def point(line: dict[str, Any], metric: str, speed: float) -> dict[str, Any]:
    """A line of metrics as a point of a learning curve; its seconds are of training alone, without evaluation and pauses."""
    kept = {"step": line["step"], "tokens": line["tokens"], "seconds": round(line["tokens"] / speed, 3)}
    for name, key in (("loss", "loss"), ("eval_loss", "eval_loss"), ("value", f"eval_{metric}")):
        if key in line:
            kept[name] = round(line[key], 6)
    return kept


def speed_of(out: str) -> float:
    """Tokens a second while training, evaluation left out. Not the median of the lines: where batches differ in length, the long
    ones hold most of the tokens, and those of softmax take longest."""
    lines = [line for line in read(Path(out) / "metrics.jsonl") if "tokens_per_second" in line]
    tokens = [now["tokens"] - before for now, before in zip(lines, [0, *(line["tokens"] for line in lines)])]
    return sum(tokens) / sum(count / line["tokens_per_second"] for count, line in zip(tokens, lines))
