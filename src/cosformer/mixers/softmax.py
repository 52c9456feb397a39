"""Softmax attention, the mechanism every other is compared with; also the file to copy when adding one.

    out_i = sum_j exp(q_i . k_j / sqrt(D)) v_j / sum_j exp(q_i . k_j / sqrt(D))

torch computes it; ours is only what a stream keeps.
"""

import torch
import torch.nn.functional as F

from . import Mixer, register
from .keys import extend


@register("softmax")
class Softmax(Mixer):
    """Scaled dot-product attention (Vaswani et al., 2017, arXiv:1706.03762); it keeps all keys and values."""

    streaming = True
    sharding = True
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
        ends = state is None or q.shape[2] == 1  # a beginning, or one last token, which needs no mask
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
        here = at[shard.offset :][: q.shape[2], None]
        allowed = (at <= here if causal else (at >= 0).expand(q.shape[2], -1))[None, None]
        if shard.places is not None:
            begins = at[None] - shard.whole(shard.places, 1)  # where each token's sequence does
            allowed = allowed & (begins[:, None, None] == begins[:, None, here[:, 0], None])
        if mask is not None:
            allowed = allowed & mask[:, None, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return out, extend(None, k, v, mask) if causal else None

    def state_size(self):
        return self.heads * self.max_length * 2 * self.head_dim
