"""A short depthwise convolution along the sequence: each channel a weighted sum of a few neighbouring tokens.

    y_t = sum_s w_s x_(t + ahead - s)      s = 0 .. width - 1      ahead = 0 is causal

Tokens outside the sequence are zero, and so are those of another sequence packed into the same row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    ahead: int = 0,
    before: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """x (B, L, C), weight (C, width) -> (B, L, C).

    before       (B, width - 1, C), the tokens before x in a causal stream
    cu_seqlens   boundaries of sequences packed into one row; none sees another
    """
    L, width = x.shape[1], weight.shape[1]
    back = width - 1 - ahead
    if before is None:
        padded = F.pad(x, (0, 0, back, ahead))
    else:
        padded = torch.cat([before.to(x.dtype), x], 1)
    w = weight.to(x.dtype)
    y = padded[:, back : back + L] * w[:, ahead]
    for s in range(width):
        if s != ahead:
            shifted = padded[:, back + ahead - s : back + ahead - s + L]
            if cu_seqlens is not None:
                shifted = shifted * _together(cu_seqlens, L, s - ahead).to(x.dtype)[:, None]
            y = torch.addcmul(y, shifted, w[:, s])
    return y


def _together(cu_seqlens: Tensor, length: int, back: int) -> Tensor:
    """Which of the packed tokens (L,) have the token `back` places before them in their own sequence."""
    at = torch.arange(length, device=cu_seqlens.device)
    number = torch.bucketize(at, cu_seqlens[1:], right=True)
    return number == torch.bucketize((at - back).clamp(0, length - 1), cu_seqlens[1:], right=True)
