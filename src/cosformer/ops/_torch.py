"""The torch backend: linear attention in plain torch, chunk by chunk, with a backward that recomputes instead of storing.

    out_i = n_i / max(z_i, eps)      [n_i, z_i] = sum_j s_ij [v_j, 1]
    s_ij  = f(q_i) . f(k_j) * cos(theta (p_i - p_j)) * exp(-|A_i - A_j|)      f = relu or identity,  theta = pi/2 / horizon

cos(a - b) = cos a cos b + sin a sin b, so with phi(x) = [f(x) cos a, f(x) sin a] the keys enter through a state alone:

    state = sum_j phi(k_j) [v_j, 1]^T      (F, E + 1), the last column is the normaliser      [n_i, z_i] = phi(q_i) state

Keys are met in three regions of the position axis. The **prefix** lies left of every query, the **window** holds the keys that
stand at the queries' own positions, the **suffix** lies right of every query. A causal call never looks at its suffix. Without
decay a bidirectional call does not care where a key stands, so all its keys count as prefix and the window is empty. Inside one
chunk of the window the quadratic form is used (D features, the cosine as a table); between chunks only states travel.

A sweep carries a state along the axis. Let g be the running sum of the rates inside a chunk and G its last value:

    left to right    a query reads exp(-g_i) state      then state <- exp(-G) state + sum_j exp(-(G - g_j)) phi(k_j) [v_j, 1]^T
    right to left    a query reads exp(-(G - g_i)) state     then state <- exp(-G) state + sum_j exp(-g_j) phi(k_j) [v_j, 1]^T

Every exponent is <= 0, so nothing overflows at any rate or length. Only a bidirectional call with decay needs the second sweep.

Backward. With m_i = [dout_i / z_i, -(out_i . dout_i) / z_i] (the gradient of [n_i, z_i]) and ds_ij = m_i . [v_j, 1],

    dphi(q_i) = state m_i       dphi(k_j) = mirror [v_j, 1]       dv_j = mirror^T phi(k_j)       mirror = sum_i phi(q_i) m_i^T

so the mirror is the same kind of state, built from queries and read by keys, and it travels the other way. A decay weight's
exponent is -|A_i - A_j|, so dA gathers P_ij = s_ij ds_ij with the sign of (j - i): inside a chunk from the explicit matrix,
between chunks as q_i . dq_i and k_j . dk_j; the diagonal never enters, which keeps strong decay accurate.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = (
    128  # of a window: long enough to keep the GEMMs busy, short enough for its quadratic part to stay small
)
STRIDE = 1024  # where there is no window nothing is quadratic, and longer steps only save calls


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why this backend cannot run the call; it can run every call."""
    return None


def info() -> dict[str, object]:
    return {}


def forward(
    q,
    k,
    v,
    theta,
    decay,
    key_mask,
    cu_seqlens,
    state,
    *,
    causal,
    q_offset,
    position,
    relu,
    signed,
    eps,
    keep_state,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out (B, H, L, E), the normaliser z (B, H, L) and the state after the last key (B, H, F, E + 1).

    theta is (1,) or (H,) in float64 or None (no cosine, F = D), decay (H,) or (B, H, S) or None, state None or the state of all
    keys before `position`, the first key's place on the angle's axis. A bidirectional call with decay has no state to return.
    """
    if cu_seqlens is not None:
        return _packed_forward(
            q, k, v, theta, decay, key_mask, cu_seqlens, causal=causal, relu=relu, signed=signed, eps=eps
        )
    c = _Chunks(
        q, k, v, theta, decay, key_mask, causal=causal, q_offset=q_offset, position=position, relu=relu
    )
    out, norm = c.empty(q.dtype, c.L, c.E), torch.empty(c.B, c.H, c.L, dtype=c.dtype, device=q.device)

    far = {}  # what each query reads from its right
    if c.two_sided:
        right = c.zero_state()
        for lo, hi in c.spans(c.b, c.S, reverse=True):
            right = c.absorb(right, c.key(lo, hi), c.value(lo, hi), lo, hi, leftward=True)
        for lo, hi in c.spans(q_offset, q_offset + c.L, reverse=True):
            if end := c.keys_until(lo, hi):
                far[lo] = c.phi(c.reach(c.query(lo, hi), lo, hi, leftward=True), lo, hi) @ right
                right = c.absorb(right, c.key(lo, end), c.value(lo, end), lo, end, until=hi, leftward=True)

    left = c.zero_state() if state is None else state
    for lo, hi in c.spans(0, c.a):
        left = c.absorb(left, c.key(lo, hi), c.value(lo, hi), lo, hi)
    left = c.across_gap(left)
    for lo, hi in c.spans(q_offset, q_offset + c.L):
        x = c.query(lo, hi)
        n = c.phi(c.reach(x, lo, hi), lo, hi) @ left
        if end := c.keys_until(lo, hi):
            y, u = c.key(lo, end), c.value(lo, end)
            n += ((x @ y.mT) * c.table(lo, hi, end)) @ u
            left = c.absorb(left, y, u, lo, end, until=hi)
        else:
            left = c.fade(left, lo, hi)
        if lo in far:
            n += far.pop(lo)
        i = slice(lo - q_offset, hi - q_offset)
        out[:, :, i] = n[..., :-1] / _clamp(n[..., -1:], eps, signed)
        norm[:, :, i] = n[..., -1]
    kept = keep_state or not (causal or c.two_sided)
    return out, norm, left.clone() if kept and left is state else left if kept else left.new_empty(0)


def backward(
    dout,
    dstate,
    q,
    k,
    v,
    out,
    norm,
    state,
    state_out,
    theta,
    decay,
    key_mask,
    cu_seqlens,
    *,
    causal,
    q_offset,
    position,
    relu,
    signed,
    eps,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return dq, dk, dv, the rates' gradient (None without decay) and the incoming state's gradient (None without a state)."""
    if cu_seqlens is not None:
        args = (dout, q, k, v, out, norm, theta, decay, key_mask, cu_seqlens)
        return *_packed_backward(*args, causal=causal, relu=relu, signed=signed, eps=eps), None
    c = _Chunks(
        q, k, v, theta, decay, key_mask, causal=causal, q_offset=q_offset, position=position, relu=relu
    )
    c.start_backward(dout, out, norm, eps, signed)

    # Left to right: queries read the keys before them; two-sided, keys and suffix also read the queries before them.
    left, mirror = c.zero_state() if state is None else state, c.zero_state()
    if state_out is not None and state_out.numel() and c.a == c.S and not causal:
        left = state_out  # bidirectional without decay: the forward's total state
    else:
        for lo, hi in c.spans(0, c.a):
            left = c.absorb(left, c.key(lo, hi), c.value(lo, hi), lo, hi)
        left = c.across_gap(left)
    for lo, hi in c.spans(q_offset, q_offset + c.L):
        c.query_reads(left, lo, hi)
        if end := c.keys_until(lo, hi):
            c.inside_chunk(lo, hi, end)
            left = c.absorb(left, c.key(lo, end), c.value(lo, end), lo, end, until=hi)
            if c.two_sided:
                c.key_reads(mirror, lo, end)
        else:
            left = c.fade(left, lo, hi)
        if c.two_sided:
            mirror = c.absorb(mirror, c.query(lo, hi), c.m(lo, hi), lo, hi)
    if c.two_sided:
        for lo, hi in c.spans(c.b, c.S):
            c.key_reads(mirror, lo, hi)
            mirror = c.fade(mirror, lo, hi)

    # Right to left: keys read the queries after them; two-sided, queries also read the keys after them.
    mirror, right = c.zero_state() if dstate is None else dstate, c.zero_state()
    if c.two_sided:
        for lo, hi in c.spans(c.b, c.S, reverse=True):
            right = c.absorb(right, c.key(lo, hi), c.value(lo, hi), lo, hi, leftward=True)
    for lo, hi in c.spans(q_offset, q_offset + c.L, reverse=True):
        if end := c.keys_until(lo, hi):
            c.key_reads(mirror, lo, end, until=hi, leftward=True)
            if c.two_sided:
                c.query_reads(right, lo, hi, leftward=True)
                right = c.absorb(right, c.key(lo, end), c.value(lo, end), lo, end, until=hi, leftward=True)
        mirror = c.absorb(mirror, c.query(lo, hi), c.m(lo, hi), lo, hi, leftward=True)
    mirror = c.across_gap(mirror)
    for lo, hi in c.spans(0, c.a, reverse=True):
        c.key_reads(mirror, lo, hi, leftward=True)
        mirror = c.fade(mirror, lo, hi)

    if c.decay is not None and dstate is not None and c.S:
        c.dA_key[:, :, -1] -= (dstate * left).sum(
            (-2, -1)
        )  # the state handed out is itself decayed up to the last key
    ddecay = None if c.decay is None else c.rate_gradient()
    dstate_in = None if state is None else mirror.clone() if mirror is dstate else mirror
    return c.dq.to(q.dtype), c.dk.to(k.dtype), c.dv.to(v.dtype), ddecay, dstate_in


class _Chunks:
    """One call's tensors, read a chunk at a time: positions in, accumulation dtype out, heads expanded, mask and f applied.

    Spans [lo, hi) are positions on the keys' axis; a query i stands at position q_offset + i.
    """

    def __init__(self, q, k, v, theta, decay, key_mask, *, causal, q_offset, position, relu):
        self.q, self.k, self.v, self.theta, self.key_mask = q, k, v, theta, key_mask
        self.causal, self.q_offset, self.position, self.relu = causal, q_offset, position, relu
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        (self.B, self.H, self.L, self.D), (_, self.Hk, self.S, self.E) = q.shape, v.shape
        self.decay = decay
        self.two_sided = decay is not None and not causal
        split = causal or self.two_sided
        self.a = min(q_offset, self.S) if split else self.S
        self.b = min(q_offset + self.L, self.S) if split else self.S
        self.step = CHUNK if split else STRIDE
        if theta is not None:
            lag = theta[:, None] * torch.arange(-CHUNK, CHUNK + 1)
            self.cos_lag = lag.cos().to(q.device, self.dtype)

    def spans(self, lo: int, hi: int, *, reverse: bool = False) -> Iterator[tuple[int, int]]:
        """[lo, hi) in steps, from either end; both orders cut at the same places."""
        starts = range(lo, hi, self.step)
        return ((s, min(s + self.step, hi)) for s in (reversed(starts) if reverse else starts))

    def empty(self, dtype: torch.dtype, length: int, size: int) -> Tensor:
        """(B, H, length, size) laid out as (B, length, H, size): what the projections around attention read and write."""
        strides = (length * self.H * size, size, self.H * size, 1)
        return torch.empty_strided((self.B, self.H, length, size), strides, dtype=dtype, device=self.q.device)

    def zero_state(self) -> Tensor:
        F = self.D if self.theta is None else 2 * self.D
        return torch.zeros(self.B, self.H, F, self.E + 1, dtype=self.dtype, device=self.q.device)

    def keys_until(self, lo: int, hi: int) -> int:
        """The end of the window's keys in this span of queries, 0 if it has none."""
        return min(hi, self.b) if self.a <= lo < self.b else 0

    def query(self, lo: int, hi: int) -> Tensor:
        x = self.q[:, :, lo - self.q_offset : hi - self.q_offset].to(self.dtype)
        return x.relu() if self.relu else x

    def _masked(self, x: Tensor, lo: int, hi: int) -> Tensor:
        x = x[:, :, lo:hi].to(self.dtype)
        if self.key_mask is not None:  # a selection, not a product: NaN in a masked key must not survive
            x = x.masked_fill(~self.key_mask[:, None, lo:hi, None], 0)
        return x.repeat_interleave(self.H // self.Hk, 1) if self.H != self.Hk else x

    def key(self, lo: int, hi: int) -> Tensor:
        y = self._masked(self.k, lo, hi)
        return y.relu() if self.relu else y

    def value(self, lo: int, hi: int) -> Tensor:
        return torch.nn.functional.pad(self._masked(self.v, lo, hi), (0, 1), value=1.0)

    def turn(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the angle at each position, (1 or H, hi - lo, 1); the angle in float64, since positions can be large."""
        angle = self.theta[:, None] * torch.arange(self.position + lo, self.position + hi)
        return tuple(t.unsqueeze(-1).to(self.q.device, self.dtype) for t in (angle.cos(), angle.sin()))

    def phi(self, x: Tensor, lo: int, hi: int) -> Tensor:
        if self.theta is None:
            return x
        cos, sin = self.turn(lo, hi)
        return torch.cat([x * cos, x * sin], -1)

    def dphi(self, dx: Tensor, lo: int, hi: int) -> Tensor:
        """The gradient of x from that of phi(x)."""
        if self.theta is None:
            return dx
        cos, sin = self.turn(lo, hi)
        return dx[..., : self.D] * cos + dx[..., self.D :] * sin

    def sums(self, lo: int, hi: int) -> Tensor:
        """The running sum of the rates inside a span, (B or 1, H, hi - lo), in float64: strong and weak rates may mix."""
        if self.decay.ndim == 1:
            return self.decay.double()[None, :, None] * torch.arange(1, hi - lo + 1, device=self.q.device)
        return self.decay[:, :, lo:hi].double().cumsum(-1)

    def reach(
        self, x: Tensor, lo: int, hi: int, *, leftward: bool = False, until: int | None = None
    ) -> Tensor:
        """x weighted by what decay leaves between each position of [lo, hi) and the state entering the span [lo, until or hi).

        Going right the state enters at lo and position i is reached by exp(-g_i); going left it enters at the end, exp(-(G - g_i)).
        """
        if self.decay is None:
            return x
        g = self.sums(lo, until or hi)
        weight = torch.exp(g - g[..., -1:] if leftward else -g)[..., : hi - lo]
        return x * weight.to(self.dtype).unsqueeze(-1)

    def fade(self, state: Tensor, lo: int, hi: int) -> Tensor:
        """The state after travelling across a span, in either direction."""
        if self.decay is None:
            return state
        return state * torch.exp(-self.sums(lo, hi)[..., -1:]).to(self.dtype).unsqueeze(-1)

    def across_gap(self, state: Tensor) -> Tensor:
        """The state after travelling across the positions between the last prefix key and the first query."""
        gap = self.q_offset - self.a  # only with one rate per head
        if self.decay is None or gap <= 0:
            return state
        return state * torch.exp(-self.decay.double() * gap).to(self.dtype)[:, None, None]

    def absorb(self, state, x, u, lo, hi, *, until=None, leftward=False) -> Tensor:
        """The state after travelling across [lo, until or hi) and taking in phi(x) u^T of [lo, hi)."""
        x = self.reach(
            x, lo, hi, leftward=not leftward, until=until
        )  # leaving a span at one end is entering it at the other
        return self.fade(state, lo, until or hi) + self.phi(x, lo, hi).mT @ u

    def table(self, lo: int, hi: int, end: int) -> Tensor:
        """cos(theta (i - j)) exp(-|A_i - A_j|), 0 where query i must not see key j: (.., hi - lo, end - lo)."""
        n, m = hi - lo, end - lo
        lag = torch.arange(n, device=self.q.device)[:, None] - torch.arange(m, device=self.q.device)
        w = (
            torch.ones(n, m, dtype=self.dtype, device=self.q.device)
            if self.theta is None
            else self.cos_lag[:, lag + CHUNK]
        )
        if self.decay is not None:
            g = self.sums(lo, hi)
            w = w * torch.exp(-(g[..., :, None] - g[..., None, :m]).abs()).to(self.dtype)
        return w.masked_fill(lag < 0, 0) if self.causal else w

    # The backward's half: what is read in a sweep is added to the gradients.

    def start_backward(self, dout: Tensor, out: Tensor, norm: Tensor, eps: float, signed: bool) -> None:
        self.dout, self.out, self.norm, self.eps, self.signed = dout, out, norm, eps, signed
        zeros = self.q.new_zeros
        self.dq = zeros(self.B, self.L, self.H, self.D, dtype=self.dtype).transpose(1, 2)
        self.dk = zeros(self.B, self.S, self.Hk, self.D, dtype=self.dtype).transpose(1, 2)
        self.dv = zeros(self.B, self.S, self.Hk, self.E, dtype=self.dtype).transpose(1, 2)
        if self.decay is not None:
            self.dA_query = zeros(self.B, self.H, self.L, dtype=torch.float64)
            self.dA_key = zeros(self.B, self.H, self.S, dtype=torch.float64)

    def m(self, lo: int, hi: int) -> Tensor:
        """The gradient of [n_i, z_i]; a clamped normaliser passes none on."""
        i = slice(lo - self.q_offset, hi - self.q_offset)
        dout, z = self.dout[:, :, i].to(self.dtype), self.norm[:, :, i, None]
        dn = dout / _clamp(z, self.eps, self.signed)
        dz = -(dn * self.out[:, :, i].to(self.dtype)).sum(-1, keepdim=True)
        return torch.cat([dn, dz.masked_fill((z.abs() if self.signed else z) < self.eps, 0)], -1)

    def query_reads(self, state: Tensor, lo: int, hi: int, *, leftward: bool = False) -> None:
        x, m = self.query(lo, hi), self.m(lo, hi)
        dx = self.dphi(self.reach(m, lo, hi, leftward=leftward) @ state.mT, lo, hi)
        self._add_dq(dx, x, lo, hi, self._toward(leftward, x, dx))

    def key_reads(
        self, mirror: Tensor, lo: int, hi: int, *, until: int | None = None, leftward: bool = False
    ) -> None:
        y, u = self.key(lo, hi), self.value(lo, hi)
        dy = self.dphi(self.reach(u, lo, hi, leftward=leftward, until=until) @ mirror.mT, lo, hi)
        dv = self.phi(self.reach(y, lo, hi, leftward=leftward, until=until), lo, hi) @ mirror[..., :-1]
        self._add_dkv(dy, dv, y, lo, hi, self._toward(leftward, y, dy))

    def _toward(self, leftward: bool, x: Tensor, dx: Tensor) -> Tensor | None:
        """The part of dA that a reader owes to a state coming from one side."""
        return None if self.decay is None else (x * dx).sum(-1) * (1 if leftward else -1)

    def inside_chunk(self, lo: int, hi: int, end: int) -> None:
        x, m, y, u, w = (
            self.query(lo, hi),
            self.m(lo, hi),
            self.key(lo, end),
            self.value(lo, end),
            self.table(lo, hi, end),
        )
        s, ds = (x @ y.mT) * w, (m @ u.mT) * w
        rows = columns = None
        if self.decay is not None:
            lag = torch.arange(hi - lo, device=w.device)[:, None] - torch.arange(end - lo, device=w.device)
            P = (x @ y.mT) * ds * lag.sign()
            rows, columns = -P.sum(-1), P.sum(-2)
        self._add_dq(ds @ y, x, lo, hi, rows)
        self._add_dkv(ds.mT @ x, s.mT @ m[..., :-1], y, lo, end, columns)

    def _add_dq(self, dx: Tensor, x: Tensor, lo: int, hi: int, dA: Tensor | None) -> None:
        i = slice(lo - self.q_offset, hi - self.q_offset)
        self.dq[:, :, i] += dx.masked_fill(x <= 0, 0) if self.relu else dx
        if dA is not None:
            self.dA_query[:, :, i] += dA

    def _add_dkv(self, dy: Tensor, dv: Tensor, y: Tensor, lo: int, hi: int, dA: Tensor | None) -> None:
        dy = dy.masked_fill(y <= 0, 0) if self.relu else dy
        if self.key_mask is not None:
            masked = ~self.key_mask[:, None, lo:hi, None]
            dy, dv = dy.masked_fill(masked, 0), dv.masked_fill(masked, 0)
        groups = (self.Hk, self.H // self.Hk)
        self.dk[:, :, lo:hi] += dy.unflatten(1, groups).sum(2) if self.H != self.Hk else dy
        self.dv[:, :, lo:hi] += dv.unflatten(1, groups).sum(2) if self.H != self.Hk else dv
        if dA is not None:
            self.dA_key[:, :, lo:hi] += dA

    def rate_gradient(self) -> Tensor:
        """From dA to the rates, in float64: A_i is the sum of the rates up to i, or the rate times the position."""
        if self.decay.ndim == 3:
            return (self.dA_query + self.dA_key).flip(-1).cumsum(-1).flip(-1).to(self.decay.dtype)
        at = torch.arange(1, max(self.L, self.S) + 1, device=self.q.device, dtype=torch.float64)
        query, key = self.dA_query * (at[: self.L] + self.q_offset), self.dA_key * at[: self.S]
        return (query.sum((0, 2)) + key.sum((0, 2))).to(self.decay.dtype)


def _clamp(z: Tensor, eps: float, signed: bool) -> Tensor:
    """The normaliser held away from zero; signed, on its own side of zero."""
    return torch.where(z < 0, -1.0, 1.0).to(z) * z.abs().clamp_min(eps) if signed else z.clamp_min(eps)


# Packed sequences: those of like length (within a factor of two) run together as one padded batch, so the work and memory
# are at most twice the tokens', and a thousand short sequences are a few calls, not a thousand.


def _buckets(cu_seqlens: Tensor, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (index, valid), both (n, longest): each row names one sequence's tokens, padded with its first."""
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    power = torch.tensor(
        [max(int(n) - 1, 0).bit_length() if n else -1 for n in lengths.tolist()], dtype=torch.long
    )
    for p in sorted(set(power.tolist()) - {-1}):
        chosen = power == p
        at = torch.arange(int(lengths[chosen].max()))
        valid = at < lengths[chosen, None]
        yield (starts[chosen, None] + at * valid).to(device), valid.to(device)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """(1, H, total, ...) -> (n, H, longest, ...)."""
    return x[0][:, index].transpose(0, 1)


def _packed_forward(q, k, v, theta, decay, key_mask, cu_seqlens, **options):
    out = q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    norm = q.new_zeros(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    for index, valid in _buckets(cu_seqlens, q.device):
        q_, k_, v_, rates, mask = _bucket(q, k, v, decay, key_mask, index, valid)
        o, z, _ = forward(
            q_, k_, v_, theta, rates, mask, None, None, q_offset=0, position=0, keep_state=False, **options
        )
        out[0][:, index[valid]] = o.transpose(0, 1)[:, valid]
        norm[0][:, index[valid]] = z.transpose(0, 1)[:, valid]
    return out, norm, norm.new_empty(0)


def _packed_backward(dout, q, k, v, out, norm, theta, decay, key_mask, cu_seqlens, **options):
    dq, dk, dv = (
        torch.zeros_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        for x in (q, k, v)
    )
    ddecay = None if decay is None else torch.zeros_like(decay, memory_format=torch.contiguous_format)
    for index, valid in _buckets(cu_seqlens, q.device):
        q_, k_, v_, rates, mask = _bucket(q, k, v, decay, key_mask, index, valid)
        do = _gather(dout, index).masked_fill(~valid[:, None, :, None], 0)  # a padded query has no say
        saved = (_gather(out, index), _gather(norm, index), None, None)
        *grads, drate, _ = backward(
            do, None, q_, k_, v_, *saved, theta, rates, mask, None, q_offset=0, position=0, **options
        )
        for total, part in zip((dq, dk, dv), grads, strict=True):
            total[0][:, index[valid]] = part.transpose(0, 1)[:, valid]
        if drate is None or ddecay is None:
            continue
        if ddecay.ndim == 3:
            ddecay[0][:, index[valid]] = drate.transpose(0, 1)[:, valid]
        else:
            ddecay += drate
    return dq, dk, dv, ddecay


def _bucket(q, k, v, decay, key_mask, index, valid):
    mask = valid if key_mask is None else valid & key_mask[0][index]
    rates = (
        _gather(decay, index).masked_fill(~valid[:, None], 0)
        if decay is not None and decay.ndim == 3
        else decay
    )
    return _gather(q, index), _gather(k, index), _gather(v, index), rates, mask
