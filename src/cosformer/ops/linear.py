"""linear_attention: the core that all kernel mixers share; whole sequences, streams and their State, cross attention's memory.

    out_i = sum_j s_ij v_j / max(sum_j s_ij, eps)     s_ij = f(q_i) . f(k_j) * cos(pi/2 (p_i - p_j) / M) * exp(-|A_i - A_j|)

f is the identity (q and k are features already) or ReLU, fused into the backends. An infinite horizon M drops the cosine.
cosFormer is f = ReLU with a finite horizon (cosformer.py). The algorithm is derived in _torch.py.

    B, H, Hk   batch, query heads, key/value heads      L, S   query and key length      D, E   key and value size
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import (
    Horizon,
    Rates,
    autocast,
    check_eps,
    check_packed,
    check_reach,
    check_state,
    check_state_horizons,
    check_tensors,
    horizon_list,
    rates_of,
    shown,
)
from .operator import attend, check_backend, full_precision


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

    The horizon is part of the sums in the tensor, so a State knows its own and is refused where another is given. Rates are not:
    each token brings its own, and none is a rate of 0, so they may change, begin or end anywhere in a stream.
    """

    tensor: Tensor
    position: int = 0
    horizons: tuple[float, ...] | None = (
        None  # one, or one per head; None in a state made by hand, which takes the next call's
    )
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
        here = State(self.tensor, self.position, self.horizons)
        return replace(here, origin=here)

    def rollback(self, tokens: int) -> "State":
        """The state as it was `tokens` tokens ago, exactly; it can go back as far as the last snapshot."""
        start = self.origin
        if start is None:
            raise ValueError(
                "rollback: this state has no snapshot to return to; call state.snapshot() before the tokens"
            )
        keep = self.position - start.position - tokens
        if tokens < 0 or keep < 0:
            raise ValueError(
                f"rollback: tokens is {tokens}; 0 to {self.position - start.position} were seen since the snapshot"
            )
        state = start.snapshot()
        with full_precision(self.tensor):
            for taken in self.trail:
                k, v, key_mask, rates, options = taken.first(min(keep, taken.k.shape[2]))
                q = k[:, :1].expand(-1, self.tensor.shape[1], -1, -1)  # no output is wanted, only the state
                _, state = linear_stream(q, k, v, state, key_mask=key_mask, decay=rates, **options)
                keep -= k.shape[2]
        return state

    def state_dict(self) -> dict[str, Tensor]:
        """What `torch.save` or safetensors keeps; `State.from_state_dict` is the way back. A snapshot is not kept."""
        saved = {"tensor": self.tensor, "position": torch.tensor(self.position)}
        return (
            saved
            if self.horizons is None
            else {**saved, "horizons": torch.tensor(self.horizons, dtype=torch.float64)}
        )

    @classmethod
    def from_state_dict(cls, saved: dict) -> "State":
        horizons = saved.get("horizons")
        return cls(
            saved["tensor"], int(saved["position"]), None if horizons is None else tuple(horizons.tolist())
        )

    def _map(self, change: Callable[[Tensor], Tensor], *, rows: bool = False) -> "State":
        origin = None if self.origin is None else replace(self.origin, tensor=change(self.origin.tensor))
        trail = tuple(seen.map(change, rows=rows) for seen in self.trail)
        return replace(self, tensor=change(self.tensor), origin=origin, trail=trail)


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
    decay: Rates | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """Normalised linear attention over features q (B, H, L, D), k (B, Hk, S, D) and values v (B, Hk, S, E) -> (B, H, L, E).

    The arguments are those of `cosformer_attention`, and two of the mechanism's: `relu` applies ReLU to q and k first; `signed`
    is for features that can be negative, where the normaliser keeps its sign and only its size is held above eps.
    """
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v, key_mask)
    L, S = q.shape[2], k.shape[2]
    if not isinstance(q_offset, int | torch.SymInt) or isinstance(q_offset, bool):
        raise TypeError(
            f"q_offset must be an int, the position of the first query among the keys; got {type(q_offset).__name__}"
        )
    if q_offset < 0:
        raise ValueError(
            f"q_offset is {q_offset}; the first query's position among the keys must be 0 or more"
        )
    if cu_seqlens is not None:
        check_packed(q, k, cu_seqlens, q_offset)
    horizons = horizon_list(horizon, q.shape[1])
    if cu_seqlens is None and L > 0 and S > 0:
        check_reach(horizons, q_offset + L - 1, 0 if causal else S - 1 - q_offset)
    decay = rates_of(decay, q, k, self_attention=L == S and q_offset == 0)
    check_backend(backend)
    check_eps(eps)
    out, _, _ = attend(
        q,
        k,
        v,
        decay,
        key_mask,
        cu_seqlens,
        None,
        horizons,
        causal,
        q_offset,
        0,
        relu,
        signed,
        eps,
        backend,
        False,
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
    decay: Rates | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Causal `linear_attention` over the next tokens of a stream; returns their output and the state after them."""
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v, key_mask)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q has length {q.shape[2]} and k has {k.shape[2]}; a stream takes as many queries as keys"
        )
    horizons = horizon_list(horizon, q.shape[1])
    if state is None:
        position, tensor = 0, None
    elif not isinstance(state, State):
        raise TypeError(f"state must be a State, as the stream returned it, or None; got {shown(state)}")
    else:
        position, tensor = state.position, state.tensor
        check_state_horizons(state.horizons, horizons)
        check_state(tensor, q, v, horizons)
    if q.shape[2] > 0:
        remedy = "pass" if state is None else "start the stream again with"
        check_reach(horizons, position + q.shape[2] - 1, remedy=remedy)
    rates = rates_of(decay, q, k, self_attention=True)
    check_backend(backend)
    check_eps(eps)
    out, _, new = attend(
        q, k, v, rates, key_mask, None, tensor, horizons, True, 0, position, relu, signed, eps, backend, True
    )
    after = State(new, position + q.shape[2], tuple(horizons))
    if state is not None and state.origin is not None:
        options = {"horizon": horizons, "relu": relu, "backend": backend}
        mask, rates = (
            None if x is None else x.clone() for x in (key_mask, rates)
        )  # clones: the caller may reuse its buffers
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
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v, key_mask)
    check_backend(backend)
    horizons = horizon_list(horizon, heads)
    _, _, tensor = attend(
        q, k, v, None, key_mask, None, None, horizons, False, 0, 0, relu, False, 1e-6, backend, True
    )
    return State(tensor, k.shape[2], tuple(horizons))


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
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v, None)
    check_backend(backend)
    check_eps(eps)
    horizons = horizon_list(horizon, H)
    check_state_horizons(state.horizons, horizons)
    check_state(state.tensor, q, v, horizons)
    if q.shape[2] and state.position:
        check_reach(horizons, q_offset + q.shape[2] - 1, state.position - 1 - q_offset)
    options = (horizons, False, 0, q_offset, relu, signed, eps, backend, False)
    out, _, _ = attend(q, k, v, None, None, None, state.tensor, *options)
    return out
