"""The RMS norm of the last dimension, in one pass over memory where the native kernel is.

    y = w n      n = r x      r = 1 / sqrt(mean(x^2) + eps)

Backward, with g = w dy: dw = sum dy n and dx = r (g - n mean(g n)).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _rows, modes
from .call import dense, gradients_of


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., D), weight (D,) -> x normed, in the dtype of x; computed in float32 or wider."""
    if not _rows.takes(x, weight):
        return _plain(x, weight, eps)
    if not torch.is_grad_enabled():  # for one token autograd takes longer than the norm
        return _rows.norm(_flat(x), _scale(weight), eps).view(x.shape)
    return _Norm.apply(x, weight, eps)


def _plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype in (torch.float16, torch.bfloat16):
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _rows.norm(_flat(x), _scale(weight), eps).view(x.shape)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        if modes.beyond_one_gradient(dy):
            return *gradients_of(lambda x, w: _plain(x, w, ctx.eps), (x, weight), dy), None
        dy = dense(dy).to(x.dtype)
        dx, dweight = _rows.norm_gradients(_flat(x), _scale(weight), ctx.eps, _flat(dy))
        return dx.view(x.shape), dweight.to(weight.dtype), None


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).contiguous()


def _scale(weight: Tensor) -> Tensor:
    ready = weight.dtype == torch.float32 and weight.is_contiguous()
    return weight if ready else weight.detach().float().contiguous()
