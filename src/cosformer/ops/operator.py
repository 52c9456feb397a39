"""The operator torch sees: choice of backend, one forward and one backward, autograd, vmap, and what tracing needs."""

import importlib
import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .checks import autocasting, check_boundaries, check_rate_values, no_cosine, state_shape

BACKENDS = ("native", "torch")  # best first

# Backends: modules with the same two functions. A named backend runs or raises with the reason; none falls back silently.


def check_backend(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend {backend!r} is unknown; one of {', '.join(map(repr, BACKENDS))}, or None for the best"
        )


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"cosformer.ops._{name}")


def _backend(name: str | None, q: Tensor, k: Tensor, v: Tensor) -> ModuleType:
    """The named backend, or the best that supports the call."""
    if name is None:
        return next(m for m in map(_module, BACKENDS) if m.unsupported(q, k, v) is None)
    if reason := _module(name).unsupported(q, k, v):
        raise ValueError(f"backend {name!r} cannot run this call: {reason}")
    return _module(name)


def backend_problem(name: str) -> str | None:
    """Why a backend cannot run on this machine at all; None if it can."""
    x = torch.zeros(1, 1, 1, 1)
    return _module(name).unsupported(x, x, x)


def backend_info(name: str) -> dict[str, object]:
    """What a backend has to say of itself."""
    return _module(name).info()


def full_precision(q: Tensor) -> AbstractContextManager:
    """Autocast off: the backends choose their own dtypes, and sum in float32 whatever the caller's autocast says."""
    return torch.autocast(q.device.type, enabled=False) if autocasting(q) else nullcontext()


@lru_cache  # kept from call to call: a decode step is short
def _theta(horizons: tuple[float, ...]) -> Tensor | None:
    if no_cosine(horizons):
        return None
    return torch.tensor(
        [math.pi / 2 / h for h in horizons], dtype=torch.float64, device="cpu"
    )  # whatever the default device


# One forward and one backward, reached three ways: called plainly where nothing watches (a decode step is shorter than the
# dispatcher), as an autograd.Function in eager mode, and as opaque operators where torch traces (compile, export, meta, fake).


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
    horizons: list[float],
    causal: bool,
    q_offset: int,
    position: int,
    relu: bool,
    signed: bool,
    eps: float,
    backend: str | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the normaliser before clamping, and the state (empty where none is kept)."""
    if cu_seqlens is not None:
        cu_seqlens = check_boundaries(cu_seqlens, q.shape[2], horizons)
    if decay is not None:
        check_rate_values(decay)
    options = {
        "causal": causal,
        "q_offset": q_offset,
        "position": position,
        "relu": relu,
        "signed": signed,
        "eps": eps,
    }
    run = _backend(backend, q, k, v).forward
    with full_precision(q):
        return run(
            q,
            k,
            v,
            _theta(tuple(horizons)),
            decay,
            key_mask,
            cu_seqlens,
            state,
            keep_state=keep_state,
            **options,
        )


def _backward(
    dout: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    norm: Tensor,
    state_out: Tensor,
    decay: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
    horizons: list[float],
    causal: bool,
    q_offset: int,
    position: int,
    relu: bool,
    signed: bool,
    eps: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, the gradient of decay and of the incoming state (empty where there is none)."""
    cu = None if cu_seqlens is None else cu_seqlens.to("cpu", torch.int64)
    options = {
        "causal": causal,
        "q_offset": q_offset,
        "position": position,
        "relu": relu,
        "signed": signed,
        "eps": eps,
    }
    run = _backend(backend, q, k, v).backward
    saved = (q, k, v, out, norm, state, state_out)
    with full_precision(q):
        *grads, ddecay, dstate_in = run(
            dout, dstate, *saved, _theta(tuple(horizons)), decay, key_mask, cu, **options
        )
    return *grads, *(norm.new_empty(0) if g is None else g for g in (ddecay, dstate_in))


def _projected(x: Tensor, heads: int, length: int, size: int) -> Tensor:
    """An empty (B, heads, length, size) laid out as (B, length, heads, size), as every backend allocates its results."""
    return x.new_empty_strided(
        (x.shape[0], heads, length, size), (length * heads * size, size, heads * size, 1)
    )


forward_op = torch.library.custom_op("cosformer::linear_attention", _forward, mutates_args=())
backward_op = torch.library.custom_op("cosformer::linear_attention_backward", _backward, mutates_args=())


@forward_op.register_fake
def _(
    q,
    k,
    v,
    decay,
    key_mask,
    cu_seqlens,
    state,
    horizons,
    causal,
    q_offset,
    position,
    relu,
    signed,
    eps,
    backend,
    keep_state,
):
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    kept = keep_state or not (causal or decay is not None or cu_seqlens is not None)
    shape = state_shape(q, v, horizons) if kept else (0,)
    out = _projected(q, q.shape[1], q.shape[2], v.shape[3])
    return out, q.new_empty(q.shape[:3], dtype=sums), q.new_empty(shape, dtype=sums)


@backward_op.register_fake
def _(dout, dstate, q, k, v, out, norm, state_out, decay, key_mask, cu_seqlens, state, *_):
    grads = (_projected(x, x.shape[1], x.shape[2], x.shape[3]) for x in (q, k, v))
    ddecay = norm.new_empty(0) if decay is None else decay.new_empty(decay.shape)
    return *grads, ddecay, norm.new_empty(0) if state is None else state.new_empty(state.shape)


def _save(ctx, inputs, output):
    q, k, v, decay, key_mask, cu_seqlens, state, *options = inputs
    out, norm, state_out = output
    ctx.save_for_backward(q, k, v, out, norm, state_out, decay, key_mask, cu_seqlens, state)
    *ctx.options, ctx.keep_state = options
    ctx.mark_non_differentiable(norm)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dnorm, dstate):
    *_, decay, key_mask, cu_seqlens, state = saved = ctx.saved_tensors
    if dout is None:  # only the state was used further on
        dout = torch.zeros_like(saved[3])
    dstate = (
        dstate if ctx.keep_state else None
    )  # without a stream the state is the backward's own, or a placeholder
    dq, dk, dv, ddecay, dstate_in = _attend_backward(dout, dstate, *saved, *ctx.options)
    rest = (None,) * (len(ctx.options) + 1)
    return (
        dq,
        dk,
        dv,
        None if decay is None else ddecay,
        None,
        None,
        None if state is None else dstate_in,
        *rest,
    )


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "cosformer attention has no second derivative (double backward); reference.attention has one"
    )


# torch.func.vmap: the mapped dimension joins the batch, which attention never mixes.


def _vmap_forward(info, in_dims, *args):
    n, tensors = info.batch_size, _fold(args[:7], in_dims[:7], info.batch_size, per_row=(3,), packed=args[5])
    return tuple(_unfold(x, n) for x in attend(*tensors, *args[7:])), (0, 0, 0)


def _vmap_backward(info, in_dims, *args):
    n, tensors = (
        info.batch_size,
        _fold(args[:12], in_dims[:12], info.batch_size, per_row=(7, 8), packed=args[10]),
    )
    if tensors[8] is not None and tensors[8].ndim == 1:
        raise NotImplementedError(
            "vmap over a gradient with one decay rate per head; give one per position (batch, heads, keys)"
        )
    return tuple(_unfold(x, n) for x in _attend_backward(*tensors, *args[12:])), (0,) * 5


def _fold(tensors, dims, n: int, *, per_row: tuple[int, ...], packed) -> list[Tensor | None]:
    """Each (B, ...) with its mapped dimension -> (n * B, ...). Those in `per_row` may lack B: rates per head, an absent state."""
    if packed is not None:
        raise NotImplementedError("vmap over packed sequences (cu_seqlens): a packed call has one batch row")
    folded: list[Tensor | None] = []
    for at, (x, dim) in enumerate(zip(tensors, dims, strict=True)):
        if x is None:
            folded.append(None)
        elif at in per_row and x.ndim == (1 if dim is None else 2):
            if dim is not None and x.numel():
                raise NotImplementedError(
                    "vmap over decay with one rate per head; give one per position (batch, heads, keys)"
                )
            folded.append(x if dim is None else x.new_empty(0))
        else:
            folded.append((x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1))
    return folded


def _unfold(x: Tensor, n: int) -> Tensor:
    return x.unflatten(0, (n, x.shape[0] // n)) if x.ndim > 1 else x.expand(n, *x.shape)


def _no_forward_mode(ctx, *tangents):
    raise NotImplementedError(
        "cosformer attention has no forward-mode derivative; reference.attention has one"
    )


class _Attention(torch.autograd.Function):
    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(_no_forward_mode)
    vmap = staticmethod(_vmap_forward)


class _Gradient(torch.autograd.Function):
    forward = staticmethod(_backward)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_no_second_derivative)
    vmap = staticmethod(_vmap_backward)


forward_op.register_autograd(_differentiate, setup_context=_save)
forward_op.register_vmap(_vmap_forward)
backward_op.register_autograd(_no_second_derivative)
backward_op.register_vmap(_vmap_backward)


def attend(*args) -> tuple[Tensor, Tensor, Tensor]:
    return _route(args, forward_op, _Attention.apply, _forward)


def _attend_backward(*args) -> tuple[Tensor, ...]:
    return _route(args, backward_op, _Gradient.apply, _backward)


def _route(args, traced, differentiated, plain):
    """Call the one of the three forms that the arguments need."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_in_torch_dispatch_mode()
    if tracing or any(map(_without_data, tensors)):
        return traced(*args)
    watched = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if watched or forward_ad._current_level >= 0 or any(map(is_functorch_wrapped_tensor, tensors)):
        return differentiated(*args)
    return plain(*args)


def _without_data(x: Tensor) -> bool:
    return x.is_meta or type(x) not in (Tensor, torch.nn.Parameter)
