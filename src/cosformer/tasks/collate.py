"""Rows to a batch: one collate function for every kind of task."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .contract import IGNORE


class Collate:
    """Pads rows to the batch's longest: ids with `pad`, labels with what carries no loss.

    Every text gets its attention mask, except in `packed` windows: `position_ids` make their padding a
    document of its own, and in a causal model it comes after everything.
    """

    def __init__(self, pad: int, *, packed: bool = False):
        self.pad, self.packed = pad, packed

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = {}
        for name in items[0]:
            rows = [item[name] for item in items]
            if not isinstance(rows[0], Tensor):  # a class
                batch[name] = torch.tensor(rows)
            elif name == "position_ids":
                length = max(map(len, rows))
                batch[name] = torch.stack([torch.cat([p, torch.arange(length - len(p))]) for p in rows])
            else:
                batch[name] = _padded(rows, self.pad if name.endswith("input_ids") else IGNORE)
            if name.endswith("input_ids") and not self.packed:
                mask = _padded([torch.ones_like(row) for row in rows], 0)
                batch[name.replace("input_ids", "attention_mask")] = mask
        return batch


def _padded(rows: Sequence[Tensor], value: int) -> Tensor:
    if all(len(row) == len(rows[0]) for row in rows):
        return torch.stack(list(rows))
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
