"""Packed sequences as the kernels see them: each a row of its own, cut into chunks; tables of these."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Packed sequences, each a row, and their chunks."""

    rows: int
    chunks: int  # of all rows
    most: int  # of one row
    table: Tensor  # the boundaries, the first chunk of each row, the row of each chunk
    begin: Tensor  # of the sequence of each token
    end: Tensor


@lru_cache(maxsize=8)  # for all layers of a model: to another device this is a transfer
def packed(boundaries: tuple[int, ...], chunk: int, device: torch.device) -> Packed:
    cu = torch.tensor(boundaries, device="cpu")
    lengths, rows = cu.diff(), len(boundaries) - 1
    counts = (lengths + chunk - 1) // chunk
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    table = torch.cat([cu, first, torch.arange(rows, device="cpu").repeat_interleave(counts)])
    ends = (edge.repeat_interleave(lengths) for edge in (cu[:-1], cu[1:]))
    tensors = (t.to(device, non_blocking=True) for t in (table, *ends))
    return Packed(rows, int(first[-1]), int(counts.max()), *tensors)
