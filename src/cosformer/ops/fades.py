"""Fades: what decay leaves between each token of a segment and the segment's ends.

    start_i = exp(-g_i)      end_i = exp(-(G - g_i))      whole = exp(-G)

g is the running sum of the rates in the segment and G its last value. A state from the left is read by
queries times `start`, and one that leaves to the right is built from keys times `end`; from the right and to
the left they are swapped. With packed sequences, factors across a boundary are 0.

Features are ReLU or the identity, so a factor >= 0 on a query or key is one on its features.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .call import exact_dtype, running_sum, sum_dtype


class Fades(NamedTuple):
    """Factors (B, H, L) per token, (B, H) for the whole, in the dtype of sums; None where all are 1."""

    start: Tensor | None
    end: Tensor | None
    whole: Tensor | None

    def starting(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """x (B, H or fewer, L, D) as seen from the segment's start."""
        return _times(x, self.start, key_mask)

    def ending(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """x as seen from the segment's end."""
        return _times(x, self.end, key_mask)


def fades(decay: Tensor | None, k: Tensor, first: Tensor | None = None) -> Fades:
    """The fades of rates (H,) or (B, H, L) over keys (B, Hk, L, D); `first` (B, L) marks sequence starts."""
    if decay is None and first is None:
        return Fades(None, None, None)
    B, _, L, _ = k.shape
    exact, sums = exact_dtype(k.device), sum_dtype(k.dtype)
    if decay is None:
        g = torch.zeros(B, 1, L, dtype=exact, device=k.device)
    elif decay.ndim == 3:
        g = running_sum(decay.to(exact))
    else:
        steps = torch.arange(1, L + 1, device=k.device)
        g = (decay.to(exact)[:, None] * steps).expand(B, -1, -1)
    G = g[..., -1:] if L else g.sum(-1, keepdim=True)
    start, end, whole = (torch.exp(t).to(sums) for t in (-g, g - G, -G))
    if first is not None:
        seen = first.cumsum(-1)
        start = start * (seen == 0)[:, None]
        end = end * (seen == seen[:, -1:])[:, None]
        whole = whole * (~first.any(-1))[:, None, None]
    return Fades(start, end, whole[..., 0])


def grouped(x: Tensor, heads: int) -> Tensor:
    """Keys or values (B, Hk, L, .) repeated to one head per query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Keys or values (B, H, S, .), 0 where masked: a selection, not a product, since NaN must not survive."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0)


def faded_state(state: Tensor, fade: Tensor | None) -> Tensor:
    """A state (B, H, F, E + 1), faded across the segment that follows it."""
    return state if fade is None else state * fade[..., None, None]


def _times(x: Tensor, factor: Tensor | None, key_mask: Tensor | None) -> Tensor:
    if factor is None:
        return x
    x = masked(x, key_mask).to(sum_dtype(x.dtype))  # half precision would lose small factors
    return (x if factor.shape[1] == 1 else grouped(x, factor.shape[1])) * factor[..., None]
