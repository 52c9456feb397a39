"""The kernels of the triton backend: three do all the work, each in two roles.

A call has two sides, queries and keys. Each has features f (q or k) and values u: for keys v and, in the
backward, for queries the gradient m of their sums. So the backward reads states just as the forward does
(derived in _torch.py):

    gather   state = sum_t phi(f_t) u_t^T                    over keys; over queries, the backward's mirror
    read     phi(f_i) state + sum_j w_ij (f_i . f_j) u_j     read by queries: out; by keys: dv
    grad     dphi(state u_i) + sum_j w_ij (u_i . u_j) f_j    read by queries: dq; by keys: dk

    w_ij = cos(theta (p_i - p_j)) exp(-|A_i - A_j|)

Both sides share one axis of positions, cut into chunks of C. `gather` walks along it and stores the state
that enters each chunk; `read` and `grad` take all chunks in parallel: the state stands for tokens outside the
chunk, the sums over j are within it. A bidirectional call without decay needs no walk: one state holds the
whole other side.

The normaliser is the state of the value 1, kept as a vector beside the matrix. A token's `unit` is what it
adds there: 1 for a key, dz for a query. Sums are float32; angles and running sums of rates are
float64 until their differences are taken; no exponent is positive. A tile has BK of the D columns of f and
BV of the E columns of u; BK and BV are powers of two, D and E need not be. No addition is atomic.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import (
    Tokens,
    chunk_at,
    cos_sin,
    decayed,
    features,
    inside,
    load_matrix,
    load_norm,
    pair_weights,
    plain,
    plain_weights,
    product,
    rate_sums,
    rounded,
    row_at,
    store_state,
    tile_at,
    tokens_at,
    units,
    values,
)


@triton.jit
def _taken(S, z, f, u, unit, opt: tl.constexpr):
    """A state and its normaliser after a chunk's tokens are added."""
    return product(tl.trans(f), u, S, opt), z + tl.sum(rounded(f, opt).to(tl.float32) * unit[:, None], 0)


@triton.jit
def gather(side, axis, weights, first, each, last, opt: tl.constexpr):
    """Store the state that enters `each` chunk, from `first` on, and the `last`; all three may be None.

    It walks in steps shorter than a chunk: fewer tokens at a time need fewer registers. Grid: heads, rows and
    stretches; tiles of D; tiles of E.
    """
    axis, weights = plain(axis), plain_weights(weights)
    index, h = tl.program_id(0) // axis.heads, (tl.program_id(0) % axis.heads).to(tl.int64)
    r, begin = index % axis.rows, index // axis.rows * axis.stretch
    _, _, _, chunk, chunks = row_at(axis, r)
    end = tl.minimum(begin + axis.stretch, chunks)
    d = tl.program_id(1) * opt.BK + tl.arange(0, opt.BK)
    e = tl.program_id(2) * opt.BV + tl.arange(0, opt.BV)
    S, z = tl.zeros((opt.BK, opt.BV), tl.float32), tl.zeros((opt.BK,), tl.float32)
    S_sin, z_sin = S, z
    if first is not None:
        S, z = load_matrix(first, r, h, d, e, 0, opt), load_norm(first, r, h, d, 0, opt)
        if opt.cosine:
            S_sin, z_sin = load_matrix(first, r, h, d, e, 1, opt), load_norm(first, r, h, d, 1, opt)

    for n in range((end - begin) * opt.steps):
        step = begin * opt.steps + n
        if opt.leftward:
            step = end * opt.steps - 1 - n
        lo = (axis.skip * opt.steps + step) * opt.C
        if each is not None and n % opt.steps == 0:
            store_state(each, chunk + step // opt.steps, h, d, e, 0, S, z, opt)
            if opt.cosine:
                store_state(each, chunk + step // opt.steps, h, d, e, 1, S_sin, z_sin, opt)
        at = tokens_at(side, axis.own, axis, r, lo, opt)
        f, u = features(side, at, h // opt.group, d, opt), values(side, at, h // opt.group, e, opt)
        unit = units(side, at, h)
        if opt.decay is not None:
            g, G = rate_sums(weights, axis, r, h, lo, opt)
            faded = tl.exp(-G.to(tl.float32))
            S, z = S * faded, z * faded
            if opt.cosine:
                S_sin, z_sin = S_sin * faded, z_sin * faded
            distance = G - g
            if opt.leftward:
                distance = g
            f *= decayed(weights, axis.own, h, distance, opt)[:, None]
        if opt.cosine:
            cos, sin = cos_sin(weights, h, axis.position + axis.own.shift + lo + tl.arange(0, opt.C))
            S_sin, z_sin = _taken(S_sin, z_sin, f * sin[:, None], u, unit, opt)
            f *= cos[:, None]
        S, z = _taken(S, z, f, u, unit, opt)

    if last is not None:
        store_state(last, index, h, d, e, 0, S, z, opt)
        if opt.cosine:
            store_state(last, index, h, d, e, 1, S_sin, z_sin, opt)


class Reading(NamedTuple):
    """Decay and rotation of a reader's tokens relative to a state."""

    g: Any  # the running sum of rates
    left: Any  # decay from the chunk's left end ...
    right: Any  # ... and from its right end
    cos: Any
    sin: Any


@triton.jit
def _reading(weights, axis, r, h, lo, opt: tl.constexpr):
    one = tl.full((opt.C,), 1.0, tl.float32)
    g, left, right, cos, sin = one, one, one, one, one
    if opt.decay is not None:
        g, G = rate_sums(weights, axis, r, h, lo, opt)
        left, right = decayed(weights, axis.own, h, g, opt), decayed(weights, axis.own, h, G - g, opt)
    if opt.cosine:
        cos, sin = cos_sin(weights, h, axis.position + axis.own.shift + lo + tl.arange(0, opt.C))
    return Reading(g, left, right, cos, sin)


@triton.jit
def _read_half(total, z, f, states, n, h, d, e, sine: tl.constexpr, opt: tl.constexpr):
    S, norm = load_matrix(states, n, h, d, e, sine, opt), load_norm(states, n, h, d, sine, opt)
    return product(f, S, total, opt), z + tl.sum(rounded(f, opt).to(tl.float32) * norm[None, :], 1)


@triton.jit
def _read_state(total, z, side, at, head, faded, here, states, n, h, e, opt: tl.constexpr):
    """phi(f) state, (C, BV), and its normaliser, (C,), added to the sums."""
    for start in range(0, opt.D, opt.BK):
        d = start + tl.arange(0, opt.BK)
        f = features(side, at, head, d, opt) * faded[:, None]
        if opt.cosine:
            total, z = _read_half(total, z, f * here.sin[:, None], states, n, h, d, e, 1, opt)
            f *= here.cos[:, None]
        total, z = _read_half(total, z, f, states, n, h, d, e, 0, opt)
    return total, z


@triton.jit
def _clamped(z, eps, opt: tl.constexpr):
    """The normaliser held away from zero; if signed, it keeps its sign. NaN stays."""
    if opt.signed:
        return tl.where(tl.abs(z) < eps, tl.where(z < 0, -eps, eps), z)
    else:
        return tl.where(z < eps, eps, z)


@triton.jit
def read(out, strides, norm, eps, reader, source, axis, weights, before, after, opt: tl.constexpr):
    """Sums over the values a reader sees; with `norm`, divided by the sums over units, stored there.

    Grid: chunks, tiles of E, heads of the reader.
    """
    axis, weights = plain(axis), plain_weights(weights)
    r, c = chunk_at(axis, tl.program_id(0))
    i, lo, head = tl.arange(0, opt.C), c * opt.C, tl.program_id(2).to(tl.int64)
    e = tl.program_id(1) * opt.BV + tl.arange(0, opt.BV)
    at = tokens_at(reader, axis.own, axis, r, lo, opt)
    n = r
    if opt.pairs:
        n = tl.program_id(0)
    total, z = tl.zeros((opt.C, opt.BV), tl.float32), tl.zeros((opt.C,), tl.float32)

    for h in range(head * opt.group, (head + 1) * opt.group):
        here = _reading(weights, axis, r, h, lo, opt)
        if opt.pairs:
            near = tokens_at(source, axis.other, axis, r, lo, opt)
            w = tl.zeros((opt.C, opt.C), tl.float32)
            for start in range(0, opt.D, opt.BK):
                d = start + tl.arange(0, opt.BK)
                f = features(source, near, h // opt.shared, d, opt)
                w = product(features(reader, at, head, d, opt), tl.trans(f), w, opt)
            w *= pair_weights(weights, h, here.g, opt)
            if opt.sees == "before":
                w = tl.where(i[:, None] >= i[None, :], w, 0.0)
            if opt.sees == "after":
                w = tl.where(i[:, None] <= i[None, :], w, 0.0)
            total = product(w, values(source, near, h // opt.shared, e, opt), total, opt)
            z += tl.sum(rounded(w, opt).to(tl.float32) * units(source, near, h)[None, :], 1)
        if before is not None:
            total, z = _read_state(total, z, reader, at, head, here.left, here, before, n, h, e, opt)
        if after is not None:
            total, z = _read_state(total, z, reader, at, head, here.right, here, after, n, h, e, opt)

    if norm is not None:
        if tl.program_id(1) == 0:
            tl.store(norm + at.flat + head * at.length, z, mask=at.exist)
        total /= _clamped(z, eps, opt)[:, None]
    tl.store(tile_at(out, strides, at, head, e), total, mask=inside(at.exist, e, opt.E, opt.BV))


@triton.jit
def _grad_state(side, at, head, here, states, n, h, d, opt: tl.constexpr):
    """dphi(state u): (C, BK)."""
    df, unit = tl.zeros((opt.C, opt.BK), tl.float32), units(side, at, h)
    df_sin = df
    for start in range(0, opt.E, opt.BV):
        e = start + tl.arange(0, opt.BV)
        u = values(side, at, head, e, opt)
        df = product(u, tl.trans(load_matrix(states, n, h, d, e, 0, opt)), df, opt)
        if opt.cosine:
            df_sin = product(u, tl.trans(load_matrix(states, n, h, d, e, 1, opt)), df_sin, opt)
    df += unit[:, None] * load_norm(states, n, h, d, 0, opt)[None, :]
    if opt.cosine:
        df_sin += unit[:, None] * load_norm(states, n, h, d, 1, opt)[None, :]
        df = df * here.cos[:, None] + df_sin * here.sin[:, None]
    return df


@triton.jit
def grad(out, strides, dA, reader, source, axis, weights, before, after, opt: tl.constexpr):
    """The gradient of a reader's f; with decay also of its A, as partial sums (B, H, length, tiles of D).

    Tokens before a token lower its dA, those after raise it. Its own position does neither and is kept out of
    that sum: subtracted later, it would leave its rounding errors, and under strong decay nothing else.
    Grid: chunks, tiles of D, heads of the reader.
    """
    axis, weights = plain(axis), plain_weights(weights)
    r, c = chunk_at(axis, tl.program_id(0))
    i, lo, head = tl.arange(0, opt.C), c * opt.C, tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * opt.BK + tl.arange(0, opt.BK)
    at = tokens_at(reader, axis.own, axis, r, lo, opt)
    n = r
    if opt.pairs:
        n = tl.program_id(0)
    f, total = features(reader, at, head, d, opt), tl.zeros((opt.C, opt.BK), tl.float32)

    for h in range(head * opt.group, (head + 1) * opt.group):
        here, owed = _reading(weights, axis, r, h, lo, opt), tl.zeros((opt.C,), tl.float32)
        if opt.pairs:
            near = tokens_at(source, axis.other, axis, r, lo, opt)
            w = units(reader, at, h)[:, None] * units(source, near, h)[None, :]
            for start in range(0, opt.E, opt.BV):
                e = start + tl.arange(0, opt.BV)
                u = values(source, near, h // opt.shared, e, opt)
                w = product(values(reader, at, head, e, opt), tl.trans(u), w, opt)
            w *= pair_weights(weights, h, here.g, opt)
            f_near = features(source, near, h // opt.shared, d, opt)
            nothing = tl.zeros((opt.C, opt.BK), tl.float32)
            if opt.sees != "after":
                df = product(tl.where(i[:, None] > i[None, :], w, 0.0), f_near, nothing, opt)
                total, owed = total + df, owed - tl.sum(f * df, 1)
            if opt.sees != "before":
                df = product(tl.where(i[:, None] < i[None, :], w, 0.0), f_near, nothing, opt)
                total, owed = total + df, owed + tl.sum(f * df, 1)
            total += tl.sum(tl.where(i[:, None] == i[None, :], w, 0.0), 1)[:, None] * f_near
        if before is not None:
            df = _grad_state(reader, at, head, here, before, n, h, d, opt) * here.left[:, None]
            total, owed = total + df, owed - tl.sum(f * df, 1)
        if after is not None:
            df = _grad_state(reader, at, head, here, after, n, h, d, opt) * here.right[:, None]
            total, owed = total + df, owed + tl.sum(f * df, 1)
        if dA is not None:
            part = (at.flat + h * at.length) * tl.num_programs(1) + tl.program_id(1)
            tl.store(dA + part, owed, mask=at.exist)

    if opt.relu:
        total = tl.where(f <= 0, 0.0, total)
    tl.store(tile_at(out, strides, at, head, d), total, mask=inside(at.exist, d, opt.D, opt.BK))


@triton.jit(do_not_specialize=["length", "heads"])
def weigh(scale, unit, norm, eps, out, out_strides, dout, dout_strides, length, heads, opt: tl.constexpr):
    """The gradient m_i of each query's sums, stored as the scale of its dout and its unit.

    Grid: chunks of all rows and heads.
    """
    chunks = tl.cdiv(length, opt.C)
    row, lo = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks * opt.C
    b, h, t = row // heads, row % heads, (lo + tl.arange(0, opt.C)).to(tl.int64)
    at = Tokens(b, t, t < length, t < length, row * length + t, length)
    dz = tl.zeros((opt.C,), tl.float32)
    for start in range(0, opt.E, opt.BV):
        e = start + tl.arange(0, opt.BV)
        mask = inside(at.exist, e, opt.E, opt.BV)
        y = tl.load(tile_at(out, out_strides, at, h, e), mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(tile_at(dout, dout_strides, at, h, e), mask=mask, other=0.0).to(tl.float32)
        dz -= tl.sum(y * dy, 1)
    z = tl.load(norm + at.flat, mask=at.exist, other=1.0)
    inverse, size = 1.0 / _clamped(z, eps, opt), z
    if opt.signed:
        size = tl.abs(z)
    tl.store(scale + at.flat, inverse, mask=at.exist)
    tl.store(unit + at.flat, tl.where(size < eps, 0.0, dz * inverse), mask=at.exist)
