"""cosformer train --dry-run: is a recipe sound? Every shape at full size on the meta device, then two real steps of one example.

It needs neither the recipe's data nor its hardware: for what is not there, random text, rows or a new model stand in, and it
says so. A model too large for this machine's memory has its shapes checked only.
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
from ..tasks.contract import Rows
from ..tasks.metrics import TokenScores
from . import models, new_model, scores, trainer_of
from .settings import DEFAULTS, Run, SettingsError

EXAMPLES = (4, 2, 2)  # of each set, where they are made for the dry run
VOCABULARY = 50_265  # RoBERTa's; assumed of a tokenizer that is not there
BYTES_A_PARAMETER = 16  # weight, gradient and AdamW's two moments, float32
SMALL = {  # what becomes of a run's arguments for the real steps
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
    """Check a run and say what it would be; an error if it is not sound. Without `real`, shapes only."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            task, notes = task_of(run, Path(folder))
            start = run.start
            if start is not None and not (Path(start) / "config.json").exists():
                notes.append(f"start {start} is not there: a new model stands in")
                start = None
            phases = [tasks.pretraining(task), task] if run.pretrain is not None else [task]
            print(f"{run.task}, {run.mixer}, size {run.size}", *notes, sep="\n", flush=True)
            for phase in phases:
                training = run.training | ((run.pretrain or {}) if phase is not task else {})
                now = dataclasses.replace(run, training=training, out=folder, pretrain=None)
                need = check_shapes(now, phase, start)
                if real and need > psutil.virtual_memory().available / 2:
                    print(
                        f"{phase.name}: two steps would take {size(need)} of memory; left out on this machine"
                    )
                elif real:
                    take_steps(now, phase, start)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SettingsError(f"not sound: {error}") from error
    print("sound")


def check_shapes(run: Run, task: tasks.Task, start: str | None) -> int:
    """One batch forward and backward on the meta device, where tensors have shapes only; the bytes two small steps would take."""
    given, began = DEFAULTS | run.training, time.perf_counter()
    batch, accumulate = given["per_device_train_batch_size"], given.get("gradient_accumulation_steps", 1)
    with torch.device("meta"):
        model = models.CLASSES[task.kind](config_of(run, task, start))
    count = models.parameters(model)
    with FakeTensorMode(
        allow_non_fake_inputs=True
    ):  # plain meta tensors would be asked for values by transformers
        kept = activations(model.train(), meta_batch(task, batch))
    tokens = task.max_length * (2 if task.kind == "pair-classification" else 1)
    took = time.perf_counter() - began
    print(
        f"{task.name}: {count:,} parameters; every shape of a batch of {batch} x {tokens:,} tokens fits ({took:.1f} s)"
    )
    print(
        f"  {batch} x {accumulate} x {tokens:,} = {batch * accumulate * tokens:,} tokens per step and process"
    )
    state, at_most = size(count * BYTES_A_PARAMETER), size(kept)
    print(
        f"  memory: {state} for weights, gradients and AdamW; up to {at_most} for a batch (float32, no checkpointing)",
        flush=True,
    )
    return count * BYTES_A_PARAMETER + kept // batch


def config_of(run: Run, task: tasks.Task, start: str | None) -> Any:
    if start is None:
        return models.config_of(task, mixer=run.mixer, size=run.size, fields=run.model_fields)
    labels = {} if task.num_labels is None else {"num_labels": task.num_labels}
    return models.CLASSES[task.kind].config_class.from_pretrained(
        start, local_files_only=True, **labels, **run.model_fields
    )


def meta_batch(task: tasks.Task, rows: int) -> dict[str, Tensor]:
    """A full batch of the task without values."""
    ids = torch.empty(rows, task.max_length, dtype=torch.int64, device="meta")
    if task.kind == "seq2seq":
        return {"input_ids": ids, "labels": ids.new_empty(rows, task.max_target_length or task.max_length)}
    if task.kind in ("causal-lm", "masked-lm"):
        return {"input_ids": ids, "labels": ids}
    pair = {"pair_input_ids": ids} if task.kind == "pair-classification" else {}
    return {"input_ids": ids, "labels": ids.new_empty(rows), **pair}


def activations(model: Any, batch: dict[str, Tensor]) -> int:
    """Bytes that a forward pass keeps for its backward pass, which is run, too; parameters not counted."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, Tensor] = {}  # the tensors are held, so that no storage's address is used twice

    def note(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in own:
            seen[x.untyped_storage()._cdata] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = model(**batch).loss
    loss.backward()
    return sum(x.untyped_storage().nbytes() for x in seen.values())


def take_steps(run: Run, task: tasks.Task, start: str | None) -> None:
    """Two training steps and an evaluation, for real, of one example at a time."""
    began = time.perf_counter()
    arguments = {
        key: value for key, value in run.training.items() if "fsdp" not in key and key != "deepspeed"
    }
    if not torch.cuda.is_available():  # many CPUs have half precision only in name
        arguments |= {"bf16": False, "fp16": False}
    small = dataclasses.replace(run, training=arguments | SMALL)
    trainer = trainer_of(small, task, new_model(small, task, start=start), [])
    trainer.train()
    losses = [f"{row['loss']:.4g}" for row in trainer.state.log_history if "loss" in row]
    found = scores(trainer, task, "validation", examples=EXAMPLES[1])[task.metric]
    took = time.perf_counter() - began
    print(
        f"  {len(losses)} real steps of one example: loss {', '.join(losses)}; {task.metric} {found:.4g} ({took:.1f} s)",
        flush=True,
    )


def task_of(run: Run, folder: Path) -> tuple[tasks.Task, list[str]]:
    """The run's task, on stand-in data where its own is not there, and what had to stand in."""
    chosen, known, notes = dict(run.task_settings), tasks.settings(run.task), []
    data, tokenizer = chosen.pop("data", None), chosen.get("tokenizer", "bytes")
    missing = data is not None and not Path(data).expanduser().exists()
    made = "examples" in known and (data is None or missing)
    if made:
        notes.append(f"{EXAMPLES[0]} examples are made in the place of {(known | chosen)['examples'][0]:,}")
        chosen["examples"] = EXAMPLES
    elif missing:
        notes.append(
            f"data {data} is not there: random {'images stand' if run.task == 'image' else 'text stands'} in"
        )
        write(folder / "data", run)
        chosen["data"] = folder / "data"
    elif data is not None:
        chosen["data"] = data
    if (made or missing) and "cache" in known:
        chosen["cache"] = folder / "cache"
    vocabulary = None
    if tokenizer != "bytes" and not Path(tokenizer).expanduser().exists():
        trained = tokenizer.startswith("bpe:")
        if not trained:
            notes.append(f"tokenizer {tokenizer} is not there: {VOCABULARY:,} tokens are assumed")
        if missing or not trained:
            vocabulary, chosen["tokenizer"] = int(tokenizer[4:]) if trained else VOCABULARY, "bytes"
    task = tasks.build(run.task, **chosen)
    return (task if vocabulary is None else spread(task, vocabulary)), notes


def write(folder: Path, run: Run) -> None:
    """Random data in a form that the run's task reads: text that fills its length, every column it may ask for."""
    folder.mkdir()
    rng, chosen = random.Random(0), run.task_settings
    if run.task == "image":
        for name in ("data_batch_1.bin", "test_batch.bin"):
            (folder / name).write_bytes(b"".join(bytes([i]) + rng.randbytes(3 * 1024) for i in range(10)))
        return
    length = chosen.get("length") or tasks.settings(run.task)["length"]
    labels = chosen.get("labels") or ["0", "1"]
    columns = {"text", "text1", "text2", "source", "target"} | {
        chosen.get(key) for key in ("text", "pair", "source", "target")
    }
    for split, count in zip(tasks.SPLITS, EXAMPLES):
        with (folder / f"{split}.jsonl").open("w") as file:
            for i in range(max(count, len(labels))):
                row = {
                    column: "".join(rng.choices("abcdefgh ", k=length))
                    for column in sorted(filter(None, columns))
                }
                file.write(
                    json.dumps({**row, chosen.get("label") or "label": labels[i % len(labels)]}) + "\n"
                )


def spread(task: tasks.Task, vocabulary: int) -> tasks.Task:
    """A task over bytes as one over a larger vocabulary."""
    scoring = task.preprocess_logits_for_metrics
    if isinstance(scoring, TokenScores):
        scoring = TokenScores(shift=scoring.shift, byte_lengths=1.0)
    sets: dict[str, Any] = {split: Spread(getattr(task, split), vocabulary) for split in tasks.SPLITS}
    return dataclasses.replace(
        task, vocab_size=vocabulary, tokenizer=None, preprocess_logits_for_metrics=scoring, **sets
    )


class Spread(Rows):
    """Another set's tokens, its bytes at equal steps over the vocabulary."""

    def __init__(self, inner: Any, vocabulary: int):
        self.inner, self.special = inner, tasks.Special.count
        self.step = (vocabulary - self.special) // 256

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            key: self.wide(value) if key.endswith(("input_ids", "labels")) else value
            for key, value in self.inner[index].items()
        }

    def wide(self, ids: Any) -> Any:
        if not isinstance(ids, Tensor) or not ids.ndim:  # a class
            return ids
        return torch.where(ids < self.special, ids, self.special + (ids - self.special) * self.step)


def size(count: int) -> str:
    return f"{count / 2**30:.2g} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
