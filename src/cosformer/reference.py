"""THE DEFINITION of cosFormer attention, as it is defined: quadratic, slow, and the judge of every backend.

    out_i = sum_j s_ij v_j / sum_j s_ij
    s_ij  = relu(q_i) . relu(k_j) * cos(pi/2 * (i - j) / M) * exp(-|A_i - A_j|)

M is the horizon, the distance at which a key stops mattering. The last factor is the optional decay: A is the
running sum of the rates (rate * position if constant); without rates this is the paper's operator. It can be
computed at linear cost because cos(a - b) = cos a cos b + sin a sin b splits the weight into features of i
times features of j (see ops/_torch.py).

    B          batch                     L, S   query and key length
    H, Hk      query, key/value heads    D, E   key and value size
"""

import math

import torch
from torch import Tensor


def weights(q, k, *, horizon, causal=False, key_mask=None, q_offset=0, decay=None) -> Tensor:
    """The weights s_ij before normalisation: q (B, H, L, D), k (B, Hk, S, D) -> (B, H, L, S)."""
    (H, L), S = q.shape[1:3], k.shape[2]
    i = torch.arange(L, device=q.device)[:, None] + q_offset  # the query's position
    j = torch.arange(S, device=q.device)[None, :]
    M = torch.as_tensor(horizon, dtype=torch.float64, device=q.device).reshape(-1, 1, 1)  # (1 or H, 1, 1)
    cosine = torch.cos((i - j) / M * (math.pi / 2)).to(q)
    s = (q.relu() @ k.relu().repeat_interleave(H // k.shape[1], 1).mT) * cosine
    if decay is not None and decay.ndim == 1:  # one rate per head
        s = s * torch.exp(-decay[:, None, None] * (i - j).abs()).to(q)
    elif decay is not None:  # one rate per head and position: (B, H, S)
        A = decay.double().cumsum(-1)
        s = s * torch.exp(-(A[..., :, None] - A[..., None, :]).abs()).to(q)
    if causal:
        s = s.masked_fill(j > i, 0)
    if key_mask is not None:
        s = s.masked_fill(~key_mask[:, None, None, :], 0)
    return s


def attention(q, k, v, *, eps=1e-6, **kwargs) -> Tensor:
    """cosFormer attention: q (B, H, L, D), k (B, Hk, S, D), v (B, Hk, S, E) -> (B, H, L, E)."""
    s = weights(q, k, **kwargs)
    return s @ v.repeat_interleave(q.shape[1] // v.shape[1], 1) / s.sum(-1, keepdim=True).clamp_min(eps)
