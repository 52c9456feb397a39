"""The operator torch sees: choice of backend, one forward and one backward, autograd, vmap, and what tracing needs."""

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import islice

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .call import DTYPES, Backend, Call, Grads, Inputs, Outputs, Upstream, projected
from .checks import check_values

BACKENDS = ("native", "torch")  # best first

# Backends. A named one runs or raises with the reason; none falls back silently.


def check_backend(name: str | None) -> None:
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f"backend {name!r} is unknown; one of {', '.join(map(repr, BACKENDS))}, or None for the best"
        )


@cache
def backend(name: str) -> Backend:
    """What the module of that name declares."""
    return importlib.import_module(f"cosformer.ops._{name}").BACKEND


def backend_problem(name: str, device: str = "cpu") -> str | None:
    """Why a backend cannot run on this device of this machine at all; None if it can."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # torch's ways to say that there is no such device
        return str(error).partition("\n")[0]
    return backend(name).refusal_on(torch.device(device).type)


def choose(name: str | None, q: Tensor, v: Tensor) -> Backend:
    """The named backend, or the best that can run a call on such tensors."""
    if name is None:
        return next(b for b in map(backend, BACKENDS) if b.refusal(q, v) is None)
    if reason := backend(name).refusal(q, v):
        raise ValueError(f"backend {name!r} cannot run this call: {reason}")
    return backend(name)


# Autocast: q, k and v enter in its dtype, as in scaled_dot_product_attention; the backends choose their own dtypes, and sum in
# float32 whatever it says.


def autocasting(x: object) -> bool:
    if not isinstance(x, Tensor):
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


# One forward and one backward, reached three ways: called plainly where nothing watches (a decode step is shorter than the
# dispatcher), as an autograd.Function in eager mode, and as opaque operators where torch traces (compile, export, meta, fake).
# The last two take plain arguments, so a call is flattened on the way in and put together again.


def _forward(x: Inputs, call: Call) -> Outputs:
    check_values(x, call)
    run = choose(call.backend, x.q, x.v).forward
    with _full_precision(x.q):
        return run(x, call)


def _backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> Grads:
    run = choose(call.backend, x.q, x.v).backward
    with _full_precision(x.q):
        grads = run(upstream, x, y, call)
    return Grads._make(y.norm.new_empty(0) if g is None else g for g in grads)  # an operator returns tensors


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


def _schema(kinds) -> str:
    """The plain arguments of these tuples, as torch.library writes them."""
    return ", ".join(f"{_SCHEMA[t]} {name}" for kind in kinds for name, t in kind.__annotations__.items())


def _gathered(args, kinds) -> list:
    """The tuples that were flattened into these arguments."""
    rest = iter(args)
    tuples = [kind._make(islice(rest, len(kind._fields))) for kind in kinds]
    if kinds[-1] is Call:  # torch made a list of them
        tuples[-1] = tuples[-1]._replace(horizons=tuple(tuples[-1].horizons))
    return tuples


def _flat_forward(*args) -> tuple[Tensor, ...]:
    return tuple(_forward(*_gathered(args, FORWARD)))


def _flat_backward(*args) -> tuple[Tensor, ...]:
    return tuple(_backward(*_gathered(args, BACKWARD)))


forward_op = torch.library.custom_op(
    "cosformer::linear_attention",
    _flat_forward,
    mutates_args=(),
    schema=f"({_schema(FORWARD)}) -> (Tensor, Tensor, Tensor)",
)
backward_op = torch.library.custom_op(
    "cosformer::linear_attention_backward",
    _flat_backward,
    mutates_args=(),
    schema=f"({_schema(BACKWARD)}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@forward_op.register_fake
def _(*args):
    return tuple(Outputs.empty(*_gathered(args, FORWARD)))


@backward_op.register_fake
def _(*args):
    _, x, y, _ = _gathered(args, BACKWARD)
    grads = (projected(t, t.shape[1], t.shape[2], t.shape[3]) for t in (x.q, x.k, x.v))
    return *grads, *(y.norm.new_empty(0 if t is None else t.shape) for t in (x.decay, x.state))


def _save(ctx, inputs, output):
    x, ctx.call = _gathered(inputs, FORWARD)
    ctx.save_for_backward(*x, *output)
    ctx.mark_non_differentiable(output[1])  # the normaliser
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dnorm, dafter):
    x, y = _gathered(ctx.saved_tensors, (Inputs, Outputs))
    if dout is None:  # only the state was used further on
        dout = torch.zeros_like(y.out)
    # a state that was not wanted is the backward's own, or a placeholder
    upstream = Upstream(dout, dafter if ctx.call.keep_state else None)
    grads = attend_backward(upstream, x, y, ctx.call)
    decay, state = None if x.decay is None else grads.decay, None if x.state is None else grads.state
    return *Inputs(grads.q, grads.k, grads.v, decay=decay, state=state), *(None for _ in Call._fields)


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
    *tensors, call = _gathered(args, kinds)
    x, dims, n = tensors[kinds.index(Inputs)], iter(in_dims), info.batch_size
    if x.cu_seqlens is not None:
        raise NotImplementedError("vmap over packed sequences (cu_seqlens): a packed call has one batch row")
    if run is attend_backward and x.decay is not None and x.decay.ndim == 1:
        raise NotImplementedError(
            "vmap over a gradient with one decay rate per head; give one per position (batch, heads, keys)"
        )
    folded = (group._make(_fold(t, next(dims), n) for t in group) for group in tensors)
    results = run(*folded, call)
    return tuple(_unfold(t, n) for t in results), (0,) * len(results)


def _fold(x: Tensor | None, dim: int | None, n: int) -> Tensor | None:
    """(B, ...) with its mapped dimension -> (n * B, ...). Rates per head and an absent state have no B."""
    if x is None:
        return None
    if x.ndim - (dim is not None) == 1:
        if dim is not None and x.numel():
            raise NotImplementedError(
                "vmap over decay with one rate per head; give one per position (batch, heads, keys)"
            )
        return x if dim is None else x.new_empty(0)
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
    run = _watched(x, forward_op, _Attention.apply)
    return _forward(x, call) if run is None else Outputs._make(run(*x, *call))


def attend_backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> Grads:
    run = _watched((*upstream, *x, *y), backward_op, _Gradient.apply)
    if run is None:
        return _backward(upstream, x, y, call)
    return Grads._make(run(*upstream, *x, *y, *call))


def _watched(tensors, traced: Callable, differentiated: Callable) -> Callable | None:
    """The form of the operator that whoever watches these tensors needs; None where nobody does."""
    given = [x for x in tensors if x is not None]
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_in_torch_dispatch_mode()
    if tracing or any(map(_without_data, given)):
        return traced
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if graph or forward_ad._current_level >= 0 or any(map(is_functorch_wrapped_tensor, given)):
        return differentiated
    return None


def _without_data(x: Tensor) -> bool:
    return x.is_meta or type(x) not in (Tensor, torch.nn.Parameter)
