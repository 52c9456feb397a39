"""Polynomial attention: softmax replaced by a power of the scores.

    out_i = sum_{j in A_i} (q_i . k_j / sqrt(D))^p v_j / sqrt(|A_i|)      A_i: the keys that query i may see

Weights may be negative and do not sum to one; 1/sqrt(N) keeps the matrix's norm on softmax's scale
(Saratchandran et al., 2024, arXiv:2410.18613). N is the number of keys a query sees, so padding and later
tokens change nothing.
"""

import torch

from . import Mixer, Sizes, register

CHUNK = 256  # queries at a time: the scores held are CHUNK x S, not L x S


@register("polynomial")
class Polynomial(Mixer):
    """The power `degree` of the scores, scaled: O(N^2) (Saratchandran et al., 2024, arXiv:2410.18613)."""

    def __init__(self, sizes: Sizes, *, degree: int = 3):
        super().__init__(sizes)
        if not isinstance(degree, int) or degree < 1:
            raise ValueError(f"degree must be an int of at least 1; got {degree!r}")
        self.degree = degree

    def mix(self, q, k, v, *, x, causal, key_mask):
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k, u = q.to(dtype) * self.head_dim**-0.5, k.to(dtype), v.to(dtype)
        j = torch.arange(k.shape[2], device=k.device)
        kept = (j >= 0)[None] if key_mask is None else key_mask
        parts = []
        for start in range(0, q.shape[2], CHUNK):
            rows = q[:, :, start : start + CHUNK]
            allowed = kept[:, None, None]  # (B, 1, 1, S)
            if causal:
                allowed = allowed & (j <= start + torch.arange(rows.shape[2], device=k.device)[:, None])
            seen = allowed.sum(-1, keepdim=True).clamp_min(1)
            scores = ((rows @ k.mT) ** self.degree).masked_fill(~allowed, 0)
            parts.append((scores / seen.sqrt().to(dtype)) @ u)
        return torch.cat(parts, 2).to(v.dtype)
