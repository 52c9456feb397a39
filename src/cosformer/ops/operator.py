"""The operator torch sees: choice of backend, one forward and one backward, autograd, vmap, tracing."""

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from . import modes
from .call import DTYPES, Backend, Call, Grads, Inputs, Outputs, Upstream
from .checks import Horizon, check_boundaries, check_eps, check_rates, horizon_list

BACKENDS = ("native", "triton", "torch")  # best first

# Backends. A named one runs or raises with the reason; none falls back silently.


def check_backend(name: str | None) -> None:
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f"backend {name!r} is unknown; one of {', '.join(map(repr, BACKENDS))}, or None for the best"
        )


def call_of(horizon: Horizon, q: Tensor, *, eps: float = 1e-6, backend: str | None, **options: Any) -> Call:
    """The options of a call with these queries, checked."""
    check_backend(backend)
    check_eps(eps)
    return Call(tuple(horizon_list(horizon, q.shape[1])), eps=eps, backend=backend, **options)


@cache
def declared(name: str) -> Backend:
    """What the backend's module declares."""
    return importlib.import_module(f"cosformer.ops._{name}").BACKEND


def backend_problem(name: str, device: str = "cpu") -> str | None:
    """Why a backend cannot run on this device of this machine at all; None if it can."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # torch's ways to say that there is no such device
        return str(error).partition("\n")[0]
    return declared(name).refusal_on(torch.device(device).type)


def choose(name: str | None, q: Tensor, v: Tensor) -> Backend:
    """The named backend, or the best that can run a call on such tensors."""
    for candidate in map(declared, BACKENDS if name is None else (name,)):
        reason = candidate.refusal(q, v)
        if reason is None:
            return candidate
    raise ValueError(f"backend {name or BACKENDS[-1]!r} cannot run this call: {reason}")


# Autocast: q, k and v are cast to its dtype, as in scaled_dot_product_attention. Inside it is off: the
# backends choose their own dtypes, and sum in float32.


def autocasting(x: object) -> bool:
    if not torch._C._is_any_autocast_enabled() or not isinstance(x, Tensor):
        return False
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocast(*tensors: Tensor) -> Iterable[Tensor]:
    if not autocasting(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return (x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES[1:] else x for x in tensors)


def _full_precision(q: Tensor) -> AbstractContextManager:
    return torch.autocast(q.device.type, enabled=False) if autocasting(q) else nullcontext()


# One forward and one backward, reached in three ways: as a plain call if torch neither records nor traces (a
# decode step takes less time than the dispatcher), as an autograd.Function in eager mode, and as opaque
# operators where torch traces (compile, export, meta, fake). The last two accept only flat arguments and
# tensors, so a call is flattened and an absent result is an empty tensor; `_gathered` undoes both.


def _forward(x: Inputs, call: Call) -> Outputs:
    check_boundaries(x, call)
    backend = choose(call.backend, x.q, x.v)
    if not backend.checks_rates:
        check_rates(x.decay)
    with _full_precision(x.q):
        return backend.forward(x, call)


def _backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> Grads:
    run = choose(call.backend, x.q, x.v).backward
    with _full_precision(x.q):
        return run(upstream, x, y, call)


FORWARD, BACKWARD = (Inputs, Call), (Upstream, Inputs, Outputs, Call)

_SCHEMA = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    tuple[float, ...]: "float[]",
    bool: "bool",
    int: "SymInt",
    float: "float",
    str | None: "str?",
}


def _operator(name: str, run: Callable, kinds, results: type[Outputs] | type[Grads]):
    """An opaque operator whose arguments are the fields of these tuples."""
    fields = (field for kind in kinds for field in kind.__annotations__.items())
    arguments = ", ".join(f"{_SCHEMA[type_]} {field}" for field, type_ in fields)
    returned = ", ".join("Tensor" for _ in results._fields)
    schema = f"({arguments}) -> ({returned})"
    return torch.library.custom_op(f"cosformer::{name}", run, mutates_args=(), schema=schema)


def _gathered(args, *kinds) -> list:
    """The tuples that were flattened into these arguments."""
    rest, tuples = iter(args), []
    for kind in kinds:
        it = kind._make(islice(rest, len(kind._fields)))
        if kind is Call:
            it = it._replace(horizons=tuple(it.horizons))  # torch makes a list of them
        elif kind is Outputs and it.after is not None and it.after.ndim < 4:
            it = it._replace(after=None)
        tuples.append(it)
    return tuples


def _tensors(results: Outputs | Grads, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if t is None else t for t in results)


def _flat_forward(*args) -> tuple[Tensor, ...]:
    y = _forward(*_gathered(args, *FORWARD))
    return _tensors(y, y.norm)


def _flat_backward(*args) -> tuple[Tensor, ...]:
    upstream, x, y, call = _gathered(args, *BACKWARD)
    return _tensors(_backward(upstream, x, y, call), y.norm)


forward_op = _operator("linear_attention", _flat_forward, FORWARD, Outputs)
backward_op = _operator("linear_attention_backward", _flat_backward, BACKWARD, Grads)


@forward_op.register_fake
def _(*args):
    y = Outputs.empty(*_gathered(args, *FORWARD))
    return _tensors(y, y.norm)


@backward_op.register_fake
def _(*args):
    _, x, y, _ = _gathered(args, *BACKWARD)
    return _tensors(Grads.empty(x), y.norm)


def _save(ctx, inputs, output):
    x, ctx.call = _gathered(inputs, *FORWARD)
    ctx.save_for_backward(*x, *output)
    ctx.mark_non_differentiable(output[1])  # the normaliser
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dnorm, dafter):
    x, y = _gathered(ctx.saved_tensors, Inputs, Outputs)
    grads = gradients(dout, dafter, x, y, ctx.call)
    inputs = Inputs(grads.q, grads.k, grads.v, decay=grads.decay, state=grads.state)
    return *inputs, *(None for _ in Call._fields)


def gradients(dout: Tensor | None, dafter: Tensor | None, x: Inputs, y: Outputs, call: Call) -> Grads:
    """The gradients of a call's inputs (None if absent), from those of its results (None if unused)."""
    if dout is None:  # only the state was used
        dout = torch.zeros_like(y.out)
    # a state that was not wanted is only for the backward, or empty
    upstream = Upstream(dout, dafter if call.keep_state else None)
    grads = attend_backward(upstream, x, y, call)
    decay, state = None if x.decay is None else grads.decay, None if x.state is None else grads.state
    return grads._replace(decay=decay, state=state)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "cosformer attention has no second derivative (double backward); reference.attention has one"
    )


def _no_forward_mode(ctx, *tangents):
    raise NotImplementedError(
        "cosformer attention has no forward-mode derivative; reference.attention has one"
    )


# torch.func.vmap: the mapped dimension joins the batch, which attention never mixes.


def _vmap(run, kinds, info, in_dims, *args):
    *tensors, call = _gathered(args, *kinds)
    x, n = tensors[kinds.index(Inputs)], info.batch_size
    if x.cu_seqlens is not None:
        raise NotImplementedError("vmap over packed sequences (cu_seqlens): a packed call has one batch row")
    if run is attend_backward and x.decay is not None and x.decay.ndim == 1:
        raise NotImplementedError(
            "vmap over a gradient with one decay rate per head; give one per position (batch, heads, keys)"
        )
    dims = iter(in_dims)
    folded = (group._make(_fold(t, next(dims), n) for t in group) for group in tensors)
    results = _tensors(run(*folded, call), x.q)
    return tuple(_unfold(t, n) for t in results), (0,) * len(results)


def _fold(x: Tensor | None, dim: int | None, n: int) -> Tensor | None:
    """(B, ...) with its mapped dimension -> (n * B, ...). Rates per head have no B."""
    if x is None or (x.ndim == 1 and dim is None):
        return x
    if x.ndim == 2 and dim is not None:
        raise NotImplementedError(
            "vmap over decay with one rate per head; give one per position (batch, heads, keys)"
        )
    return (x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _unfold(x: Tensor, n: int) -> Tensor:
    return x.unflatten(0, (n, x.shape[0] // n)) if x.ndim > 1 else x.expand(n, *x.shape)


def _vmap_forward(*args):
    return _vmap(attend, FORWARD, *args)


def _vmap_backward(*args):
    return _vmap(attend_backward, BACKWARD, *args)


class _Attention(torch.autograd.Function):
    forward = staticmethod(_flat_forward)
    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(_no_forward_mode)
    vmap = staticmethod(_vmap_forward)


class _Gradient(torch.autograd.Function):
    forward = staticmethod(_flat_backward)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_no_second_derivative)
    vmap = staticmethod(_vmap_backward)


forward_op.register_autograd(_differentiate, setup_context=_save)
forward_op.register_vmap(_vmap_forward)
backward_op.register_autograd(_no_second_derivative)
backward_op.register_vmap(_vmap_backward)


def attend(x: Inputs, call: Call) -> Outputs:
    run = _dispatch_form(x, forward_op, _Attention.apply)
    return _forward(x, call) if run is None else _gathered(run(*x, *call), Outputs)[0]


def attend_backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> Grads:
    run = _dispatch_form((*upstream, *x, *y), backward_op, _Gradient.apply)
    if run is None:
        return _backward(upstream, x, y, call)
    return Grads._make(run(*upstream, *x, *y, *call))


def _dispatch_form(tensors, traced: Callable, differentiated: Callable) -> Callable | None:
    """The form of the operator that tracing or autograd needs for these tensors; None for a plain call."""
    given = [x for x in tensors if x is not None]
    if modes.tracing() or not all(map(modes.is_plain, given)):
        return traced
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return differentiated if graph or modes.transforming(*given) else None
