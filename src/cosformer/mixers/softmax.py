"""Softmax attention, the mechanism every other is compared with; also the file to copy when adding one.

    out_i = sum_j exp(q_i . k_j / sqrt(D)) v_j / sum_j exp(q_i . k_j / sqrt(D))

torch computes it; ours is only the cache of a stream.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from . import Mixer, register


@dataclass(frozen=True)
class Cache:
    """The keys, values and mask (B, S) of a stream so far and the place of each key; the next token stands at `position`."""

    k: Tensor
    v: Tensor
    key_mask: Tensor
    at: Tensor  # (S,)
    position: int

    def index_select(self, index: Tensor) -> "Cache":
        """The cache with batch rows chosen by `index`: the reordering that beam search asks for."""
        k, v, key_mask = (x.index_select(0, index) for x in (self.k, self.v, self.key_mask))
        return replace(self, k=k, v=v, key_mask=key_mask)


def extend(cache: Cache | None, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Cache:
    """The cache with the next keys and values in it."""
    B, _, n, _ = k.shape
    start = 0 if cache is None else cache.position
    key_mask = torch.ones(B, n, dtype=torch.bool, device=k.device) if key_mask is None else key_mask
    at = torch.arange(start, start + n, device=k.device)
    if cache is None:
        return Cache(k, v, key_mask, at, n)
    k, v = torch.cat([cache.k, k], 2), torch.cat([cache.v, v], 2)
    return Cache(k, v, torch.cat([cache.key_mask, key_mask], 1), torch.cat([cache.at, at]), start + n)


@register("softmax")
class Softmax(Mixer):
    """Scaled dot-product attention (Vaswani et al., 2017, arXiv:1706.03762), by torch. Its state is the key-value cache."""

    streaming = True

    def mix(self, q, k, v, *, causal, key_mask):
        if key_mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        allowed = key_mask[:, None, None, :]
        if causal:
            allowed = allowed & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

    def step(self, q, k, v, state, *, key_mask):
        state = extend(state, k, v, key_mask)
        allowed = state.key_mask[:, None, None, :] & (state.at <= state.at[-q.shape[2] :, None])
        return F.scaled_dot_product_attention(q, state.k, state.v, attn_mask=allowed), state

    def state_size(self):
        return self.heads * self.max_length * 2 * self.head_dim
