"""Trust on first use: a backend is compared with the torch backend before it serves a kind of call."""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import _torch
from .call import Backend, Call, Grads, Inputs, Outputs, Upstream, capturing, projected, sum_dtype

LENGTHS = (0, 1, 40, 150)  # of a trial: the largest that is not above the call's
EXACT = 1e-3  # accepted difference in float32, relative to the largest number ...
ROUGH = 5e-2  # ... and in half precision, or if products are TF32

_log = logging.getLogger("cosformer")
_doubts: dict[tuple[str, Backend, "Kind"], str | None] = {}  # results of this process's trials


class Kind(NamedTuple):
    """What distinguishes calls that may run different kernels."""

    device: torch.device
    dtype: torch.dtype
    sizes: tuple[int, int]
    group: int  # query heads per key head
    lengths: tuple[int, int]
    rates: int  # dimensions of the rates, or 0
    masked: bool
    packed: bool
    state: bool
    tf32: bool
    call: Call  # without what makes no difference, so that a stream is tried once


def kind_of(x: Inputs, call: Call) -> Kind:
    (_, H, L, D), (_, Hk, S, E) = x.q.shape, x.v.shape
    horizon = 1000.0 if call.cosine else math.inf
    plain = call._replace(horizons=(horizon,), q_offset=_like(call.q_offset), position=0, backend=None)
    return Kind(
        device=x.q.device,
        dtype=x.q.dtype,
        sizes=(D, E),
        group=H // Hk,
        lengths=(_like(L), _like(S)),
        rates=0 if x.decay is None else x.decay.ndim,
        masked=x.key_mask is not None,
        packed=x.cu_seqlens is not None,
        state=x.state is not None,
        tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",
        call=plain,
    )


def _like(length: int) -> int:
    return max(n for n in LENGTHS if n <= length)


def case(kind: Kind) -> tuple[Inputs, Upstream]:
    """A small call of this kind, its tensors laid out as projections are."""
    numbers = torch.Generator().manual_seed(0)
    like = torch.empty(1 if kind.packed else 2, dtype=kind.dtype, device=kind.device)
    B, (D, E), (L, S), H = len(like), kind.sizes, kind.lengths, kind.group

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=numbers, device="cpu")
        return drawn.to(kind.device, sum_dtype(kind.dtype))

    def tokens(heads: int, length: int, size: int) -> Tensor:
        return projected(like, heads, length, size).copy_(normal(B, heads, length, size))

    q, k, v, dout = tokens(H, L, D), tokens(1, S, D), tokens(1, S, E), tokens(H, L, E)
    shape = kind.call.state_shape(q, v)
    rates = {0: None, 1: (H,), 3: (B, H, S)}[kind.rates]
    x = Inputs(
        q,
        k,
        v,
        decay=None if rates is None else normal(*rates).abs(),
        key_mask=normal(B, S) > -1 if kind.masked else None,
        cu_seqlens=torch.tensor([0, S // 3, S], device="cpu") if kind.packed else None,
        state=normal(*shape).abs() if kind.state else None,
    )
    return x, Upstream(dout, normal(*shape) if kind.call.keep_state else None)


def difference(ours: Backend, kind: Kind) -> str | None:
    """How a backend differs from the torch backend on a small call; None if they agree."""
    x, upstream = case(kind)

    def results(backend: Backend) -> Iterator[tuple[str, Tensor | None]]:
        y = backend.forward(x, kind.call)
        grads = backend.backward(upstream, x, y, kind.call)
        yield from zip(Outputs._fields, y, strict=True)
        yield from ((f"the gradient of {name}", g) for name, g in zip(Grads._fields, grads, strict=True))

    limit = EXACT if kind.dtype == torch.float32 and not kind.tf32 else ROUGH
    for (name, a), (_, b) in zip(results(ours), results(_torch.BACKEND), strict=True):
        if a is None or b is None or not b.numel():
            continue
        a, b = a.double(), b.double()
        error = ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
        if not error <= limit:  # also if it is NaN
            return f"{name} differs by {error:.2g} of its largest number, {limit:g} is accepted"
    return None


def doubt(name: str, ours: Backend, kind: Kind) -> str | None:
    """Why not to trust a backend with a kind of call, or None; the first such call waits for a trial."""
    key = name, ours, kind
    if key in _doubts:
        return _doubts[key]
    if capturing(kind.device):  # nothing may wait then
        reason: str | None = "there is none while a CUDA graph is captured; run the step once before that"
    else:
        reason = _doubts[key] = _trial(ours, kind)
    if reason is not None:
        _tell(name, reason, kind)
    return reason


@cache  # log it once
def _tell(name: str, reason: str, kind: Kind) -> None:
    text = "the %s backend failed its trial, and the torch backend runs instead: %s; it was tried with %s"
    _log.error(text, name, reason, kind)


def forget() -> None:
    """Try each kind of call again, because the backends have changed."""
    _doubts.clear()


def _trial(ours: Backend, kind: Kind) -> str | None:
    try:
        return difference(ours, kind)
    except torch.OutOfMemoryError:
        raise  # says nothing about the backend: the call would not fit either, and another may
    except Exception as error:  # from a compiler or driver; whatever it is, it must not end a training run
        return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]


def tried(name: str, ours: Backend) -> Backend:
    """The backend on trial. If it fails, the torch backend runs, unless the backend was named."""

    def chosen(x: Inputs, call: Call) -> Backend:
        reason = doubt(name, ours, kind_of(x, call))
        if reason is not None and call.backend == name:
            raise RuntimeError(f"backend {name!r} failed its trial on {x.q.device}: {reason}")
        return ours if reason is None else _torch.BACKEND

    def forward(x: Inputs, call: Call) -> Outputs:
        return chosen(x, call).forward(x, call)

    def backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> Grads:
        return chosen(x, call).backward(upstream, x, y, call)

    return replace(ours, forward=forward, backward=backward)


def verdict(name: str, ours: Backend, device: torch.device) -> str:
    """The result of a trial with a language model's call, as a phrase."""
    call = Call((1000.0,), causal=True, relu=True)
    x = torch.empty(1, 1, LENGTHS[-1], 64, dtype=torch.bfloat16, device=device)
    rates = torch.empty(1, 1, LENGTHS[-1], device=device)
    try:
        return doubt(name, ours, kind_of(Inputs(x, x, x, rates), call)) or "agrees with the torch backend"
    except torch.OutOfMemoryError:
        return "none: the device has no memory left"
