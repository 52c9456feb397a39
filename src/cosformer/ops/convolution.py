"""A short depthwise convolution along the sequence: each channel a weighted sum of a few neighbouring tokens.

    y_t = sum_s w_s x_(t + ahead - s)      s = 0 .. width - 1      ahead = 0 is causal

Tokens outside the sequence are zero, and so are those of another sequence packed into the same row. The
gradient of x is the same convolution with the taps reversed: dx_t = sum_s w_s dy_(t - ahead + s).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _rows, modes
from .call import dense, gradients_of
from .shard import Shard


def short_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    ahead: int = 0,
    before: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """x (B, L, C), weight (C, width) -> (B, L, C).

    before       (B, width - 1, C), the tokens before x in a causal stream
    cu_seqlens   boundaries of sequences packed into one row; none sees another
    shard        x is a part of a longer sequence: the tokens beside it come from the neighbours
    """
    if shard is not None:
        return _sharded(x, weight, ahead, shard)
    if before is not None:
        return _streamed(x, weight, before)
    if _rows.takes(x, weight):
        boundaries = None if cu_seqlens is None else cu_seqlens.to("cpu", torch.int64).contiguous()
        return _Convolution.apply(x, weight, ahead, boundaries)
    return _plain(x, weight, ahead, cu_seqlens)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, ahead: int, boundaries: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, boundaries)
        ctx.ahead = ahead
        return _rows.convolve(x, _taps(weight), ahead, boundaries)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, boundaries = ctx.saved_tensors
        if modes.beyond_one_gradient(dy):
            again = lambda x, w: _plain(x, w, ctx.ahead, boundaries)
            return *gradients_of(again, (x, weight), dy), None, None
        dy, dx, dweight = dense(dy), None, None
        if ctx.needs_input_grad[0]:
            back = weight.shape[1] - 1 - ctx.ahead
            dx = _rows.convolve(dy, _taps(weight.flip(1)), back, boundaries)
        if ctx.needs_input_grad[1]:
            dweight = _rows.convolution_weight_gradient(x, dy, weight.shape[1], ctx.ahead, boundaries)
            dweight = dweight.T.to(weight.dtype)
        return dx, dweight, None, None


def _taps(weight: Tensor) -> Tensor:
    """(width, C) in float32, as the kernel reads them."""
    return weight.detach().T.to(torch.float32).contiguous()


def _streamed(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    if not x.shape[1]:  # no window is as short as what came before
        return x
    seen = torch.cat([before.to(x.dtype), x], 1)
    windows = seen.unfold(1, weight.shape[1], 1)  # (B, L, C, width), oldest first
    return (windows * weight.flip(1).to(x.dtype)).sum(-1)


def _sharded(x: Tensor, weight: Tensor, ahead: int, shard: Shard) -> Tensor:
    L, back = x.shape[1], weight.shape[1] - 1 - ahead
    seen, cu_seqlens = shard.with_halo(x, back, ahead)
    y = short_convolution(seen, weight, ahead=ahead, cu_seqlens=cu_seqlens)
    return y.view(len(x), -1, x.shape[2])[:, back : back + L]


def _plain(x: Tensor, weight: Tensor, ahead: int, cu_seqlens: Tensor | None) -> Tensor:
    L, width = x.shape[1], weight.shape[1]
    back, w = width - 1 - ahead, weight.to(x.dtype)
    padded = F.pad(x, (0, 0, back, ahead))
    y = x * w[:, ahead]
    for s in (s for s in range(width) if s != ahead):
        shifted = padded[:, width - 1 - s : width - 1 - s + L]
        if cu_seqlens is not None:
            shifted = shifted.masked_fill(~_together(cu_seqlens, L, s - ahead)[:, None], 0)
        y = torch.addcmul(y, shifted, w[:, s])
    return y


def _together(cu_seqlens: Tensor, length: int, back: int) -> Tensor:
    """Which of the packed tokens (L,) share a sequence with the token `back` places before them."""
    at = torch.arange(length, device=cu_seqlens.device)
    ends = cu_seqlens[1:].contiguous()
    number = torch.bucketize(at, ends, right=True)
    return number == torch.bucketize((at - back).clamp(0, length - 1), ends, right=True)
