"""The contract of operator and backends: what a call holds, what follows from it, what a backend declares.

B, H, Hk   batch, query heads, key/value heads      L, S   query and key length      D, E   key and value size
F          features of the state: 2D with a cosine, D without
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Inputs(NamedTuple):
    """The tensors of one call."""

    q: Tensor  # (B, H, L, D)
    k: Tensor  # (B, Hk, S, D)
    v: Tensor  # (B, Hk, S, E)
    decay: Tensor | None = None  # rates (H,) or (B, H, S), in the dtype of sums
    key_mask: Tensor | None = None  # (B, S) bool, True = keep
    cu_seqlens: Tensor | None = None  # boundaries of packed sequences: int64, on the CPU
    state: Tensor | None = None  # (B, H, F, E + 1), in the dtype of sums: the state before the first key


class Call(NamedTuple):
    """The options of one call, and what follows from them."""

    horizons: tuple[float, ...]  # one, or one per head; infinite: no cosine
    causal: bool = False
    q_offset: int = 0  # query i stands at q_offset + i, key j at j
    position: int = 0  # of the first key, for the angles: how far a stream has come
    relu: bool = False
    signed: bool = False
    eps: float = 1e-6
    keep_state: bool = False  # the state after the last key is wanted
    backend: str | None = None

    @property
    def cosine(self) -> bool:
        return min(self.horizons) < math.inf

    def two_sided(self, x: Inputs) -> bool:
        """Bidirectional with decay: it needs a sweep from each side, since no one state holds all keys."""
        return x.decay is not None and not self.causal

    def returns_state(self, x: Inputs) -> bool:
        """If it is wanted, or if one state serves all queries: then the backward reads it again."""
        return self.keep_state or not (self.causal or x.decay is not None or x.cu_seqlens is not None)

    def clamp(self, z: Tensor) -> Tensor:
        """A normaliser held away from zero; if signed, it keeps its sign."""
        if not self.signed:
            return z.clamp_min(self.eps)
        return torch.where(z < 0, -1.0, 1.0).to(z) * z.abs().clamp_min(self.eps)

    def state_shape(self, q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
        B, H, _, D = q.shape
        return B, H, 2 * D if self.cosine else D, v.shape[3] + 1

    def rest(self, x: Inputs) -> "Rest":
        """How a Run of such calls lays out what it leaves for the backward."""
        return Rest(x.q.shape[:3], self.state_shape(x.q, x.v))


class Outputs(NamedTuple):
    """What a call returns."""

    out: Tensor  # (B, H, L, E) in q's dtype, laid out as `projected`
    norm: Tensor  # (B, H, L), in the dtype of sums: the normaliser before its clamp
    after: Tensor | None  # (B, H, F, E + 1), in the dtype of sums: the state after the last key

    @classmethod
    def empty(cls, x: Inputs, call: Call) -> "Outputs":
        """Unfilled, with the shapes, dtypes and strides that every backend must return."""
        B, H, L, _ = x.q.shape
        sums = sum_dtype(x.q.dtype)
        out = projected(x.q, H, L, x.v.shape[3])
        norm = x.q.new_empty_strided((B, H, L), (H * L, L, 1), dtype=sums)
        if not call.returns_state(x):
            return cls(out, norm, None)
        return cls(out, norm, x.q.new_empty(call.state_shape(x.q, x.v), dtype=sums))


class Upstream(NamedTuple):
    """The gradients that a backward starts from."""

    dout: Tensor
    dafter: Tensor | None  # None unless the state was wanted


class Grads(NamedTuple):
    """The gradients of a call's inputs; None where the input is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    state: Tensor | None

    @classmethod
    def empty(cls, x: Inputs) -> "Grads":
        """Unfilled, with the shapes, dtypes and strides that every backend must return."""
        q, k, v = (projected(t, t.shape[1], t.shape[2], t.shape[3]) for t in (x.q, x.k, x.v))
        decay, state = (None if t is None else t.new_empty(t.shape) for t in (x.decay, x.state))
        return cls(q, k, v, decay, state)


class Rest:
    """Layout of the flat tensor, in float32, that a Run leaves for the backward: the normaliser, then the
    state if it is not wanted (hidden).
    """

    __slots__ = ("hidden_offset", "norm", "norm_size", "state")

    def __init__(self, norm: torch.Size, state: tuple[int, ...]):
        self.norm, self.state = norm, state  # their shapes
        self.norm_size = norm.numel()
        self.hidden_offset = 4 * self.norm_size  # in bytes

    def parts(self, rest: Tensor) -> tuple[Tensor, Tensor | None]:
        """The normaliser and the hidden state, if there is one."""
        hidden = rest[self.norm_size :].view(self.state) if len(rest) > self.norm_size else None
        return rest[: self.norm_size].view(self.norm), hidden

    def hidden_at(self, rest: Tensor) -> int:
        """The address of the hidden state; 0 if there is none."""
        return rest.data_ptr() + self.hidden_offset if len(rest) > self.norm_size else 0


# A forward or backward prepared for all calls with tensors like these (plan.py).
# Run: q, k, v, decay, key_mask, state, position -> out; `after`, if wanted; and with a graph `Rest`'s tensor.
# RunBackward: dout, dafter, Run's tensors, out, the addresses of normaliser and state, position -> Grads.
Run = Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]
RunBackward = Callable[..., Grads]


@dataclass(frozen=True)
class Backend:
    """An implementation of the operator: two functions, and what they can run; None means anything.

    A module `ops/_name.py` declares one as BACKEND. Backends never import one another.
    """

    forward: Callable[[Inputs, Call], Outputs]
    backward: Callable[[Upstream, Inputs, Outputs, Call], Grads]
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES
    sizes: range | None = None  # of keys and of values
    plan: Callable[[Inputs, Call, bool], "Run | None"] = lambda x, call, graph: None  # a prepared forward
    plan_backward: Callable[[Upstream, Inputs, Outputs, Call], "RunBackward | None"] = lambda *_: None
    checks_rates: bool = False  # it refuses bad rates itself, as it reads them
    problem: Callable[[], str | None] = lambda: None  # why it cannot run on this machine, if so
    info: Callable[[], dict[str, object]] = dict  # for `cosformer info`

    def refusal(self, q: Tensor, v: Tensor) -> str | None:
        """Why it cannot run a call on such tensors; None if it can."""
        if q.dtype not in self.dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"it takes {names}; got {q.dtype}"
        D, E = q.shape[3], v.shape[3]
        if self.sizes is not None and not (D in self.sizes and E in self.sizes):
            accepted = f"{self.sizes[0]} to {self.sizes[-1]}"
            return f"it takes keys and values of size {accepted}; got {D} and {E}"
        return self.refusal_on(q.device.type)

    def refusal_on(self, device: str) -> str | None:
        """Why it cannot run on this kind of device at all; None if it can."""
        if self.devices is not None and device not in self.devices:
            return f"it runs on {', '.join(self.devices)}; got {device}"
        return self.problem()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, normalisers and states."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact_dtype(device: torch.device) -> torch.dtype:
    """The dtype of angles and of running sums of rates: float64 if the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def projected(like: Tensor, heads: int, length: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty (B, heads, length, size) in the memory layout of projections, (B, length, heads, size)."""
    shape = (like.shape[0], heads, length, size)
    strides = (length * heads * size, size, heads * size, 1)
    return like.new_empty_strided(shape, strides, dtype=dtype or like.dtype)


def dense(t: Tensor) -> Tensor:
    """The tensor with its values in memory: torch may keep a sign, or zeros, as a flag only."""
    return t.resolve_neg().clone() if t.is_neg() or t._is_zerotensor() else t


def gradients_of(run: Callable, given: Sequence[Tensor], dy: Tensor) -> list[Tensor | None]:
    """The gradients, None where none is needed, of a plain function; differentiable if torch records."""
    record = torch.is_grad_enabled()
    needed = [t for t in given if t.requires_grad]
    with torch.enable_grad():
        grads = iter(torch.autograd.grad(run(*given), needed, dy, create_graph=record))
    return [next(grads) if t.requires_grad else None for t in given]


@lru_cache  # a decode step is short, and on another device this is a transfer
def theta(horizons: tuple[float, ...], device: torch.device) -> Tensor:
    """Radians per position, one for each horizon. The copy is synchronous, so any stream may read it."""
    angles = torch.tensor([math.pi / 2 / h for h in horizons], dtype=exact_dtype(device), device="cpu")
    return angles.to(device)


_graphs: set[Tensor] = set()


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: then nothing may wait for the device or come from the CPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def lasting(device: torch.device, *cached: Tensor | None) -> None:
    """Keep cached tensors forever if a CUDA graph is being captured, which reads them at every replay."""
    if capturing(device):
        _graphs.update(t for t in cached if t is not None)


def running_sum(x: Tensor) -> Tensor:
    """The cumulative sum along the last dimension."""
    if not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(-1)
    step = 1  # torch has no deterministic cumsum on a GPU, and raises an error there
    while step < x.shape[-1]:
        x = x + torch.nn.functional.pad(x[..., :-step], (step, 0))
        step *= 2
    return x
