"""The parts of an axis: chunks that are walked and read together, few enough for their states to find room.

Rows of one length are cut across: a part has some chunks of every row, and states are carried from part to
part. Packed sequences are rows of their own, independent of one another: a part has some of them, whole.
"""

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import capturing, lasting

KEPT = 8  # packings cached for all layers of a model: each is a transfer to the device


class Part(NamedTuple):
    """Chunks of some rows."""

    rows: int
    chunks: int  # of the longest row ...
    all: int  # ... and of all rows
    skip: int = 0  # chunks of each row in earlier parts
    table: Tensor | None = None  # packed: the boundaries, the first chunk of each row, the row of each chunk


class Packed(NamedTuple):
    """Packed sequences."""

    parts: list[Part]
    begin: Tensor  # for each token, where its sequence begins ...
    end: Tensor  # ... and ends


def cut(rows: int, chunks: int, room: int) -> list[Part]:
    """Parts with nearly equal numbers of chunks: as many of all rows as there is room for, but at least four
    of each row."""
    count = max(1, -(-chunks // max(4, room // max(1, rows))))
    edges = [-(-chunks * i // count) for i in range(count + 1)]
    return [Part(rows, b - a, rows * (b - a), skip=a) for a, b in zip(edges, edges[1:])]


_packings: OrderedDict[tuple, dict[int, Packed]] = OrderedDict()  # by `packed`'s arguments, then stream


def packed(boundaries: tuple[int, ...], chunk: int, room: int, device: torch.device) -> Packed:
    """Parts of as many chunks as there is room for, but at least one sequence.

    Each stream has its own copy, since another stream might read it before it has arrived. A graph is
    captured on a stream of its own, where nothing can be sent; but capture first waits for all streams.
    """
    key, stream = (boundaries, chunk, room, device), _stream(device)
    known = _packings.pop(key, {})
    if known and capturing(device):
        stream = next(iter(known))
    if stream not in known:
        known[stream] = _packed(*key)
    _packings[key] = known
    if len(_packings) > KEPT:
        _packings.popitem(last=False)
    found = known[stream]
    lasting(device, found.begin, found.end, *(part.table for part in found.parts))
    return found


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _packed(boundaries: tuple[int, ...], chunk: int, room: int, device: torch.device) -> Packed:
    cu = torch.tensor(boundaries, device="cpu")
    lengths = cu.diff()
    counts, firsts, filled = (lengths + chunk - 1) // chunk, [0], 0
    for row, count in enumerate(counts.tolist()):
        if filled and filled + count > room:
            firsts.append(row)
            filled = 0
        filled += count
    edges = zip(firsts, [*firsts[1:], len(counts)])
    parts = [_sequences(cu[a : b + 1], counts[a:b], device) for a, b in edges]
    begin, end = (edge.repeat_interleave(lengths) for edge in (cu[:-1], cu[1:]))
    return Packed(parts, *(t.to(device, non_blocking=True) for t in (begin, end)))


def _sequences(boundaries: Tensor, counts: Tensor, device: torch.device) -> Part:
    rows = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    table = torch.cat([boundaries, counts.cumsum(0) - counts, counts.sum()[None], rows])
    return Part(len(counts), int(counts.max()), len(rows), table=table.to(device, non_blocking=True))
