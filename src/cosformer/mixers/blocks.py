"""Softmax over chosen keys only, blocks of keys for blocks of queries: what the sparse mixers share.

    out_i = sum_{j in A_i} exp(q_i . k_j / sqrt(D)) v_j / sum_{j in A_i} exp(q_i . k_j / sqrt(D))

No N x N mask is made: scores are (blocks, C, keys of the block), so memory is N times the keys of a query.

    C   block size      n   blocks of a sequence      W   blocks of keys for one block of queries
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

NOTHING = -1e30  # the score of a hidden key; finite, so that a row of them gives no NaN


def split(x: Tensor, size: int) -> Tensor:
    """(B, H, N, D) -> (B, H, n, size, D), the last block padded with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def join(x: Tensor, length: int) -> Tensor:
    """(B, H, n, size, D) -> (B, H, length, D)."""
    return x.flatten(2, 3)[:, :, :length]


def kept(x: Tensor, key_mask: Tensor | None, size: int) -> Tensor:
    """Which places of the blocks of x (B, H, N, D) hold a key: (B or 1, n, size)."""
    if key_mask is None:
        key_mask = torch.ones(1, x.shape[2], dtype=torch.bool, device=x.device)
    return F.pad(key_mask, (0, -x.shape[2] % size)).unflatten(1, (-1, size))


def take(x: Tensor, index: Tensor) -> Tensor:
    """The blocks of x (B, H, n, C, D) at index (B or 1, H or 1, m, W): (B, H, m, W C, D).

    An index out of range takes some block, for `places` to hide.
    """
    B, H, n, C, D = x.shape
    first = torch.arange(B * H, device=x.device).view(B, H, 1, 1) * n
    # index_select: its gradient adds whole rows
    chosen = x.reshape(B * H * n, C * D).index_select(0, (index.clamp(0, n - 1) + first).flatten())
    return chosen.view(B, H, index.shape[2], index.shape[3] * C, D)


def places(index: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the keys that `take` gathers, and whether each exists: (B or 1, H or 1, m, W C) each."""
    n, C = inside.shape[1:]
    at = (index[..., None] * C + torch.arange(C, device=index.device)).flatten(-2)
    row = torch.arange(len(inside), device=index.device).view(-1, 1, 1, 1)
    there = inside[row, index.clamp(0, n - 1)] & ((index >= 0) & (index < n))[..., None]
    return at, there.flatten(-2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax of q (..., C, D) over allowed keys k (..., K, D): (..., C, E), and the log normaliser (..., C).

    A query with no key gives zeros and a log of NOTHING. All in float32, or float64 for float64 input.
    """
    with full_precision(q.device.type):  # NOTHING is no number of half precision
        return _attend(q, k, v, allowed, bias)


def full_precision(device: str) -> AbstractContextManager:
    """Products as precise as their operands, where autocast would make them half."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # not on meta
    return torch.autocast(device, enabled=False) if on else nullcontext()


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    s = (q @ k.mT) * q.shape[-1] ** -0.5
    s = (s if bias is None else s + bias).masked_fill(~allowed, NOTHING)
    top = s.detach().amax(-1, keepdim=True)
    w = torch.exp(s - top).masked_fill(~allowed, 0)
    z = w.sum(-1, keepdim=True)
    some = z.clamp_min(torch.finfo(z.dtype).tiny)
    return w @ v / some, torch.where(z > 0, top + some.log(), NOTHING).squeeze(-1)


def merge(*parts: tuple[Tensor, Tensor]) -> Tensor:
    """One softmax over disjoint groups of keys, from that over each: outputs weighted by normalisers."""
    outs, logs = (torch.stack(x, -1) for x in zip(*parts, strict=True))
    return (outs * logs.softmax(-1).unsqueeze(-2)).sum(-1)
