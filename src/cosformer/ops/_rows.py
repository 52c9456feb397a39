"""Rows through the native kernel: what a layer does to tokens beside attention, and whole blocks of it."""

from collections.abc import Collection

import torch
from torch import Tensor

from . import modes
from ._native import CONVOLUTION, DTYPES, NORM, check, kernel, problem, result_like


def takes(x: Tensor, *beside: Tensor, dtypes: Collection[torch.dtype] = DTYPES) -> bool:
    """Whether the kernel can take this tensor, and those read `beside` it, now."""
    if not modes.have_addresses(x, *beside) or not x.is_cpu or x.dtype not in dtypes:
        return False
    return x.numel() > 0 and not x.is_neg() and problem() is None


def convolve(x, taps, ahead, boundaries) -> Tensor:
    """x (B, L, C) with taps (width, C), in float32, -> (B, L, C)."""
    y = result_like(torch.empty(x.shape, dtype=x.dtype, device=x.device))
    check(kernel().convolution(_convolution(x, y, len(taps), ahead, boundaries, taps, None)))
    return y


def convolution_weight_gradient(x, dy, width, ahead, boundaries) -> Tensor:
    """The gradient (width, C) of the taps, in float32."""
    shape = (torch.get_num_threads(), width, x.shape[2])
    parts = torch.zeros(shape, dtype=torch.float32, device=x.device)
    check(kernel().convolution(_convolution(x, dy, width, ahead, boundaries, None, parts)))
    return parts.sum(0)


def _convolution(x, y, width, ahead, boundaries, taps, parts) -> bytes:
    (B, L, C), threads = x.shape, torch.get_num_threads()
    sequences = (0, 0) if boundaries is None else (len(boundaries) - 1, boundaries.data_ptr())
    tensors = [(t.data_ptr(), DTYPES[t.dtype], t.stride(0), 0, t.stride(1), t.stride(2)) for t in (x, y)]
    pointers = (0 if t is None else t.data_ptr() for t in (taps, parts))
    return CONVOLUTION.pack(B, L, C, width, ahead, threads, *sequences, *tensors[0], *tensors[1], *pointers)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of rows (n, D)."""
    y = result_like(torch.empty(x.shape, dtype=x.dtype, device=x.device))
    check(kernel().norm(_norm(x, weight, eps, y, None, None, None)))
    return y


def norm_gradients(x: Tensor, weight: Tensor, eps: float, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and, in float32, of the weight."""
    dx = result_like(torch.empty(x.shape, dtype=x.dtype, device=x.device))
    shape = (torch.get_num_threads(), x.shape[1])
    parts = torch.zeros(shape, dtype=torch.float32, device=x.device)
    check(kernel().norm(_norm(x, weight, eps, None, dy, dx, parts)))
    return dx, parts.sum(0)


def _norm(x, weight, eps, y, dy, dx, parts) -> bytes:
    tensors = [
        (0,) * 6 if t is None else (t.data_ptr(), DTYPES[t.dtype], 0, 0, x.shape[1], 1)
        for t in (x, y, dy, dx)
    ]
    dweight = 0 if parts is None else parts.data_ptr()
    sizes = (*x.shape, torch.get_num_threads(), eps, weight.data_ptr())
    return NORM.pack(*sizes, *(number for t in tensors for number in t), dweight)


def step(
    blocks: bytes,
    kept: bytes,
    count: int,
    dtype: torch.dtype,
    x: Tensor,
    position: int,
    ends: bytes | None = None,
    ids: Tensor | None = None,
    places: Tensor | None = None,
    logits: Tensor | None = None,
) -> bool:
    """Update x (B, C), in float32, and the blocks' streams in place; `dtype` is that of the parameters.

    False, with the streams unchanged, if a table has no row for an id or a place.
    """
    sizes = (*x.shape, position, torch.get_num_threads())
    outer = [0 if t is None else t.data_ptr() for t in (ids, places, logits)]
    failed = kernel().step(blocks, kept, count, DTYPES[dtype], x.data_ptr(), *sizes, ends, *outer)
    if failed == 2:
        raise ValueError("decay rates must be finite and 0 or more; a gate of this model gives others")
    if failed != 3:
        check(failed)
    return failed != 3
