"""Forgetting attention: softmax with the gated decay of cosFormer, so that only ReLU and exp differ.

    out_i = sum_j s_ij v_j / sum_j s_ij      s_ij = exp(q_i . k_j / sqrt(D) - |A_i - A_j|)

Looking back, A_i cancels: -(A_i - A_j) is one more feature, 1 of each query times A_j of the key, and torch's
fused attention needs no mask. Looking both ways, all scores are formed.
"""

import math

import torch
import torch.nn.functional as F

from ..decay import Decay
from . import Sizes, register
from .blocks import full_precision
from .softmax import Softmax


@register("forgetting")
class Forgetting(Softmax):
    """The Forgetting Transformer's attention (Lin et al., 2025, arXiv:2503.02130), with the convolution,
    norms and gate of `cosformer`; it keeps all keys and values.
    """

    sharding = "its running sum of rates is of all tokens before"
    rope = spe = "its decay is its position encoding"
    cross = "it reads one rate per position from the queries' own sequence"
    reads_input = True
    learned_positions = False
    short_conv = 4
    qk_norm = True

    def __init__(self, sizes: Sizes):
        super().__init__(sizes)
        self.decay = Decay("gated", heads=self.heads, span=self.max_length, width=self.width)

    def mix(self, q, k, v, *, x, causal, key_mask):
        faded = self._sums(x, key_mask)
        with full_precision(q.device.type):  # half would lose the sums
            dtype = faded.dtype
            if causal:
                out, _ = self._looking_back(q, k, v, faded, None, key_mask)
            else:
                bias = -(faded[..., :, None] - faded[..., None, :]).abs()
                if key_mask is not None:
                    bias = bias.masked_fill(~key_mask[:, None, None], -math.inf)
                out = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=bias)
        return out.to(v.dtype)

    def step(self, q, k, v, state, *, x, key_mask):
        faded = self._sums(x, key_mask)
        if state is not None:
            faded = faded + state.k[:, :, -1:, -1]
        with full_precision(q.device.type):
            out, state = self._looking_back(q, k, v, faded, state, key_mask)
        return out.to(v.dtype), state

    def _sums(self, x, key_mask):
        """A (B, H, L): the running sums of the rates."""
        rates = self.decay.rates(x, key_mask)
        assert rates is not None
        return rates.cumsum(-1)

    def _looking_back(self, q, k, v, faded, state, key_mask):
        """Softmax over one more feature; what it scales scores by depends on their number, which grows."""
        q, k, v = (t.to(faded.dtype) for t in (q, k, v))
        scale = math.sqrt((self.head_dim + 1) / self.head_dim)
        q = F.pad(q * scale, (0, 1), value=math.sqrt(self.head_dim + 1))
        k = torch.cat([k, faded[..., None]], -1)
        v = F.pad(v, (0, 1))  # of one size with q and k, as the fused kernel wants them
        out, state = super().step(q, k, v, state, x=None, key_mask=key_mask)
        return out[..., :-1], state
