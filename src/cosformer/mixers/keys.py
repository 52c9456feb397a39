"""Keys and values kept as they are: what some mixers remember of a stream, and most of a source."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.checks import shown

ROOM = 64  # the least number of keys to make room for


@dataclass(frozen=True)
class Keys:
    """Keys and values (B, H, S, .) of a stream and their positions; the next token stands at `position`."""

    k: Tensor
    v: Tensor
    key_mask: Tensor | None  # (B, S), True = keep; None while nothing was masked
    at: Tensor  # (S,)
    position: int

    def index_select(self, index: Tensor) -> "Keys":
        """The keys with the batch rows in `index`, as beam search needs."""
        mask = None if self.key_mask is None else self.key_mask.index_select(0, index)
        return replace(self, k=self.k.index_select(0, index), v=self.v.index_select(0, index), key_mask=mask)

    def behind(self, more: int) -> "Keys":
        """The keys and `more` that were written into the room behind them."""
        B, H, S, D = self.k.shape
        k, v = (x.as_strided((B, H, S + more, D), x.stride()) for x in (self.k, self.v))
        at = torch.arange(self.position + more, device=self.at.device)
        return replace(self, k=k, v=v, at=at, position=self.position + more)

    def keep(self, index: Tensor) -> "Keys":
        """Only the keys at `index`; the others are forgotten."""
        k, v = (x.index_select(2, index) for x in (self.k, self.v))
        mask = None if self.key_mask is None else self.key_mask[:, index]
        return replace(self, k=k, v=v, key_mask=mask, at=self.at[index])


def with_room(keys: Keys) -> Keys:
    """A copy with room for more behind the last key.

    Its only owner may write into that room, and then include what was written with `behind`.
    """
    S = keys.k.shape[2]

    def roomy(x: Tensor) -> Tensor:
        more = x.new_empty(*x.shape[:2], S + max(ROOM, S // 4), x.shape[3])[:, :, :S]
        return more.copy_(x)

    return replace(keys, k=roomy(keys.k), v=roomy(keys.v))


def room(x: Tensor) -> int:
    """How many keys the memory of x (B, H, S, D) has room for: S, unless `with_room` made it."""
    B, H, S, D = x.shape
    rows = x.stride(1) // max(D, 1)
    made = x.stride() == (H * rows * D, rows * D, D, 1) and x.storage_offset() == 0
    return rows if made and x.untyped_storage().nbytes() == B * H * rows * D * x.itemsize else S


def extend(keys: Keys | None, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Keys:
    """The keys followed by the next ones."""
    if not isinstance(keys, Keys | None):
        raise TypeError(f"state must be one that this mixer's stream returned, or None; got {shown(keys)}")
    start = 0 if keys is None else keys.position
    at = torch.arange(start, start + k.shape[2], device=k.device)
    if keys is None:
        return Keys(k, v, key_mask, at, k.shape[2])
    if keys.key_mask is not None or key_mask is not None:
        key_mask = torch.cat([all_kept(keys.k, keys.key_mask), all_kept(k, key_mask)], 1)
    k, v = torch.cat([keys.k, k], 2), torch.cat([keys.v, v], 2)
    return Keys(k, v, key_mask, torch.cat([keys.at, at]), start + len(at))


def all_kept(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """The mask (B, S) of keys (B, H, S, D), all True if there is none."""
    return k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
