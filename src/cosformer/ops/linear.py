"""linear_attention: the core that all kernel mixers share - checks, choice of backend, autograd, what torch can trace.

    out_i = sum_j s_ij v_j / max(sum_j s_ij, eps)     s_ij = f(q_i) . f(k_j) * cos(pi/2 (p_i - p_j) / M) * exp(-|A_i - A_j|)

f is the identity (q and k are features already) or ReLU, fused into the backends. An infinite horizon M drops the cosine.
cosFormer is f = ReLU with a finite horizon (cosformer.py). The algorithm is derived in _torch.py.

    B, H, Hk   batch, query heads, key/value heads      L, S   query and key length      D, E   key and value size
"""

import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from numbers import Real
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

BACKENDS = ("native", "torch")  # best first
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Horizon = float | Sequence[float] | Tensor


class Tokens(NamedTuple):
    """Keys that a state has taken in since its snapshot, kept so that the last of them can be taken back."""

    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    decay: Tensor | None
    options: dict[str, Any]

    def first(self, n: int) -> "Tokens":
        rates = self.decay[:, :, :n] if self.decay is not None and self.decay.ndim == 3 else self.decay
        mask = None if self.key_mask is None else self.key_mask[:, :n]
        return self._replace(k=self.k[:, :, :n], v=self.v[:, :, :n], key_mask=mask, decay=rates)

    def map(self, change: Callable[[Tensor], Tensor], *, rows: bool) -> "Tokens":
        """Change every tensor; if the change is one of batch rows, rates per head are left alone, since they have none."""
        keep = rows and self.decay is not None and self.decay.ndim == 1
        rates = self.decay if self.decay is None or keep else change(self.decay)
        mask = None if self.key_mask is None else change(self.key_mask)
        return self._replace(k=change(self.k), v=change(self.v), key_mask=mask, decay=rates)


@dataclass(frozen=True, eq=False)
class State:
    """Everything a stream remembers: one tensor (B, H, F, E + 1), whose last column is the normaliser, and the next position.

    F is 2D, or D with an infinite horizon. A State is never changed in place, so keeping one is a valid way back to it;
    `snapshot` and `rollback` do the same for the last tokens only. It is differentiable, and a pytree to torch.
    """

    tensor: Tensor
    position: int = 0
    origin: "State | None" = None  # set by snapshot(): where rollback() starts from ...
    trail: tuple[Tokens, ...] = ()  # ... and what was taken in since

    def index_select(self, index: Tensor) -> "State":
        """The state with batch rows chosen by `index`: the reordering that beam search asks for."""
        return self._map(lambda t: t.index_select(0, index), rows=True)

    def to(self, device: torch.device | str) -> "State":
        """The state on another device."""
        return self._map(lambda t: t.to(torch.device(device)))

    def detach(self) -> "State":
        """The state cut from the graph, as truncated back-propagation through time needs it."""
        return self._map(lambda t: t.detach())

    def snapshot(self) -> "State":
        """The same state, from here on remembering the tokens it takes in, so that the last of them can be rolled back."""
        here = State(self.tensor, self.position)
        return replace(here, origin=here)

    def rollback(self, tokens: int) -> "State":
        """The state as it was `tokens` tokens ago, exactly; it can go back as far as the last snapshot."""
        start = self.origin
        if start is None:
            raise ValueError("rollback: this state has no snapshot to return to; call state.snapshot() before the tokens")
        keep = self.position - start.position - tokens
        if tokens < 0 or keep < 0:
            raise ValueError(f"rollback: tokens is {tokens}; 0 to {self.position - start.position} were seen since the snapshot")
        state = start.snapshot()
        with _full_precision(self.tensor):
            for taken in self.trail:
                k, v, key_mask, rates, options = taken.first(min(keep, taken.k.shape[2]))
                q = k[:, :1].expand(-1, self.tensor.shape[1], -1, -1)  # no output is wanted, only the state
                _, state = linear_stream(q, k, v, state, key_mask=key_mask, decay=rates, **options)
                keep -= k.shape[2]
        return state

    def state_dict(self) -> dict[str, Tensor]:
        """What `torch.save` or safetensors keeps; `State.from_state_dict` is the way back. A snapshot is not kept."""
        return {"tensor": self.tensor, "position": torch.tensor(self.position)}

    @classmethod
    def from_state_dict(cls, saved: dict) -> "State":
        return cls(saved["tensor"], int(saved["position"]))

    def _map(self, change: Callable[[Tensor], Tensor], *, rows: bool = False) -> "State":
        origin = None if self.origin is None else State(change(self.origin.tensor), self.origin.position)
        return State(change(self.tensor), self.position, origin, tuple(seen.map(change, rows=rows) for seen in self.trail))


torch.export.register_dataclass(State)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    horizon: Horizon = math.inf,
    relu: bool = False,
    signed: bool = False,
    causal: bool = False,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    q_offset: int = 0,
    decay: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """Normalised linear attention over features q (B, H, L, D), k (B, Hk, S, D) and values v (B, Hk, S, E) -> (B, H, L, E).

    The arguments are those of `cosformer_attention`, and two of the mechanism's: `relu` applies ReLU to q and k first; `signed`
    is for features that can be negative, where the normaliser keeps its sign and only its size is held above eps.
    """
    q, k, v = _autocast(q, k, v)
    check_tensors(q, k, v, key_mask)
    L, S = q.shape[2], k.shape[2]
    if not isinstance(q_offset, int | torch.SymInt) or isinstance(q_offset, bool):
        raise TypeError(f"q_offset must be an int, the position of the first query among the keys; got {type(q_offset).__name__}")
    if q_offset < 0:
        raise ValueError(f"q_offset is {q_offset}; the first query's position among the keys must be 0 or more")
    if cu_seqlens is not None:
        _check_packed(q, k, cu_seqlens, q_offset)
    horizons = _horizons(horizon, q.shape[1])
    if cu_seqlens is None and L > 0 and S > 0:
        _check_reach(horizons, q_offset + L - 1, 0 if causal else S - 1 - q_offset)
    decay = _rates(decay, q, k, self_attention=L == S and q_offset == 0)
    _check_backend(backend)
    _check_eps(eps)
    out, _, _ = _attend(
        q, k, v, decay, key_mask, cu_seqlens, None, horizons, causal, q_offset, 0, relu, signed, eps, backend, False
    )
    return out


def linear_stream(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None = None,
    *,
    horizon: Horizon = math.inf,
    relu: bool = False,
    signed: bool = False,
    key_mask: Tensor | None = None,
    decay: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Causal `linear_attention` over the next tokens of a stream; returns their output and the state after them."""
    q, k, v = _autocast(q, k, v)
    check_tensors(q, k, v, key_mask)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has length {q.shape[2]} and k has {k.shape[2]}; a stream takes as many queries as keys")
    horizons = _horizons(horizon, q.shape[1])
    if state is None:
        position, tensor = 0, None
    elif not isinstance(state, State):
        raise TypeError(f"state must be a State, as the stream returned it, or None; got {_shown(state)}")
    else:
        position, tensor = state.position, state.tensor
        _check_state(tensor, q, v, horizons)
    if q.shape[2] > 0:
        _check_reach(horizons, position + q.shape[2] - 1)
    rates = _rates(decay, q, k, self_attention=True)
    _check_backend(backend)
    _check_eps(eps)
    out, _, new = _attend(q, k, v, rates, key_mask, None, tensor, horizons, True, 0, position, relu, signed, eps, backend, True)
    after = State(new, position + q.shape[2])
    if state is not None and state.origin is not None:
        options = {"horizon": horizons, "relu": relu, "backend": backend}
        mask, rates = (None if x is None else x.clone() for x in (key_mask, decay))  # clones: the caller may reuse its buffers
        taken = Tokens(k.clone(), v.clone(), mask, rates, options)
        after = replace(after, origin=state.origin, trail=(*state.trail, taken))
    return out, after


def linear_state(
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    horizon: Horizon = math.inf,
    relu: bool = False,
    key_mask: Tensor | None = None,
    backend=None,
) -> State:
    """The state of all keys, for `linear_read`: cross attention's memory, built once and read at constant cost."""
    q = k[:, :1, :0].expand(-1, heads, -1, -1)  # no query asks yet
    q, k, v = _autocast(q, k, v)
    check_tensors(q, k, v, key_mask)
    _check_backend(backend)
    horizons = _horizons(horizon, heads)
    _, _, tensor = _attend(q, k, v, None, key_mask, None, None, horizons, False, 0, 0, relu, False, 1e-6, backend, True)
    return State(tensor, k.shape[2])


def linear_read(
    q: Tensor,
    state: State,
    *,
    horizon: Horizon = math.inf,
    relu=False,
    signed=False,
    q_offset: int = 0,
    eps: float = 1e-6,
    backend=None,
) -> Tensor:
    """What queries at positions q_offset, q_offset + 1, ... read from a state: bidirectional attention over the keys in it."""
    B, H, _, columns = state.tensor.shape
    k, v = q.new_empty(B, H, 0, q.shape[-1]), q.new_empty(B, H, 0, columns - 1)
    q, k, v = _autocast(q, k, v)
    check_tensors(q, k, v, None)
    _check_backend(backend)
    _check_eps(eps)
    horizons = _horizons(horizon, H)
    _check_state(state.tensor, q, v, horizons)
    if q.shape[2] and state.position:
        _check_reach(horizons, q_offset + q.shape[2] - 1, state.position - 1 - q_offset)
    options = (horizons, False, 0, q_offset, relu, signed, eps, backend, False)
    out, _, _ = _attend(q, k, v, None, None, None, state.tensor, *options)
    return out


# Checks. Each names the argument, what was given and what is accepted.


def _autocasting(x: object) -> bool:
    return isinstance(x, Tensor) and torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast q, k and v enter in the autocast dtype, as in scaled_dot_product_attention; sums stay in float32."""
    if not _autocasting(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES[1:] else x for x in (q, k, v))
    return q, k, v


def check_tensors(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, heads, length, size); got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, bfloat16 or float16; got {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share one dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device} and {v.device}")
    (B, H, _, D), (Bk, Hk, S, Dk) = q.shape, k.shape
    problem = None
    if v.shape[:3] != (Bk, Hk, S):
        problem = "k and v must agree in batch, heads and length"
    elif B != Bk:
        problem = "q and k must have the same batch size"
    elif D != Dk or D == 0:
        problem = "q and k must have the same size of at least 1 in their last dimension"
    elif Hk == 0 or H % Hk or H == 0:
        problem = "q's heads must be a multiple of k's"
    if problem:
        raise ValueError(f"{problem}; got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if key_mask is not None:
        if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
            given = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
            raise TypeError(f"key_mask must be a bool tensor, True = keep; got {given}")
        if key_mask.shape != (k.shape[0], k.shape[2]):
            raise ValueError(f"key_mask must have shape (batch, keys) = {(k.shape[0], k.shape[2])}; got {tuple(key_mask.shape)}")
        if key_mask.device != k.device:
            raise ValueError(f"key_mask must be on k's device {k.device}; got {key_mask.device}")


def _check_packed(q: Tensor, k: Tensor, cu_seqlens: Tensor, q_offset: int) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1:
        raise TypeError(f"cu_seqlens must be a 1-D int32 or int64 tensor of sequence boundaries; got {_shown(cu_seqlens)}")
    if q.shape[0] != 1 or q.shape[2] != k.shape[2] or q_offset != 0:
        raise ValueError(
            "cu_seqlens packs sequences into one batch row, with as many queries as keys and q_offset 0; "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, q_offset {q_offset}"
        )


def _check_boundaries(cu_seqlens: Tensor, length: int, horizons: list[float]) -> Tensor:
    """The boundaries on the CPU, after the checks that need their values."""
    cu = cu_seqlens.to("cpu", torch.int64)
    if len(cu) < 2 or cu[0] != 0 or cu[-1] != length or bool((cu.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must rise from 0 to the packed length {length}; got {cu.tolist()}")
    _check_reach(horizons, int(cu.diff().max()) - 1)
    return cu


def _horizons(horizon: Horizon, heads: int) -> list[float]:
    """The horizon as a list of one number, or of one per head."""
    if isinstance(horizon, Tensor):
        if horizon.ndim > 1:
            raise ValueError(f"horizon must be one number or one per head ({heads}); got shape {tuple(horizon.shape)}")
        horizon = horizon.tolist()
    if isinstance(horizon, Sequence) and not isinstance(horizon, str):
        if len(horizon) not in (1, heads):
            raise ValueError(f"horizon must be one number or one per head ({heads}); got {len(horizon)} numbers")
        values = [float(h) for h in horizon]
    elif isinstance(horizon, Real | torch.SymInt | torch.SymFloat) and not isinstance(horizon, bool):
        values = [float(horizon)]
    else:
        raise TypeError(f"horizon must be a number, or one per head; got {_shown(horizon)}")
    for value in values:
        if not value > 0:
            raise ValueError(f"horizon must be greater than 0; got {value}")
    return values


def _check_reach(horizons: list[float], back: int, ahead: int = 0) -> None:
    """Beyond the horizon the cosine is negative and the normaliser meaningless, so such a call has no answer.

    A key exactly at the horizon weighs nothing. Behind the query that is harmless; ahead of it, where positions themselves can
    pass the horizon, float32 cannot tell that nothing from less than nothing.
    """
    for value in horizons:
        if back > value or ahead >= value:
            distance = max(back, ahead)
            raise ValueError(
                f"horizon is {value:g}, but positions can lie {distance} apart here; pass a horizon of more than {distance} "
                "(or math.inf, which drops the cosine)"
            )


def _check_eps(eps: float) -> None:
    if not eps > 0:
        raise ValueError(f"eps must be greater than 0, the smallest normaliser; got {eps}")


def _rates(decay: Tensor | None, q: Tensor, k: Tensor, *, self_attention: bool) -> Tensor | None:
    if decay is None:
        return None
    (B, H, _, _), S = q.shape, k.shape[2]
    if not isinstance(decay, Tensor) or not decay.is_floating_point():
        raise TypeError(f"decay must be a floating-point tensor of rates; got {_shown(decay)}")
    if decay.shape != (H,) and decay.shape != (B, H, S):
        raise ValueError(f"decay must have shape (heads,) = {(H,)} or (batch, heads, keys) = {(B, H, S)}; got {tuple(decay.shape)}")
    if decay.ndim == 3 and not self_attention:
        raise ValueError("decay with one rate per position needs self-attention (as many queries as keys, q_offset 0)")
    if decay.device != q.device:
        raise ValueError(f"decay must be on q's device {q.device}; got {decay.device}")
    return decay.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _check_rate_values(decay: Tensor) -> None:
    if not bool(((decay >= 0) & (decay < math.inf)).all()):
        least, most = decay.min().item(), decay.max().item()
        raise ValueError(f"decay rates must be finite and 0 or more; those given reach from {least:g} to {most:g}")


def _check_state(tensor: Tensor, q: Tensor, v: Tensor, horizons: list[float]) -> None:
    expected = _state_shape(q, v, horizons)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"state must have shape (batch, heads, features, value size + 1) = {expected}; got {tuple(tensor.shape)}")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if tensor.dtype != dtype or tensor.device != q.device:
        raise TypeError(f"state must be {dtype} on {q.device}; got {tensor.dtype} on {tensor.device}")


def _state_shape(q: Tensor, v: Tensor, horizons: list[float]) -> tuple[int, int, int, int]:
    return q.shape[0], q.shape[1], q.shape[3] * (1 if _no_cosine(horizons) else 2), v.shape[3] + 1


def _no_cosine(horizons: Sequence[float]) -> bool:
    return all(h == math.inf for h in horizons)


def _shown(x: object) -> str:
    return f"a {x.dtype} tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{type(x).__name__} {x!r}"


# Backends: modules with the same two functions. A named backend runs or raises with the reason; none falls back silently.


def _check_backend(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; one of {', '.join(map(repr, BACKENDS))}, or None for the best")


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


def _full_precision(q: Tensor) -> AbstractContextManager:
    """Autocast off: the backends choose their own dtypes, and sum in float32 whatever the caller's autocast says."""
    return torch.autocast(q.device.type, enabled=False) if _autocasting(q) else nullcontext()


@lru_cache  # kept from call to call: a decode step is short
def _theta(horizons: tuple[float, ...]) -> Tensor | None:
    if _no_cosine(horizons):
        return None
    return torch.tensor([math.pi / 2 / h for h in horizons], dtype=torch.float64, device="cpu")  # whatever the default device


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
        cu_seqlens = _check_boundaries(cu_seqlens, q.shape[2], horizons)
    if decay is not None:
        _check_rate_values(decay)
    options = {"causal": causal, "q_offset": q_offset, "position": position, "relu": relu, "signed": signed, "eps": eps}
    run = _backend(backend, q, k, v).forward
    with _full_precision(q):
        return run(q, k, v, _theta(tuple(horizons)), decay, key_mask, cu_seqlens, state, keep_state=keep_state, **options)


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
    options = {"causal": causal, "q_offset": q_offset, "position": position, "relu": relu, "signed": signed, "eps": eps}
    run = _backend(backend, q, k, v).backward
    saved = (q, k, v, out, norm, state, state_out)
    with _full_precision(q):
        *grads, ddecay, dstate_in = run(dout, dstate, *saved, _theta(tuple(horizons)), decay, key_mask, cu, **options)
    return *grads, *(norm.new_empty(0) if g is None else g for g in (ddecay, dstate_in))


def _projected(x: Tensor, heads: int, length: int, size: int) -> Tensor:
    """An empty (B, heads, length, size) laid out as (B, length, heads, size), as every backend allocates its results."""
    return x.new_empty_strided((x.shape[0], heads, length, size), (length * heads * size, size, heads * size, 1))


forward_op = torch.library.custom_op("cosformer::linear_attention", _forward, mutates_args=())
backward_op = torch.library.custom_op("cosformer::linear_attention_backward", _backward, mutates_args=())


@forward_op.register_fake
def _(q, k, v, decay, key_mask, cu_seqlens, state, horizons, causal, q_offset, position, relu, signed, eps, backend, keep_state):
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    kept = keep_state or not (causal or decay is not None or cu_seqlens is not None)
    shape = _state_shape(q, v, horizons) if kept else (0,)
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
    dstate = dstate if ctx.keep_state else None  # without a stream the state is the backward's own, or a placeholder
    dq, dk, dv, ddecay, dstate_in = _attend_backward(dout, dstate, *saved, *ctx.options)
    rest = (None,) * (len(ctx.options) + 1)
    return dq, dk, dv, None if decay is None else ddecay, None, None, None if state is None else dstate_in, *rest


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("cosformer attention has no second derivative (double backward); reference.attention has one")


# torch.func.vmap: the mapped dimension joins the batch, which attention never mixes.


def _vmap_forward(info, in_dims, *args):
    n, tensors = info.batch_size, _fold(args[:7], in_dims[:7], info.batch_size, per_row=(3,), packed=args[5])
    return tuple(_unfold(x, n) for x in _attend(*tensors, *args[7:])), (0, 0, 0)


def _vmap_backward(info, in_dims, *args):
    n, tensors = info.batch_size, _fold(args[:12], in_dims[:12], info.batch_size, per_row=(7, 8), packed=args[10])
    if tensors[8] is not None and tensors[8].ndim == 1:
        raise NotImplementedError("vmap over a gradient with one decay rate per head; give one per position (batch, heads, keys)")
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
                raise NotImplementedError("vmap over decay with one rate per head; give one per position (batch, heads, keys)")
            folded.append(x if dim is None else x.new_empty(0))
        else:
            folded.append((x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1))
    return folded


def _unfold(x: Tensor, n: int) -> Tensor:
    return x.unflatten(0, (n, x.shape[0] // n)) if x.ndim > 1 else x.expand(n, *x.shape)


def _no_forward_mode(ctx, *tangents):
    raise NotImplementedError("cosformer attention has no forward-mode derivative; reference.attention has one")


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


def _attend(*args) -> tuple[Tensor, Tensor, Tensor]:
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
