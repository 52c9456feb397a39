"""Linear attention over a sequence that several processes hold together: they exchange states, not tokens.

T_r is the state of rank r's keys and f_r its fade (fades.py). A rank's queries read the state from its left,
P_r, its own keys and, in bidirectional attention, the state from its right, R_r:

    P_r = f_(r-1) P_(r-1) + T_(r-1)      R_r = f_(r+1) R_(r+1) + U_(r+1)

U_r is T_r with its keys faded toward the rank's start. Without decay and causality they read the
sum of all T. Each rank sends its T (and U) and f once; a state has F (E + 1) numbers per head at any length:

    forward    B H (F (E + 1) + 1) numbers, 2 F (E + 1) + 1 per head if bidirectional with decay
    backward   B H F (E + 1), or twice that

Backward. [n_i, z_i] is the sum of all that a query reads, so given the total output and normaliser, each part
has gradients as if it stood alone. dP_r is sent, and the gradient of T is the mirrored sum:

    dT_r = f_(r+1) dT_(r+1) + dP_(r+1)      df_r = <P_r, dT_r>

While a message is under way, a rank works on pairs of its own queries and keys.
"""

import functools
import math
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from .call import Call, Grads, Inputs, Outputs, Upstream, exact_dtype, projected, running_sum, sum_dtype
from .checks import Horizon, Rates, check_reach, check_tensors, rates_of, readable
from .fades import Fades, faded_state, fades, grouped
from .operator import attend, attend_backward, autocast, call_of
from .shard import Shard, refuse_second_derivative
from .state import State


def linear_sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: Shard,
    *,
    horizon: Horizon = math.inf,
    relu: bool = False,
    signed: bool = False,
    causal: bool = False,
    key_mask: Tensor | None = None,
    decay: Rates | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, State | None]:
    """`linear_attention` over a sequence of which each process holds a part: this part's output and, if
    causal, the state after the whole sequence, the same in every process and not differentiable.

    All processes of `shard.group` must call it. Rates are this part's, (H,) or (B, H, L); the gradient of
    rates (H,) is this part's share, as for any other parameter.
    """
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v, key_mask)
    L, S, here = q.shape[2], k.shape[2], shard.lengths[shard.rank]
    if not L == S == here:
        raise ValueError(f"q has length {L} and k has {S}; the shard says that this rank holds {here} tokens")
    chosen = {"causal": causal, "position": shard.offset, "relu": relu, "signed": signed}
    call = call_of(horizon, q, eps=eps, backend=backend, **chosen)
    farthest = shard.total - 1
    if shard.places is not None:  # the largest place is the longest distance
        farthest = int(shard.places.max()) if L and readable(shard.places) else 0
    check_reach(call.horizons, farthest, 0 if causal else farthest)
    rates = None if decay is None else rates_of(decay, q, k, self_attention=True)
    if signed:  # sums of both signs may cancel, so parts must not be rounded before they are added
        q, k, v = (t.to(sum_dtype(t.dtype)) for t in (q, k, v))
    out, after = _Sharded.apply(q, k, v, rates, key_mask, shard, call)
    return out, State(after, shard.total, call.horizons) if causal else None


class _Way(Enum):
    """A direction in which states travel: toward which end keys fade, and from which end queries read."""

    RIGHTWARD = auto()
    LEFTWARD = auto()
    EVERYWHERE = auto()

    def keys(self, left: Fades, k: Tensor, key_mask: Tensor | None) -> Tensor:
        return left.starting(k, key_mask) if self is _Way.LEFTWARD else left.ending(k, key_mask)

    def queries(self, left: Fades, q: Tensor) -> Tensor:
        return left.ending(q) if self is _Way.LEFTWARD else left.starting(q)

    def before(self, shard: Shard) -> list[int]:
        """The ranks whose states reach this one, in their order of travel."""
        if self is _Way.EVERYWHERE:
            return list(range(shard.size))
        return [*range(shard.rank)] if self is _Way.RIGHTWARD else [*range(shard.size - 1, shard.rank, -1)]

    def after(self, shard: Shard) -> list[int]:
        """The ranks whose gradients come back to this one, in their order of travel."""
        back = {_Way.RIGHTWARD: _Way.LEFTWARD, _Way.LEFTWARD: _Way.RIGHTWARD}
        return back.get(self, self).before(shard)


def _ways(causal: bool, left: Fades) -> tuple[_Way, ...]:
    if causal:
        return (_Way.RIGHTWARD,)
    return (_Way.EVERYWHERE,) if left.whole is None else (_Way.RIGHTWARD, _Way.LEFTWARD)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        key_mask: Tensor | None,
        shard: Shard,
        call: Call,
    ):
        left = fades(decay, k, shard.first)
        ways = _ways(call.causal, left)
        sent = [_segment(way.keys(left, k, key_mask), v, key_mask, q, call) for way in ways]
        if left.whole is not None:
            sent.append(left.whole.to(sent[0].dtype))
        arrive = shard.gather(*sent)
        parts = []  # what queries read: sums and normalisers
        if _Way.EVERYWHERE not in ways:
            parts.append(_sums(_local(q, k, v, decay, key_mask, shard, call), call))
        states = arrive()
        passed = states.pop() if left.whole is not None else None  # every rank's fade
        incoming = [_scan(t, passed, way.before(shard)) for t, way in zip(states, ways, strict=True)]
        for way, state in zip(ways, incoming, strict=True):
            parts.append(_sums(_read(way.queries(left, q), state, call), call))
        n, z = (functools.reduce(torch.add, part) for part in zip(*parts, strict=True))
        out = projected(q, q.shape[1], q.shape[2], v.shape[3])
        out.copy_(n / call.clamp(z)[..., None])
        after = _scan(states[0], passed, range(shard.size)) if call.causal else z.new_empty(0)
        ctx.save_for_backward(q, k, v, decay, key_mask, out, z, passed, *incoming)
        ctx.shard, ctx.call = shard, call
        ctx.mark_non_differentiable(after)
        ctx.set_materialize_grads(False)
        return out, after

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: None):
        refuse_second_derivative()
        q, k, v, decay, key_mask, out, norm, passed, *incoming = ctx.saved_tensors
        shard, call = ctx.shard, ctx.call
        dout = torch.zeros_like(out) if dout is None else dout
        left, y = fades(decay, k, shard.first), Outputs(out, norm, None)
        ways = _ways(call.causal, left)
        total = _Totals(q, k, v, left, rated=decay is not None)
        sent = []
        for way, state in zip(ways, incoming, strict=True):
            seen = way.queries(left, q)
            dseen, dstate = _read_backward(dout, seen, state, y, call)
            total.query(way, seen, dseen)
            sent.append(dstate)
        arrive = shard.gather(*sent)
        if _Way.EVERYWHERE not in ways:
            total.local(_local_backward(dout, q, k, v, decay, key_mask, y, shard, call))
        for way, state, dstates in zip(ways, incoming, arrive(), strict=True):
            dstate = _scan(dstates, passed, way.after(shard))
            seen = way.keys(left, k, key_mask)
            dseen, dv = _segment_backward(dstate, seen, v, key_mask, q, call)
            total.keys(way, seen, dseen, dv, (state * dstate).sum((-2, -1)))
        drates = None if decay is None else total.rates(decay)
        return total.dq.to(q.dtype), total.dk.to(k.dtype), total.dv.to(v.dtype), drates, None, None, None


class _Totals:
    """Accumulates gradients in the dtype of sums; those of the fades become those of the rates."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, left: Fades, *, rated: bool):
        self.left, self.rated, sums = left, rated, sum_dtype(q.dtype)
        self.dq, self.dk, self.dv = (torch.zeros_like(t, dtype=sums) for t in (q, k, v))
        exact = exact_dtype(q.device)
        self.start, self.end = (q.new_zeros(q.shape[:3], dtype=exact) for _ in range(2))
        self.whole = q.new_zeros(q.shape[:2], dtype=exact)
        self.drates: Tensor | None = None

    def query(self, way: _Way, seen: Tensor, dseen: Tensor) -> None:
        self.dq += way.queries(self.left, dseen)
        self._faded(self.end if way is _Way.LEFTWARD else self.start, seen, dseen)

    def local(self, grads: Grads) -> None:
        self.dq += grads.q
        self.dk += grads.k
        self.dv += grads.v
        self.drates = grads.decay

    def keys(self, way: _Way, seen: Tensor, dseen: Tensor, dv: Tensor, dwhole: Tensor) -> None:
        dk = way.keys(self.left, dseen, None)
        self.dk += _ungrouped(dk, self.dk.shape[1])
        self.dv += _ungrouped(dv, self.dv.shape[1])
        self._faded(self.start if way is _Way.LEFTWARD else self.end, seen, dseen)
        self.whole += dwhole

    def _faded(self, total: Tensor, seen: Tensor, dseen: Tensor) -> None:
        if self.rated:
            total += (seen * dseen).sum(-1)

    def rates(self, decay: Tensor) -> Tensor:
        """From fades to rates: the running sum g enters start as -g, end as g - G and whole as -G."""
        dg = self.end - self.start
        if not dg.shape[2]:
            return torch.zeros_like(decay)
        assert self.left.whole is not None and self.drates is not None
        dg[..., -1] -= self.end.sum(-1) + self.left.whole * self.whole
        if decay.ndim == 3:
            return self.drates + running_sum(dg.flip(-1)).flip(-1).to(decay.dtype)
        steps = torch.arange(1, dg.shape[2] + 1, device=dg.device)
        return self.drates + (dg * steps).sum((0, 2)).to(decay.dtype)


# The parts of the sum, each an ordinary call


def _segment(k: Tensor, v: Tensor, key_mask: Tensor | None, q: Tensor, call: Call) -> Tensor:
    """The state of this rank's keys."""
    after = attend(_kept(k, v, key_mask, q), call._replace(causal=False, keep_state=True)).after
    assert after is not None
    return after


def _segment_backward(dstate: Tensor, k: Tensor, v: Tensor, key_mask, q: Tensor, call: Call):
    x = _kept(k, v, key_mask, q)
    nothing = Outputs(x.q.new_empty(*x.q.shape[:3], v.shape[3]), dstate.new_empty(x.q.shape[:3]), dstate)
    call = call._replace(causal=False, keep_state=True)
    grads = attend_backward(Upstream(torch.zeros_like(nothing.out), dstate), x, nothing, call)
    return grads.k, grads.v


def _kept(k: Tensor, v: Tensor, key_mask: Tensor | None, q: Tensor) -> Inputs:
    no_queries = q[:, :, :0].to(k.dtype)
    return Inputs(no_queries, k, grouped(v, k.shape[1]).to(k.dtype), key_mask=key_mask)


def _read(q: Tensor, state: Tensor, call: Call) -> Outputs:
    """What queries read from a state."""
    return attend(_asked(q, state), call._replace(causal=False))


def _read_backward(dout: Tensor, q: Tensor, state: Tensor, y: Outputs, call: Call) -> tuple[Tensor, Tensor]:
    y, dout = Outputs(y.out.to(q.dtype), y.norm, state), dout.to(q.dtype)
    grads = attend_backward(Upstream(dout, None), _asked(q, state), y, call._replace(causal=False))
    assert grads.state is not None
    return grads.q, grads.state


def _asked(q: Tensor, state: Tensor) -> Inputs:
    B, H, _, columns = state.shape
    return Inputs(q, q.new_empty(B, H, 0, q.shape[3]), q.new_empty(B, H, 0, columns - 1), state=state)


def _local(q, k, v, decay, key_mask, shard: Shard, call: Call) -> Outputs:
    """What this rank's queries read from its keys."""
    y = attend(_laid_out(q, k, v, decay, key_mask, shard), call)
    return y if shard.boundaries is None else Outputs(_rows(y.out, q), _rows(y.norm, q), None)


def _local_backward(dout: Tensor, q, k, v, decay, key_mask, y: Outputs, shard: Shard, call: Call) -> Grads:
    if shard.boundaries is not None:
        dout, y = _end_to_end(dout), Outputs(_end_to_end(y.out), _end_to_end(y.norm), None)
    grads = attend_backward(Upstream(dout, None), _laid_out(q, k, v, decay, key_mask, shard), y, call)
    if shard.boundaries is None:
        return grads
    rates = grads.decay if grads.decay is None or grads.decay.ndim == 1 else _rows(grads.decay, q)
    return grads._replace(q=_rows(grads.q, q), k=_rows(grads.k, q), v=_rows(grads.v, q), decay=rates)


def _laid_out(q, k, v, decay, key_mask, shard: Shard) -> Inputs:
    if shard.boundaries is None:
        return Inputs(q, k, v, decay, key_mask)
    q, k, v = map(_end_to_end, (q, k, v))
    rates = decay if decay is None or decay.ndim == 1 else _end_to_end(decay)
    mask = None if key_mask is None else key_mask.reshape(1, -1)
    return Inputs(q, k, v, rates, mask, shard.boundaries)


def _end_to_end(x: Tensor) -> Tensor:
    """(B, H, L, ...) -> (1, H, B L, ...), as packed sequences are."""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _rows(x: Tensor, like: Tensor) -> Tensor:
    return x[0].unflatten(1, (like.shape[0], like.shape[2])).transpose(0, 1)


def _sums(y: Outputs, call: Call) -> tuple[Tensor, Tensor]:
    """A part's sums before the division by their normaliser, and the normaliser."""
    return y.out.to(y.norm.dtype) * call.clamp(y.norm)[..., None], y.norm


def _scan(states: Tensor, fade: Tensor | None, ranks) -> Tensor:
    """The sum of these ranks' states, each faded across the ranks after its own."""
    total = torch.zeros_like(states[0])
    for rank in ranks:
        total = faded_state(total, None if fade is None else fade[rank]) + states[rank]
    return total


def _ungrouped(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
