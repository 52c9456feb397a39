"""cosformer train --dry-run: is a recipe sound? Every shape at full size, then two small real steps.

It needs neither the recipe's data nor its hardware: random text, random rows or a new model stand in for what
is missing, and it says so. Of a model too large for this machine's memory it checks only the shapes.
"""

import dataclasses
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from .. import tasks
from . import models
from .build import build_model, build_trainer, scores
from .settings import DEFAULTS, Run, SettingsError

EXAMPLES = (4, 2, 2)  # per split, where they are made for the dry run
VOCABULARY = 50_265  # RoBERTa's; assumed for a missing tokenizer
BYTES_A_PARAMETER = 16  # weight, gradient and AdamW's two moments, float32
SMALL = {  # overrides a run's arguments for the real steps
    "max_steps": 2,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": [],
    "torch_compile": False,
    "dataloader_num_workers": 0,
}


def dry_run(run: Run, *, real: bool = True) -> None:
    """Check a run and print what it would do; an error if it is not sound. Without `real`, shapes only."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            task, notes = build_task(run, Path(folder))
            start = run.start
            if start is not None and not (Path(start) / "config.json").exists():
                notes.append(f"start {start} is not there: a new model stands in")
                start = None
            print(f"{run.task}, {run.mixer}, size {run.size}", *notes, sep="\n", flush=True)
            now = dataclasses.replace(run, out=folder, pretrain=None)
            if run.pretrain is not None:
                before = dataclasses.replace(now, training=run.training | run.pretrain)
                check(before, tasks.pretraining(task), start, real=real)
            check(now, task, start, real=real)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SettingsError(f"not sound: {error}") from error
    print("sound")


def check(run: Run, task: tasks.Task, start: str | None, *, real: bool) -> None:
    need = check_shapes(run, task, start)
    if real and need > psutil.virtual_memory().available / 2:
        print(f"{task.name}: two steps would take {size(need)} of memory; left out on this machine")
    elif real:
        take_steps(run, task, start)


def check_shapes(run: Run, task: tasks.Task, start: str | None) -> int:
    """One batch forward and backward on shapes alone; returns the bytes the real steps would take."""
    given, began = DEFAULTS | run.training, time.perf_counter()
    batch, accumulate = run.batch(task), given.get("gradient_accumulation_steps", 1)
    with torch.device("meta"):
        made: dict[str, Any] = {"mixer": run.mixer, "size": run.size, "fields": run.model_fields}
        model = models.CLASSES[task.kind](models.config_of(task, start=start, **made))
    count = models.parameters(model)
    sizes = shapes_of(task, batch)
    kind: dict[str, Any] = {"dtype": torch.int64, "device": "meta"}
    model.train()
    for part in model.modules():
        if hasattr(part, "layerdrop"):  # BART's stacks draw a number and ask for its value
            part.training = False
    with FakeTensorMode(allow_non_fake_inputs=True):  # transformers would ask plain meta tensors for values
        kept = activations(model, {name: torch.empty(sizes[name], **kind) for name in sizes})
    tokens = task.max_length * (2 if task.kind == "pair-classification" else 1)
    shapes = f"every shape of a batch of {batch} x {tokens:,} tokens fits"
    print(f"{task.name}: {count:,} parameters; {shapes} ({time.perf_counter() - began:.1f} s)")
    a_step = f"{batch} x {accumulate} x {tokens:,} = {batch * accumulate * tokens:,}"
    state = count * BYTES_A_PARAMETER
    print(f"  {a_step} tokens per step and process")
    print(f"  memory: {size(state)} for weights, gradients and AdamW;", end=" ")
    print(f"up to {size(kept)} for a batch (float32, no checkpointing)", flush=True)
    return state + kept // batch


def shapes_of(task: tasks.Task, rows: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tokens and labels of a full batch."""
    example = task.collate([task.train[0]])
    longest = dict.fromkeys((name for name in example if name.endswith("input_ids")), task.max_length)
    longest["labels"] = task.max_target_length or task.max_length
    return {name: (rows, length)[: example[name].ndim] for name, length in longest.items()}


def activations(model: Any, batch: dict[str, Tensor]) -> int:
    """Bytes that a forward pass saves for backward, without parameters; runs backward, too."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, Tensor] = {}  # holds the tensors, so that no storage's address is reused

    def note(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in own:
            seen[x.untyped_storage()._cdata] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = model(**batch).loss
    loss.backward()
    return sum(x.untyped_storage().nbytes() for x in seen.values())


def take_steps(run: Run, task: tasks.Task, start: str | None) -> None:
    """Two real training steps and an evaluation, one example at a time."""
    began = time.perf_counter()
    arguments = {key: run.training[key] for key in run.training if "fsdp" not in key and key != "deepspeed"}
    if not torch.cuda.is_available():  # many CPUs have half precision only in name
        arguments |= {"bf16": False, "fp16": False}
    small = dataclasses.replace(run, training=arguments | SMALL)
    trainer = build_trainer(small, task, build_model(small, task, start=start), [])
    trainer.train()
    losses = [f"{row['loss']:.4g}" for row in trainer.state.log_history if "loss" in row]
    found = scores(trainer, task, "validation", examples=EXAMPLES[1])[task.metric]
    took = f"{time.perf_counter() - began:.1f} s"
    done = f"{len(losses)} real steps of one example: loss {', '.join(losses)}"
    print(f"  {done}; {task.metric} {found:.4g} ({took})", flush=True)


def build_task(run: Run, folder: Path) -> tuple[tasks.Task, list[str]]:
    """The run's task, on stand-in data where its own is missing, and notes on what stands in."""
    chosen, known, notes = dict(run.task_settings), tasks.settings(run.task), []
    data, tokenizer, entries = chosen.get("data"), chosen.get("tokenizer", "bytes"), None
    missing = data is not None and not Path(data).expanduser().exists()
    made = "examples" in known and (data is None or missing)
    if made:
        notes.append(f"{EXAMPLES[0]} examples are made instead of {(known | chosen)['examples'][0]:,}")
        chosen |= {"examples": EXAMPLES, "data": None} if missing else {"examples": EXAMPLES}
    elif missing:
        stands_in = "images stand" if run.task == "image" else "text stands"
        notes.append(f"data {data} is not there: random {stands_in} in")
        write_data(folder / "data", run)
        chosen["data"] = folder / "data"
    if (made or missing) and "cache" in known:
        chosen["cache"] = folder / "cache"
    if tokenizer.startswith("bpe:") and missing:
        entries = int(tokenizer.removeprefix("bpe:"))
    elif not (tokenizer.startswith("bpe") or tokenizer == "bytes" or Path(tokenizer).expanduser().exists()):
        notes.append(f"tokenizer {tokenizer} is not there: {VOCABULARY:,} tokens are assumed")
        entries = VOCABULARY
    if entries is None:
        return tasks.build(run.task, **chosen), notes
    task = tasks.build(run.task, **chosen | {"tokenizer": "bytes"})
    return dataclasses.replace(task, vocab_size=entries), notes


def write_data(folder: Path, run: Run) -> None:
    """Random data that the run's task can read: text that fills its length, in every column it may want."""
    folder.mkdir()
    rng, chosen = random.Random(0), run.task_settings
    if run.task == "image":
        for name in ("data_batch_1.bin", "test_batch.bin"):
            (folder / name).write_bytes(b"".join(bytes([i]) + rng.randbytes(3 * 1024) for i in range(10)))
        return
    length = chosen.get("length") or tasks.settings(run.task)["length"] or 256  # None: from the data
    labels, label = chosen.get("labels") or ["0", "1"], chosen.get("label") or "label"
    named = [chosen[key] for key in ("text", "pair", "source", "target") if chosen.get(key)]
    columns = sorted({"text", "text1", "text2", "source", "target", *named})
    for split, count in zip(tasks.SPLITS, EXAMPLES):
        with (folder / f"{split}.jsonl").open("w") as file:
            for i in range(max(count, len(labels))):
                row = {column: "".join(rng.choices("abcdefgh ", k=length)) for column in columns}
                file.write(json.dumps({**row, label: labels[i % len(labels)]}) + "\n")


def size(count: int) -> str:
    return f"{count / 2**30:.2g} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
