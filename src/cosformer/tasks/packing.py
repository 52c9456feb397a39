"""Documents packed into windows of one length, with no leak between them; sliding evaluation; masking.

`position_ids` restart at 0 where a document begins: Hugging Face's own mark of packed batches. A model that
honours it (or turns it into `cu_seqlens`) computes what it would on each document alone. No token is
predicted from another document: each document's first token has no label.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .contract import IGNORE, Rows
from .table import Table

MASK, OTHER = 0.8, 0.1  # shares of hidden tokens replaced by the mask, by another token; the rest stay (BERT)


class Packed(Rows):
    """Windows of `length` tokens over a table's documents, end to end.

    Without `stride` (training) windows do not overlap, and a shorter last one is dropped unless it is the
    only one. With `stride` (sliding evaluation) each window begins `stride` tokens after the one before and
    labels only tokens that no earlier window labelled: every token is scored once, and outside the first
    window with at least `length - stride` tokens before it.
    """

    def __init__(self, table: Table, *, length: int, stride: int | None = None, isolate: bool = True):
        if length < 2:
            raise ValueError(f"length must be at least 2; got {length}")
        if stride is not None and not 0 < stride < length:
            raise ValueError(f"stride must lie in 1 ... length - 1 = {length - 1}; got {stride}")
        self.table, self.length, self.isolate = table, length, isolate
        self.step, self.sliding = stride or length, stride is not None
        if not len(table):  # of a set that is not needed
            self.count = 0
            return
        total = len(table.values("tokens"))
        self.count = max(1, total // length) if stride is None else 1 + max(0, -(-(total - length) // stride))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.check(index)
        start = index * self.step
        ids = self.table.values("tokens")[start : start + self.length].astype(np.int64)
        ends = self.table.ends("tokens")
        first, last = np.searchsorted(ends, [start, start + len(ids) - 1], side="right")
        begins = np.asarray(ends[first:last]) - start  # where documents after the window's first begin
        labels = ids.copy()
        labels[0] = IGNORE
        labels[begins] = IGNORE
        if self.sliding and index:
            labels[: self.length - self.step] = IGNORE
        item = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.isolate:
            lengths = np.diff(begins, prepend=0, append=len(ids))
            positions = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            item["position_ids"] = torch.from_numpy(positions)
        return item


@dataclass(eq=False)
class Masked(Rows):
    """Another set's `input_ids` with a `share` of the tokens hidden; only hidden tokens have labels.

    Masks depend on the seed and the index only, so they are the same in any process and after a resume; a
    collator that draws them on the fly would give a resumed run different ones. Training sets hold each
    sequence `copies` times, masked differently. With `joins` (tokens.Encoder.joins) whole words are hidden.
    """

    inner: Rows
    content: np.ndarray  # the tokens that may be hidden, or replace hidden ones
    mask: int
    seed: int
    share: float
    copies: int = 1
    joins: tuple[np.ndarray, np.ndarray] | None = None

    def __post_init__(self):
        if not 0 < self.share < 1:
            raise ValueError(f"share of masked tokens must lie in (0, 1); got {self.share}")
        self.is_content = np.zeros(int(self.content.max()) + 2, bool)
        self.is_content[self.content] = True

    def __len__(self) -> int:
        return len(self.inner) * self.copies

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.check(index)
        item = self.inner[index % len(self.inner)]
        ids = item["input_ids"].numpy().copy()
        rng = np.random.default_rng((self.seed, index))
        open_ = self.is_content[np.minimum(ids, len(self.is_content) - 1)]
        group = np.arange(len(ids))
        if self.joins is not None:  # a word's tokens are hidden together or not at all
            left, right = self.joins
            group = np.cumsum(np.r_[True, ~(left[ids[1:]] & right[ids[:-1]])]) - 1
        chosen = open_ & (rng.random(len(ids)) < self.share)[group]
        if open_.any() and not chosen.any():
            chosen = open_ & (group == group[rng.choice(np.flatnonzero(open_))])
        labels = np.where(chosen, ids, IGNORE)
        fate = rng.random(len(ids))
        ids[chosen & (fate < MASK)] = self.mask
        other = chosen & (fate >= 1 - OTHER)
        ids[other] = rng.choice(self.content, int(other.sum()))
        kept = {name: value for name, value in item.items() if name == "position_ids"}
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels), **kept}


def cu_seqlens(position_ids: Tensor) -> Tensor:
    """(B, L) positions -> offsets of the documents in the batch laid end to end, then its length (int32)."""
    starts = position_ids == 0
    starts[:, 0] = True
    total = torch.tensor([position_ids.numel()], device=position_ids.device)
    return torch.cat([starts.flatten().nonzero().flatten(), total]).to(torch.int32)
