"""Self-pretraining: a classification task's own inputs, to be restored where they are hidden."""

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from .collate import Collate
from .contract import SPLITS, Rows, Task
from .metrics import TokenScores, language_metrics, scores
from .packing import Masked


class Singles(Rows):
    """Both texts of every pair, one after the other."""

    def __init__(self, pairs: Rows):
        self.pairs = pairs

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.pairs[index // 2]
        return {"input_ids": row["pair_input_ids" if index % 2 else "input_ids"]}


def pretraining(task: Task, *, share: float = 0.15, copies: int = 10, seed: int = 0) -> Task:
    """The masked-lm task over a classification task's own inputs, vocabulary and lengths (packing.Masked)."""
    if "classification" not in task.kind:
        raise ValueError(f"self-pretraining takes a classification task; {task.name!r} is {task.kind}")
    special = task.special
    reserved = (special.pad, special.bos, special.eos, special.sep, special.mask)
    if task.tokenizer is not None:
        reserved = task.tokenizer.all_special_ids
    hide: dict[str, Any] = {
        "content": np.setdiff1d(np.arange(task.vocab_size), reserved),
        "mask": special.mask,
    }
    hide |= {"seed": seed, "share": share}

    def masked(split: str) -> Masked:
        rows = getattr(task, split)
        rows = Singles(rows) if task.kind == "pair-classification" else rows
        return Masked(rows, copies=copies if split == "train" else 1, **hide)

    fields: dict[str, Any] = {split: masked(split) for split in SPLITS}
    fields |= scores(TokenScores(shift=False), language_metrics, "loss_per_token")
    settings = {**task.settings, "share": share, "copies": copies, "pretraining_seed": seed}
    name, collate = f"{task.name}-pretraining", Collate(special.pad)
    fields |= {"name": name, "collate": collate, "settings": settings, "labels": (), "majority": None}
    return replace(task, kind="masked-lm", **fields)
