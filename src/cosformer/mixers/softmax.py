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

    def state_size(self):
        return self.heads * self.max_length * 2 * self.head_dim
