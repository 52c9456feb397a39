"""The torch backend: the operator in plain torch, span by span; its backward recomputes instead of storing.

    out_i = n_i / max(z_i, eps)      [n_i, z_i] = sum_j s_ij [v_j, 1]
    s_ij  = f(q_i) . f(k_j) * cos(theta (p_i - p_j)) * exp(-|A_i - A_j|)
    f     = relu or identity      theta = pi/2 / horizon      A = the running sum of the rates

cos(a - b) = cos a cos b + sin a sin b, so with phi(x) = [f(x) cos a, f(x) sin a] keys enter through a state:

    state = sum_j phi(k_j) [v_j, 1]^T      (F, E + 1), the last column is the normaliser
    [n_i, z_i] = phi(q_i) state

Positions are cut into spans; within a span every position has a query or none does, and likewise for keys. A
sweep carries a state along the spans. With g the running sum of the rates in a span and G its last value,

    rightward   a query reads exp(-g_i) state
                state <- exp(-G) state + sum_j exp(-(G - g_j)) phi(k_j) [v_j, 1]^T
    leftward    a query reads exp(-(G - g_i)) state
                state <- exp(-G) state + sum_j exp(-g_j) phi(k_j) [v_j, 1]^T

Every exponent is <= 0, so nothing overflows at any rate or length. Pairs inside a span of queries and keys
use the quadratic form (D features, the cosine as a table). Only a bidirectional call with decay needs both
sweeps; without decay order does not matter, so all keys come first, then all queries, and no span has both.

Backward. m_i = [dout_i / z_i, -(out_i . dout_i) / z_i] is the gradient of [n_i, z_i], ds_ij = m_i . [v_j, 1],

    dphi(q_i) = state m_i      dphi(k_j) = mirror [v_j, 1]      dv_j = mirror^T phi(k_j)
    mirror    = sum_i phi(q_i) m_i^T

so the mirror is the same kind of state, built from queries and read by keys, and it travels the other way. A
decay weight's exponent is -|A_i - A_j|, so dA gathers P_ij = s_ij ds_ij with the sign of (j - i): inside a
span from the explicit matrix, between spans as q_i . dq_i and k_j . dk_j; the diagonal never enters, so
strong decay stays exact.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import packing
from .call import (
    Backend,
    Call,
    Grads,
    Inputs,
    Outputs,
    Upstream,
    exact_dtype,
    lasting,
    running_sum,
    sum_dtype,
    theta,
)
from .fades import grouped, masked

CHUNK = 128  # length of a span with pairs: long enough to keep GEMMs busy, short enough for quadratic cost
STRIDE = 1024  # length of other spans: nothing is quadratic there, and longer ones save calls


def forward(x: Inputs, call: Call) -> Outputs:
    if x.cu_seqlens is not None:
        return packing.forward(forward, x, call)
    c, y = _Spans(x, call), Outputs.empty(x, call)

    far = {}  # what each query reads from its right
    if c.two_sided:
        right = c.zero_state()
        for s in reversed(c.spans):
            if s.queries:
                far[s] = c.phi(c.faded(c.query(s), s, leftward=True), s) @ right
            right = c.past(right, s, c.keys(s), leftward=True)

    left = c.zero_state() if x.state is None else x.state
    for s in c.spans:
        keys = c.keys(s)
        if s.queries:
            f = c.query(s)
            n = c.phi(c.faded(f, s), s) @ left
            if keys is not None:
                n += ((f @ keys[0].mT) * c.table(s)) @ keys[1]
            if c.two_sided:
                n += far.pop(s)
            y.out[:, :, c.rows(s)] = n[..., :-1] / call.clamp(n[..., -1:])
            y.norm[:, :, c.rows(s)] = n[..., -1]
        left = c.past(left, s, keys)
    if y.after is not None:
        y.after.copy_(left)
    return y


def backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> Grads:
    if x.cu_seqlens is not None:
        return packing.backward(backward, upstream, x, y, call)
    c = _Gradients(x, call, y, upstream.dout)

    # Rightward: queries read the keys before them; two-sided, keys also read the queries before them.
    left, mirror = c.zero_state() if x.state is None else x.state, c.zero_state()
    spans = c.spans
    if not c.windowed and y.after is not None:  # the forward's total state
        left, spans = y.after, [s for s in spans if s.queries]
    for s in spans:
        if s.queries:
            c.query_reads(left, s)
        if s.queries and s.keys:
            c.pairs(s)
        left = c.past(left, s, c.keys(s))
        if c.two_sided:
            if s.keys:
                c.key_reads(mirror, s)
            mirror = c.past(mirror, s, c.queries(s))

    # Leftward: keys read the queries after them; two-sided, queries also read the keys after them.
    mirror, right = c.zero_state() if upstream.dafter is None else upstream.dafter, c.zero_state()
    for s in reversed(c.spans):
        if s.keys:
            c.key_reads(mirror, s, leftward=True)
        mirror = c.past(mirror, s, c.queries(s), leftward=True)
        if c.two_sided:
            if s.queries:
                c.query_reads(right, s, leftward=True)
            right = c.past(right, s, c.keys(s), leftward=True)

    if x.decay is not None and upstream.dafter is not None and c.S:  # the returned state has decayed, too
        c.dA_key[:, :, -1] -= (upstream.dafter * left).sum((-2, -1))
    dstate = None if x.state is None else mirror.clone()
    return Grads(c.dq.to(x.q.dtype), c.dk.to(x.k.dtype), c.dv.to(x.v.dtype), c.rate_gradient(), dstate)


BACKEND = Backend(forward, backward)


_Pair = tuple[Tensor, Tensor]  # f (.., n, D) and u (.., n, E + 1), which enter a state as phi(f) u^T


class _Span(NamedTuple):
    """Positions [lo, hi) on the keys' axis, where query i stands at q_offset + i."""

    lo: int
    hi: int
    queries: bool
    keys: bool


class _Spans:
    """One call's tensors, read a span at a time: in the dtype of sums, heads expanded, mask and f applied."""

    def __init__(self, x: Inputs, call: Call):
        self.x, self.decay, self.q_offset, self.relu = x, x.decay, call.q_offset, call.relu
        (self.B, self.H, self.L, self.D), (_, self.Hk, self.S, self.E) = x.q.shape, x.v.shape
        self.two_sided, self.state_shape = call.two_sided(x), call.state_shape(x.q, x.v)
        self.windowed = call.causal or self.two_sided  # order matters
        self.spans = list(self._windowed(call.causal) if self.windowed else self._apart())
        self.device, self.dtype, self.exact = x.q.device, sum_dtype(x.q.dtype), exact_dtype(x.q.device)
        self._make_tables(call)

    def _apart(self) -> Iterator[_Span]:
        start = self.q_offset
        yield from (_Span(lo, hi, False, True) for lo, hi in _cut(0, self.S, STRIDE))
        yield from (_Span(lo, hi, True, False) for lo, hi in _cut(start, start + self.L, STRIDE))

    def _windowed(self, causal: bool) -> Iterator[_Span]:
        start, end = self.q_offset, self.q_offset + self.L
        last = end if causal else max(end, self.S)  # keys after the last query are not seen
        edges = sorted({0, last, *(e for e in (start, end, self.S) if e < last)})
        for lo, hi in zip(edges[:-1], edges[1:], strict=True):
            queries, keys = start <= lo < end, lo < self.S
            step = {0: hi - lo, 1: STRIDE, 2: CHUNK}[queries + keys]
            yield from (_Span(a, b, queries, keys) for a, b in _cut(lo, hi, step))

    def _make_tables(self, call: Call) -> None:
        """Cosine and sine at every position, (1 or H, length, 1); cosine of a span's lags, (1 or H, n, n).

        Made once per call, on its device; angles are in float64, since positions can be large.
        """
        at = torch.arange(max(self.q_offset + self.L, self.S), device=self.device)
        n = min(CHUNK, self.L) if self.windowed else 0
        self.lag, self.turn = at[:n, None] - at[:n], None
        self.inside = torch.ones(1, n, n, dtype=self.dtype, device=self.device)
        if call.cosine:
            angles = theta(call.horizons, self.device)
            lasting(self.device, angles)
            radians = angles[:, None, None]
            angle = radians * (at[:, None] + call.position)
            self.turn = (angle.cos().to(self.dtype), angle.sin().to(self.dtype))
            self.inside = (radians * self.lag).cos().to(self.dtype)
        if call.causal:
            self.inside = self.inside.tril()

    def rows(self, s: _Span) -> slice:
        """The rows of q at these positions."""
        return slice(s.lo - self.q_offset, s.hi - self.q_offset)

    def query(self, s: _Span) -> Tensor:
        f = self.x.q[:, :, self.rows(s)].to(self.dtype)
        return f.relu() if self.relu else f

    def key(self, s: _Span) -> Tensor:
        f = self._masked(self.x.k, s)
        return f.relu() if self.relu else f

    def value(self, s: _Span) -> Tensor:
        return torch.nn.functional.pad(self._masked(self.x.v, s), (0, 1), value=1.0)

    def keys(self, s: _Span) -> _Pair | None:
        """What the keys of a span add to a state."""
        return (self.key(s), self.value(s)) if s.keys else None

    def _masked(self, t: Tensor, s: _Span) -> Tensor:
        mask = None if self.x.key_mask is None else self.x.key_mask[:, s.lo : s.hi]
        return grouped(masked(t[:, :, s.lo : s.hi].to(self.dtype), mask), self.H)

    def phi(self, f: Tensor, s: _Span) -> Tensor:
        if self.turn is None:
            return f
        cos, sin = (t[:, s.lo : s.hi] for t in self.turn)
        return torch.cat([f * cos, f * sin], -1)

    def dphi(self, d: Tensor, s: _Span) -> Tensor:
        """The gradient of f from that of phi(f)."""
        if self.turn is None:
            return d
        cos, sin = (t[:, s.lo : s.hi] for t in self.turn)
        return d[..., : self.D] * cos + d[..., self.D :] * sin

    def sums(self, s: _Span) -> Tensor:
        """The running sum g of the rates in a span, (B or 1, H, n), in float64: rates of all sizes mix."""
        assert self.decay is not None
        if self.decay.ndim == 3:
            return running_sum(self.decay[:, :, s.lo : s.hi].to(self.exact))
        return self.decay.to(self.exact)[None, :, None] * torch.arange(1, s.hi - s.lo + 1, device=self.device)

    def faded(self, t: Tensor, s: _Span, *, leftward: bool = False) -> Tensor:
        """t (.., n, any) times the decay from the edge where a state enters the span to each position."""
        if self.decay is None:
            return t
        g = self.sums(s)
        return t * torch.exp(g - g[..., -1:] if leftward else -g).to(self.dtype).unsqueeze(-1)

    def zero_state(self) -> Tensor:
        return torch.zeros(self.state_shape, dtype=self.dtype, device=self.device)

    def past(self, state: Tensor, s: _Span, taken: _Pair | None, *, leftward: bool = False) -> Tensor:
        """The state after it crosses a span and takes in the span's phi(f) u^T."""
        if self.decay is not None:
            state = state * torch.exp(-self.sums(s)[..., -1:]).to(self.dtype).unsqueeze(-1)
        if taken is None:
            return state
        f, u = taken  # decay up to the exit edge = decay from it, for a state that enters there
        return state + self.phi(self.faded(f, s, leftward=not leftward), s).mT @ u

    def table(self, s: _Span) -> Tensor:
        """cos(theta (i - j)) exp(-|A_i - A_j|), 0 where query i must not see key j: (.., n, n)."""
        n = s.hi - s.lo
        w = self.inside[:, :n, :n]
        if self.decay is None:
            return w
        g = self.sums(s)
        return w * torch.exp(-(g[..., :, None] - g[..., None, :]).abs()).to(self.dtype)


class _Gradients(_Spans):
    """The backward: what a sweep reads is added to the gradients."""

    def __init__(self, x: Inputs, call: Call, y: Outputs, dout: Tensor):
        super().__init__(x, call)
        self.call, self.y, self.dout = call, y, dout
        zeros = x.q.new_zeros
        self.dq = zeros(self.B, self.L, self.H, self.D, dtype=self.dtype).transpose(1, 2)
        self.dk = zeros(self.B, self.S, self.Hk, self.D, dtype=self.dtype).transpose(1, 2)
        self.dv = zeros(self.B, self.S, self.Hk, self.E, dtype=self.dtype).transpose(1, 2)
        if x.decay is not None:
            self.dA_query = zeros(self.B, self.H, self.L, dtype=self.exact)
            self.dA_key = zeros(self.B, self.H, self.S, dtype=self.exact)

    def m(self, s: _Span) -> Tensor:
        """The gradient of [n_i, z_i]; that of a clamped normaliser is 0."""
        dout, z = self.dout[:, :, self.rows(s)].to(self.dtype), self.y.norm[:, :, self.rows(s), None]
        dn = dout / self.call.clamp(z)
        dz = -(dn * self.y.out[:, :, self.rows(s)].to(self.dtype)).sum(-1, keepdim=True)
        size = z.abs() if self.call.signed else z
        return torch.cat([dn, dz.masked_fill(size < self.call.eps, 0)], -1)

    def queries(self, s: _Span) -> _Pair | None:
        """What the queries of a span add to the mirror."""
        return (self.query(s), self.m(s)) if s.queries else None

    def query_reads(self, state: Tensor, s: _Span, *, leftward: bool = False) -> None:
        f = self.query(s)
        df = self.dphi(self.faded(self.m(s), s, leftward=leftward) @ state.mT, s)
        self._add_dq(df, f, s, self._toward(leftward, f, df))

    def key_reads(self, mirror: Tensor, s: _Span, *, leftward: bool = False) -> None:
        f = self.key(s)
        df = self.dphi(self.faded(self.value(s), s, leftward=leftward) @ mirror.mT, s)
        dv = self.phi(self.faded(f, s, leftward=leftward), s) @ mirror[..., :-1]
        self._add_dkv(df, dv, f, s, self._toward(leftward, f, df))

    def _toward(self, leftward: bool, f: Tensor, df: Tensor) -> Tensor | None:
        """The part of a reader's dA due to a state that comes from one side."""
        sign = 1 if leftward else -1
        return None if self.decay is None else sign * (f * df).sum(-1)

    def pairs(self, s: _Span) -> None:
        """The gradients from pairs of queries and keys within one span."""
        f, m, g, u, w = self.query(s), self.m(s), self.key(s), self.value(s), self.table(s)
        fg, ds = f @ g.mT, (m @ u.mT) * w
        rows = columns = None
        if self.decay is not None:
            P = fg * ds * self.lag[: s.hi - s.lo, : s.hi - s.lo].sign()
            rows, columns = -P.sum(-1), P.sum(-2)
        self._add_dq(ds @ g, f, s, rows)
        self._add_dkv(ds.mT @ f, (fg * w).mT @ m[..., :-1], g, s, columns)

    def _add_dq(self, df: Tensor, f: Tensor, s: _Span, dA: Tensor | None) -> None:
        self.dq[:, :, self.rows(s)] += df.masked_fill(f <= 0, 0) if self.relu else df
        if dA is not None:
            self.dA_query[:, :, self.rows(s)] += dA

    def _add_dkv(self, df: Tensor, dv: Tensor, f: Tensor, s: _Span, dA: Tensor | None) -> None:
        df = df.masked_fill(f <= 0, 0) if self.relu else df
        if self.x.key_mask is not None:
            masked = ~self.x.key_mask[:, None, s.lo : s.hi, None]
            df, dv = df.masked_fill(masked, 0), dv.masked_fill(masked, 0)
        if self.H != self.Hk:
            df, dv = (t.unflatten(1, (self.Hk, self.H // self.Hk)).sum(2) for t in (df, dv))
        self.dk[:, :, s.lo : s.hi] += df
        self.dv[:, :, s.lo : s.hi] += dv
        if dA is not None:
            self.dA_key[:, :, s.lo : s.hi] += dA

    def rate_gradient(self) -> Tensor | None:
        """The rates' gradient from dA: A_i is the sum of rates up to i, or the rate times the position."""
        if self.decay is None:
            return None
        if self.decay.ndim == 3:
            return running_sum((self.dA_query + self.dA_key).flip(-1)).flip(-1).to(self.decay.dtype)
        at = torch.arange(1, max(self.L, self.S) + 1, device=self.device, dtype=self.exact)
        query, key = self.dA_query * (at[: self.L] + self.q_offset), self.dA_key * at[: self.S]
        return (query.sum((0, 2)) + key.sum((0, 2))).to(self.decay.dtype)


def _cut(lo: int, hi: int, step: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + step, hi)) for at in range(lo, hi, step))
