"""Softmax attention, the mechanism every other is compared with; also the file to copy when adding one.

    out_i = sum_j exp(q_i . k_j / sqrt(D)) v_j / sum_j exp(q_i . k_j / sqrt(D))

torch computes it; our part is streams and sequences in several processes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import Admission, Mixer, register
from .keys import extend

PAIRS = 2**24  # of a query and a key in one mask


@register("softmax")
class Softmax(Mixer):
    """Scaled dot-product attention (Vaswani et al., 2017, arXiv:1706.03762); it keeps all keys and values."""

    streaming = True
    sharding: Admission = True
    layer_type = "full_attention"

    def mix(self, q, k, v, *, x, causal, key_mask):
        if key_mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        allowed = key_mask[:, None, None, :]
        if causal:
            allowed = allowed & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

    def step(self, q, k, v, state, *, x, key_mask):
        keys = extend(state, k, v, key_mask)
        ends = state is None or q.shape[2] == 1  # the beginning, or one last token, needs no mask
        if keys.key_mask is None and ends:
            return F.scaled_dot_product_attention(q, keys.k, keys.v, is_causal=state is None), keys
        allowed = keys.at <= keys.at[-q.shape[2] :, None]
        if keys.key_mask is not None:
            allowed = allowed & keys.key_mask[:, None, None, :]
        return F.scaled_dot_product_attention(q, keys.k, keys.v, attn_mask=allowed), keys

    def mix_sharded(self, q, k, v, shard, *, x, causal, key_mask):
        """Every process gathers all keys and values: traffic and memory grow with the length."""
        shard.check_whole(k, v)
        k, v = shard.whole(k, 2), shard.whole(v, 2)
        mask = None if key_mask is None else shard.whole(key_mask, 1)
        at = torch.arange(shard.total, device=q.device)
        begins = None if shard.places is None else at - shard.whole(shard.places, 1)  # of its sequence

        def read(q: Tensor, here: Tensor) -> Tensor:
            allowed = (at <= here[:, None] if causal else (at >= 0).expand(len(here), -1))[None, None]
            if begins is not None:
                allowed = allowed & (begins[:, None, None] == begins[:, None, here, None])
            if mask is not None:
                allowed = allowed & mask[:, None, None]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

        here, some = at[shard.offset :][: q.shape[2]], max(1, PAIRS // shard.total)
        if q.shape[2] <= some:
            out = read(q, here)
        else:  # some queries at a time: one mask for all would grow with the square of the length
            blocks = zip(q.split(some, 2), here.split(some), strict=True)
            again: Any = {"use_reentrant": False, "preserve_rng_state": False}
            out = torch.cat([checkpoint(read, *block, **again) for block in blocks], 2)
        return out, extend(None, k, v, mask) if causal else None
