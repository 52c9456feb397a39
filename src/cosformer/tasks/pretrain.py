"""Self-pretraining: a classification task's own inputs, to be restored where they are hidden, before they are classified."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .contract import IGNORE, Rows, Task
from .metrics import LanguageMetrics, TokenScores
from .packing import Masked, pad


class Collate:
    """Masked sequences to a batch, padded to its longest."""

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        rows = [item["input_ids"] for item in items]
        return {
            "input_ids": pad(rows, self.pad_id),
            "attention_mask": pad([torch.ones_like(row) for row in rows], 0),
            "labels": pad([item["labels"] for item in items], IGNORE),
        }


class Singles(Rows):
    """Both texts of every pair, one after the other."""

    def __init__(self, pairs: Rows):
        self.pairs = pairs

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.pairs[index // 2]
        return {"input_ids": row["pair_input_ids" if index % 2 else "input_ids"]}


def masked(task: Task, *, share: float, copies: int, seed: int) -> Task:
    """`task` as masked modelling; see packing.Masked."""
    if "classification" not in task.kind:
        raise ValueError(f"self-pretraining takes a classification task; {task.name!r} is {task.kind}")
    special = task.special
    roles = (special.pad, special.bos, special.eos, special.sep, special.mask)
    content = np.setdiff1d(
        np.arange(task.vocab_size), task.tokenizer.all_special_ids if task.tokenizer else roles
    )

    def hide(rows: Rows, copies: int) -> Masked:
        rows = Singles(rows) if task.kind == "pair-classification" else rows
        return Masked(rows, content=content, mask=special.mask, seed=seed, copies=copies, share=share)

    return replace(
        task,
        name=f"{task.name}-pretraining",
        kind="masked-lm",
        train=hide(task.train, copies),
        validation=hide(task.validation, 1),
        test=hide(task.test, 1),
        collate=Collate(special.pad),
        preprocess_logits_for_metrics=TokenScores(shift=False),
        compute_metrics=LanguageMetrics(bits_per_byte=False),
        metric="loss_per_token",
        greater_is_better=False,
        num_labels=None,
        labels=(),
        settings={**task.settings, "share": share, "copies": copies, "pretraining_seed": seed},
    )
