"""What the kernels are made of: their arguments, tiles of tokens and of states, and what weighs a token."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl


class Side(NamedTuple):
    """The tensors of the queries or of the keys; None means unscaled, units of 1, all tokens kept."""

    f: Any  # (B, heads, length, D)
    f_strides: tuple
    u: Any  # (B, heads, length, E)
    u_strides: tuple
    scale: Any  # (B, H, length) float32, contiguous: u is multiplied by it
    unit: Any  # (B, H, length) float32, contiguous
    keep: Any = None  # (B, length) bool, and its strides as `odd` has them
    keep_b: int = 0
    keep_t: int = 0


# Triton compiles a kernel anew for integers that are 1 or multiples of 16, and inside a tuple nothing turns
# that off. To avoid it for lengths and positions, they are passed as odd numbers above 1.


def odd(n: int) -> int:
    """Encode an integer so that Triton does not specialise on it."""
    return 2 * n + 3


class Place(NamedTuple):
    """Token t of a side stands at start + t on the axis; for angles and decay, `shift` further on."""

    length: int
    start: int
    shift: int


class Axis(NamedTuple):
    """How the rows of a batch, or its packed sequences, are cut into chunks."""

    heads: int  # of the queries
    rows: int
    length: int  # positions of a row
    chunks: int  # of a row, or of the part of it in this launch ...
    skip: int  # ... and before that part
    stretch: int  # chunks that one program of `gather` walks
    position: int  # of the axis' start, for the angles
    own: Place  # of the side that gathers or reads
    other: Place
    table: Any = None  # packed: the boundaries, the first chunk of each row, the row of each chunk


def travelling(axis: Axis) -> Axis:
    """The axis with its integers encoded by `odd`."""
    *numbers, own, other, table = axis
    return Axis._make([*map(odd, numbers), Place(*map(odd, own)), Place(*map(odd, other)), table])


class States(NamedTuple):
    """Matrices (n, H, F, E) and normalisers (n, H, F), one of each per chunk or per row.

    Matrices of chunks have the dtype of operands of matrix products, their only readers.
    """

    matrix: Any
    strides: tuple
    norm: Any
    norm_strides: tuple


class Weights(NamedTuple):
    """What w_ij is made of: radians per position (H,), in float64; rates and their strides."""

    theta: Any
    rates: Any = None
    b: int = 0  # over batch rows, 0 for rates per head ...
    h: int = 0  # ... over heads ...
    t: int = 0  # ... and over positions; all encoded by `odd`


@dataclass(frozen=True)
class Options:
    """What a kernel is compiled for."""

    D: int
    E: int
    C: int
    relu: bool
    cosine: bool
    decay: str | None  # "head" or "position": what has its own rate
    signed: bool
    rounded: Any  # the dtype that operands of matrix products are rounded to ...
    dot: Any  # ... the dtype in which they are multiplied ...
    precision: str  # ... and its precision, if that is float32
    BK: int = 16
    BV: int = 16
    group: int = 1  # query heads per head of the side that gathers or reads ...
    shared: int = 1  # ... and of the side that is read
    steps: int = 1  # gather: steps per chunk; C is then the tokens of a step
    leftward: bool = False  # gather: from the last chunk to the first
    pairs: bool = True  # read, grad: also pairs within the chunk
    sees: str = "both"  # read, grad: tokens "before", "after" or "both", besides its own position


class Tokens(NamedTuple):
    """The tokens of a side in a chunk."""

    b: Any  # their batch row
    t: Any  # (C,)
    exist: Any  # (C,)
    kept: Any  # (C,) those that exist and are not masked
    flat: Any  # (C,) their offsets in (B, H, length) for the first head ...
    length: Any  # ... and the stride to the next head


# Where a program is


@triton.jit
def even(n):
    """The integer that `odd` encoded."""
    return (n >> 1) - 1


@triton.jit
def plain_place(place):
    return Place(even(place.length), even(place.start), even(place.shift))


@triton.jit
def plain(axis):
    """The axis with its integers decoded."""
    a = axis
    heads, rows, length, chunks = even(a.heads), even(a.rows), even(a.length), even(a.chunks)
    skip, stretch, position = even(a.skip), even(a.stretch), even(a.position)
    own, other = plain_place(a.own), plain_place(a.other)
    return Axis(heads, rows, length, chunks, skip, stretch, position, own, other, a.table)


@triton.jit
def plain_weights(weights):
    if weights.rates is None:
        return weights
    else:
        return Weights(weights.theta, weights.rates, even(weights.b), even(weights.h), even(weights.t))


@triton.jit
def chunk_at(axis, index):
    """The index-th of all chunks: its row, and its number in the row."""
    if axis.table is None:
        return index // axis.chunks, axis.skip + index % axis.chunks
    else:
        r = tl.load(axis.table + 2 * (axis.rows + 1) + index)
        return r, index - tl.load(axis.table + axis.rows + 1 + r)


@triton.jit
def row_at(axis, r):
    """A row's batch index, first token, number of positions, first chunk among all, number of chunks."""
    if axis.table is None:
        return r.to(tl.int64), 0, axis.length, r * axis.chunks, axis.chunks
    else:
        begin, end = tl.load(axis.table + r), tl.load(axis.table + r + 1)
        first = tl.load(axis.table + axis.rows + 1 + r)
        return 0, begin, end - begin, first, tl.load(axis.table + axis.rows + 2 + r) - first


@triton.jit
def tokens_at(side, place, axis, r, lo, opt: tl.constexpr):
    """The tokens of a side that stand at positions lo, lo + 1, ... of a row."""
    b, begin, length, _, _ = row_at(axis, r)
    if axis.table is None:
        length = place.length
    t = lo + tl.arange(0, opt.C) - place.start
    exist = (t >= 0) & (t < length)
    t = (begin + t).to(tl.int64)
    kept = exist
    if side.keep is not None:
        keep = side.keep + b * even(side.keep_b) + t * even(side.keep_t)
        kept = exist & (tl.load(keep, mask=exist, other=0) != 0)
    return Tokens(b, t, exist, kept, b * axis.heads * place.length + t, place.length)


# Tiles of tokens. What is masked, or beyond D, E or the tokens, is never read and counts as 0.


@triton.jit
def tile_at(x, strides, at, h, column):
    """Pointers to columns of a tensor (B, heads, length, size): (C, columns)."""
    row = x + at.b * strides[0] + h * strides[1] + at.t * strides[2]
    return row[:, None] + column.to(tl.int64)[None, :] * strides[3]


@triton.jit
def inside(rows, column, size: tl.constexpr, block: tl.constexpr):
    """Which elements of a tile exist; if blocks fill the size exactly, columns need no check."""
    if size % block == 0:
        return rows[:, None]
    else:
        return rows[:, None] & (column < size)[None, :]


@triton.jit
def features(side, at, h, d, opt: tl.constexpr):
    """A tile of f: (C, BK)."""
    mask = inside(at.kept, d, opt.D, opt.BK)
    f = tl.load(tile_at(side.f, side.f_strides, at, h, d), mask=mask, other=0.0).to(tl.float32)
    if opt.relu:
        f = tl.where(f < 0, 0.0, f)  # NaN stays
    return f


@triton.jit
def values(side, at, h, e, opt: tl.constexpr):
    """A tile of u: (C, BV)."""
    mask = inside(at.kept, e, opt.E, opt.BV)
    u = tl.load(tile_at(side.u, side.u_strides, at, h, e), mask=mask, other=0.0).to(tl.float32)
    if side.scale is not None:
        u *= tl.load(side.scale + at.flat + h * at.length, mask=at.kept, other=0.0)[:, None]
    return u


@triton.jit
def units(side, at, h):
    """The units: (C,)."""
    if side.unit is None:
        return at.kept.to(tl.float32)
    else:
        return tl.load(side.unit + at.flat + h * at.length, mask=at.kept, other=0.0)


# Angles and decay


@triton.jit
def cos_sin(weights, h, at):
    """Cosine and sine of the angles at these positions, each within one unit of float32's last place.

    The device's own would bring their reduction of large arguments, and its registers. Here an angle is
    reduced in float64, to quarter turns and a remainder of at most half a quarter.
    """
    angle = tl.load(weights.theta + h) * at
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)  # 2 / pi
    x = (angle - quarters * 1.5707963267948966).to(tl.float32)
    y = x * x
    sin = x + x * y * (-1.6666654611e-1 + y * (8.3321608736e-3 - y * 1.9515295891e-4))
    cos = 1 - 0.5 * y + y * y * (4.166664568e-2 + y * (-1.388731625e-3 + y * 2.443315712e-5))
    turned = quarters.to(tl.int32) & 3
    c = tl.where((turned & 1) == 0, cos, sin)
    s = tl.where((turned & 1) == 0, sin, cos)
    return tl.where((turned == 1) | (turned == 2), -c, c), tl.where(turned >= 2, -s, s)


@triton.jit
def rate_sums(weights, axis, r, h, lo, opt: tl.constexpr):
    """The running sum g of the rates in a chunk, (C,), and its last value."""
    b, begin, length, _, _ = row_at(axis, r)
    i, n = tl.arange(0, opt.C), tl.maximum(tl.minimum(length - lo, opt.C), 0)
    if opt.decay == "position":
        at = weights.rates + b * weights.b + h * weights.h + (begin + lo + i).to(tl.int64) * weights.t
        rates = tl.load(at, mask=i < n, other=0.0).to(tl.float64)
        return tl.cumsum(rates, 0), tl.sum(rates, 0)
    else:
        rate = tl.load(weights.rates + h * weights.h).to(tl.float64)
        return rate * tl.minimum(i + 1, n), rate * n


@triton.jit
def decayed(weights, place, h, distance, opt: tl.constexpr):
    """Decay of a token over this distance, a sum of rates, and over its side's shift."""
    if opt.decay == "head":
        distance += tl.load(weights.rates + h * weights.h).to(tl.float64) * place.shift
    return tl.exp(-distance.to(tl.float32))


@triton.jit
def pair_weights(weights, h, g, opt: tl.constexpr):
    """w_ij in a chunk: (C, C)."""
    w = tl.full((opt.C, opt.C), 1.0, tl.float32)
    if opt.cosine:
        cos, sin = cos_sin(weights, h, tl.arange(0, opt.C))
        w = cos[:, None] * cos[None, :] + sin[:, None] * sin[None, :]
    if opt.decay is not None:  # g as the sum of two float32: exact enough, and a float64 matrix is slow
        high = g.to(tl.float32)
        low = (g - high.to(tl.float64)).to(tl.float32)
        w *= tl.exp(-tl.abs((high[:, None] - high[None, :]) + (low[:, None] - low[None, :])))
    return w


# Matrix products, and tiles of states, whose D rows of sines are below the D rows of cosines


@triton.jit
def rounded(x, opt: tl.constexpr):
    """x as an operand of a matrix product."""
    return x.to(opt.rounded).to(opt.dot)


@triton.jit
def product(a, b, total, opt: tl.constexpr):
    """total + a b."""
    return tl.dot(rounded(a, opt), rounded(b, opt), total, input_precision=opt.precision)


@triton.jit
def matrix_at(states, n, h, d, e, sine: tl.constexpr, opt: tl.constexpr):
    """Pointers to a tile of the n-th matrix: (BK, BV)."""
    s = states.strides
    row = states.matrix + n.to(tl.int64) * s[0] + h * s[1] + (sine * opt.D + d) * s[2]
    return row[:, None] + e[None, :] * s[3]


@triton.jit
def norm_at(states, n, h, d, sine: tl.constexpr, opt: tl.constexpr):
    """Pointers to the normalisers of the same rows: (BK,)."""
    s = states.norm_strides
    return states.norm + n.to(tl.int64) * s[0] + h * s[1] + (sine * opt.D + d) * s[2]


@triton.jit
def load_matrix(states, n, h, d, e, sine: tl.constexpr, opt: tl.constexpr):
    at = matrix_at(states, n, h, d, e, sine, opt)
    if opt.D % opt.BK == 0 and opt.E % opt.BV == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside(d < opt.D, e, opt.E, opt.BV), other=0.0)


@triton.jit
def load_norm(states, n, h, d, sine: tl.constexpr, opt: tl.constexpr):
    return tl.load(norm_at(states, n, h, d, sine, opt), mask=d < opt.D, other=0.0)


@triton.jit
def store_state(states, n, h, d, e, sine: tl.constexpr, S, z, opt: tl.constexpr):
    at = matrix_at(states, n, h, d, e, sine, opt)
    if opt.D % opt.BK == 0 and opt.E % opt.BV == 0:
        tl.store(at, S)
    else:
        tl.store(at, S, mask=inside(d < opt.D, e, opt.E, opt.BV))
    if tl.program_id(2) == 0:  # programs that differ in e share the normaliser
        tl.store(norm_at(states, n, h, d, sine, opt), z, mask=d < opt.D)
