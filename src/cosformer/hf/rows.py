"""Rows of several sequences, and rows with padding: what says where a sequence begins, and what follows.

Rows padded on the right are laid end to end without their padding where that is less work, so that every
part of every block computes tokens only.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.shard import Shard, gathered

PAYS = 0.1  # share of padding from which leaving it out repays the copies ...
LONG = 64  # ... of rows with this many tokens, as most mixers take packed sequences one by one


class Packed(NamedTuple):
    """Where the tokens of padded rows are: (T,) of all places of a batch, and the boundaries of its rows."""

    places: Tensor
    cu_seqlens: Tensor

    def join(self, x: Tensor) -> Tensor:
        """The tokens of (B, L, C), one row after the other: (1, T, C)."""
        return x.flatten(0, 1).index_select(0, self.places)[None]

    def split(self, x: Tensor, shape: torch.Size) -> Tensor:
        """(1, T, C) as rows again, of shape (B, L, C); padding is zero."""
        return x.new_zeros(shape).flatten(0, 1).index_copy(0, self.places, x[0]).view(shape)


def without_padding(mask: Tensor) -> Packed | None:
    """How to leave the padding of (B, L) out; None where it stays.

    It stays before and inside a text, where it counts as distance, or as the place that tells the first
    token; in a graph, whose shapes must not depend on values; and on a device, for which one would wait.
    """
    if torch.compiler.is_compiling() or not mask.is_cpu or not mask.numel():
        return None
    keep = mask.bool()
    lengths = keep.sum(1)
    total = int(lengths.sum())
    if total > (1 - PAYS) * keep.numel() or total < LONG * len(keep):
        return None
    if bool((keep[:, 1:] & ~keep[:, :-1]).any()):
        return None
    return Packed(keep.flatten().nonzero().flatten(), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))


def unpadded(mask: Tensor, length: int, seen: int, shard: Shard | None) -> Tensor:
    """The positions of the last `length` tokens of rows that may be padded: each counts from its first token.

    A mask of only the new tokens follows `seen` others, none of them padding; that of a shard follows those
    of the processes before it.
    """
    mask = mask.long()
    before: Any = seen if mask.shape[1] < seen + length else 0
    if shard is not None:
        before = gathered(mask.sum(1, keepdim=True), shard.group)[: shard.rank].sum(0)
    return (before + mask.cumsum(1) - 1).clamp_min(0)[:, -length:]


def check_beginnings(name: str, mask: Tensor | None, length: int, new: int, *, why: str) -> None:
    """Raise if a row of `length` tokens, the last of them `new`, begins with padding.

    A mask of only the new tokens does not tell how a row began. Looked for on the CPU only, and not in a
    graph: reading from a device waits for it.
    """
    if mask is None or mask.shape[1] != length or not (length and new and mask.is_cpu):
        return
    if torch.compiler.is_compiling():
        return
    keep = mask.bool()
    if bool((~keep[:, 0] & keep[:, -new:].any(1)).any()):
        raise ValueError(
            f"{name} begins with padding, but {why}; pad on the right (tokenizer.padding_side = 'right')"
        )


def no_left_padding(mixer: Any) -> str:
    """Why rows of this mixer must not be padded on the left."""
    return f"mixer {mixer.name!r} cannot tell it from text: {mixer.left_padding}"


def places_of(boundaries: Tensor, shape: torch.Size) -> Tensor:
    """The position of each token of packed sequences in its own, of shape (B, L)."""
    at = torch.arange(shape[0] * shape[1], device=boundaries.device)
    number = torch.bucketize(at, boundaries[1:-1].contiguous(), right=True)
    return (at - boundaries[number]).view(shape[:2])


def packed_boundaries(position_ids: Tensor | None) -> Tensor | None:
    """The boundaries of packed sequences, the rows laid end to end; None if every row is one sequence."""
    if position_ids is None:
        return None
    if torch.compiler.is_compiling():
        raise ValueError(
            "position_ids may mark packed sequences, which a compiled graph cannot look for; "
            "also pass attention_mask (one sequence a row) or cu_seq_lens_q (packed)"
        )
    new = torch.ones_like(position_ids, dtype=torch.bool)
    new[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    begins = new.flatten().nonzero().flatten()
    if bool(position_ids.flatten()[begins].any()):
        raise ValueError(_misplaced(position_ids))
    if len(begins) == len(position_ids):
        return None
    return torch.cat([begins, begins.new_tensor([position_ids.numel()])])


def check_unbroken(position_ids: Tensor | None, cached: int) -> None:
    """With a cache every row is one sequence, which goes on after the tokens `cached`; looked for on the CPU
    only, and not in a graph."""
    if position_ids is None or not position_ids.is_cpu or torch.compiler.is_compiling():
        return
    if bool((position_ids[:, 1:] != position_ids[:, :-1] + 1).any()):
        told = "position_ids mark packed sequences, and a cache holds one sequence a row"
        raise ValueError(f"{told}: leave past_key_values out")
    if bool((position_ids[:, :1] != cached).any()):
        given = sorted(set(position_ids[:, 0].tolist()))
        raise ValueError(
            f"position_ids must go on from the {cached} tokens in the cache; they begin at {given}"
        )


def check_places(position_ids: Tensor | None, attention_mask: Tensor) -> None:
    """With a mask, positions may only count a row's kept tokens, or its places: no mixer reads them."""
    if position_ids is None:
        return
    keep = attention_mask[:, -position_ids.shape[1] :].bool()
    places = torch.arange(keep.shape[1], device=keep.device)
    counted = (position_ids == keep.cumsum(1) - 1) | (position_ids == places)
    begins = keep.clone()
    begins[:, 1:] &= ~keep[:, :-1]
    first = begins.cumsum(1) == 1  # after a gap in the mask `generate` counts on from the padding
    wrong = (keep & first & ~counted).any()
    if torch.compiler.is_compiling() or not wrong.is_cpu:  # a graph cannot raise, reading from a device waits
        torch._assert_async(~wrong, MISPLACED.format(""))
    elif wrong:
        raise ValueError(_misplaced(position_ids))


def _misplaced(position_ids: Tensor) -> str:
    shown = str(position_ids[0, :12].tolist())[:-1] + (", ...]" if position_ids.shape[1] > 12 else "]")
    return MISPLACED.format(f"; got a row {shown}")


MISPLACED = (
    "position_ids must count each sequence from 0: one sequence a row, or several packed into it "
    "(without attention_mask){}. A part of a sequence, or one in another order, has no meaning without its "
    "beginning (context parallelism permutes sequences: these models have cosformer.hf.sequence_parallel, "
    "or cosformer train --sequence-parallel, instead)"
)
