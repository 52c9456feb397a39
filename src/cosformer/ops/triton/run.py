"""From a call to launches of kernels.

A bidirectional call without decay gathers one state and reads it: two launches. Any other walks: a state
is carried along the axis of positions, and what enters each chunk is kept in scratch memory for the readers,
who take all chunks at once. The backward does so for the queries, then for the keys. Nothing waits for the
device.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Call, Grads, Inputs, Outputs, Upstream, dense, theta
from . import kernels
from .blocks import INTERPRETED as BLOCKS
from .blocks import Blocks, Tiles, blocks, fitted
from .tiles import Axis, Options, Place, Side, States, Weights, odd

INTERPRETED = triton.knobs.runtime.interpret  # on the CPU: slow, exact, for tests
PROGRAMS = 512  # keep a device busy: a sum over all tokens is cut into stretches until there are as many


def forward(x: Inputs, call: Call) -> Outputs:
    run, y = _Run(x, call), Outputs.empty(x, call)
    states = run.entering(run.keys, x.state, y.after)
    run.read(y.out, run.queries, run.keys, states, norm=y.norm)
    return y


def backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> Grads:
    run, grads = _Run(x, call), Grads.empty(x)
    q, k = run.weighed(upstream.dout, y), run.keys
    known = None if run.walks else y.after  # the forward's one state
    states = run.entering(k, x.state) if known is None else _Entering(_states(known))
    dA_query = run.grad(grads.q, q, k, states)
    del states  # its memory serves again
    mirrors = run.entering(q, upstream.dafter, grads.state)
    dA_key = run.grad(grads.k, k, q, mirrors)
    run.read(grads.v, k, q, mirrors)
    if dA_query is None or dA_key is None:
        return grads
    if upstream.dafter is not None and x.k.shape[2]:  # the state handed out is faded, too
        assert y.after is not None
        dA_key[:, :, -1] -= (upstream.dafter * y.after).sum((-2, -1))
    return grads._replace(decay=run.rate_gradient(dA_query, dA_key))


class _Party(NamedTuple):
    """The queries or the keys of a call."""

    side: Side
    place: Place
    heads: int
    group: int  # query heads that share one of them
    sees: str  # what is before it, after it, or both


class _Entering(NamedTuple):
    """The states that enter chunks, or rows, from the left and from the right; None where nothing does."""

    before: States | None = None
    after: States | None = None


class _Run:
    """One call as the kernels see it: two parties on an axis."""

    def __init__(self, x: Inputs, call: Call):
        self.x, self.call, self.device = x, call, x.q.device
        (self.B, self.H, L, D), (_, Hk, S, E) = x.q.shape, x.v.shape
        self.two_sided = call.two_sided(x)
        self.walks = call.causal or self.two_sided
        arithmetic = _arithmetic(x.q.dtype, self.device)
        self.blocks = _blocks(D, E, 2 if arithmetic[1] is tl.bfloat16 else 4, self.device)
        C = self.blocks.chunk
        self.packed = None if x.cu_seqlens is None else _packed(tuple(x.cu_seqlens.tolist()), C, self.device)

        rated = None if x.decay is None else ("head", "position")[x.decay.ndim == 3]
        self.options = Options(D, E, C, call.relu, call.cosine, rated, call.signed, *arithmetic)
        angles = theta(call.horizons * (self.H // len(call.horizons)), self.device) if call.cosine else None
        self.weights = Weights(angles)
        if x.decay is not None:
            decay = dense(x.decay)
            strides = decay.stride() if decay.ndim == 3 else (0, decay.stride(0), 0)
            self.weights = Weights(angles, decay, *map(odd, strides))

        # On a walk both stand on one axis; queries far behind all keys move up to the next chunk there.
        start = min(call.q_offset, _up(S, C) * C) if self.walks else 0
        self.length = max(start + L, S)
        query = Side(*_strided(x.q), *_strided(None), None, None)
        key = Side(*_strided(x.k), *_strided(x.v), None, None)
        if x.key_mask is not None:
            b, t = map(odd, x.key_mask.stride())
            key = key._replace(keep=x.key_mask, keep_b=b, keep_t=t)
        sees = ("before", "after") if call.causal else ("both", "both")
        self.queries = _Party(query, Place(L, start, call.q_offset - start), self.H, 1, sees[0])
        self.keys = _Party(key, Place(S, 0, 0), Hk, self.H // Hk, sees[1])

    def axis(self, own: _Party, other: _Party | None = None) -> Axis:
        """The axis along which a party gathers or reads."""
        length = self.length if self.walks else own.place.length
        rows, table = (self.B, None) if self.packed is None else (self.packed.rows, self.packed.table)
        chunks, places = _up(length, self.options.C), (own.place, (other or own).place)
        return Axis(self.H, rows, length, chunks, chunks, self.call.position, *places, table)

    def chunks(self, axis: Axis) -> int:
        """Of all rows."""
        return axis.rows * axis.chunks if self.packed is None else self.packed.chunks

    def weighed(self, dout: Tensor, y: Outputs) -> _Party:
        """The queries with what the backward takes for their values."""
        norm, length = y.norm.contiguous(), y.norm.shape[2]  # vmap may have expanded it
        scale, unit = torch.empty_like(norm), torch.empty_like(norm)
        grid = (self.B * self.H * _up(length, self.options.C),)
        tensors = scale, unit, norm, self.call.eps, *_strided(y.out), *_strided(dout)
        self.launch(kernels.weigh, grid, self.blocks.read, *tensors, length, self.H)
        side = Side(*_strided(self.x.q), *_strided(dout), scale, unit)
        return self.queries._replace(side=side)

    # What enters chunks

    def entering(self, party: _Party, first: Tensor | None, last: Tensor | None = None) -> _Entering:
        """The states of one party as the other reads them; `last` receives the one after all tokens."""
        if not self.walks:
            return _Entering(_states(self.total(party, first, last)))
        if self.two_sided:
            return _Entering(self.walk(party), self.walk(party, leftward=True))
        if party.sees == "after":
            return _Entering(before=self.walk(party, first, last))
        return _Entering(after=self.walk(party, first, last, leftward=True))

    def total(self, party: _Party, first: Tensor | None, last: Tensor | None) -> Tensor:
        """The one state (rows, H, F, E + 1) of all tokens."""
        axis, (_, *shape) = self.axis(party), self.call.state_shape(self.x.q, self.x.v)
        if last is None:
            last = self.sums(axis.rows, *shape)
        programs, stretches = math.prod(self.gather_grid(axis)), 1
        if self.packed is None and first is None and programs:
            stretches = max(1, min(PROGRAMS // programs, axis.chunks // 8))
        axis = axis._replace(stretch=_up(axis.chunks, stretches))
        parts = last if stretches == 1 else self.sums(stretches * axis.rows, *shape)
        self.gather(party, axis, first, None, parts, stretches)
        if stretches > 1:
            torch.sum(parts.unflatten(0, (stretches, axis.rows)), 0, out=last)
        return last

    def walk(
        self, party: _Party, first: Tensor | None = None, last: Tensor | None = None, leftward: bool = False
    ) -> States | None:
        """The states that enter chunks, (chunks, H, F, E). What enters the only one of a row is `first`."""
        axis, (_, H, F, columns) = self.axis(party), self.call.state_shape(self.x.q, self.x.v)
        each, chunks = None, self.chunks(axis)
        if (axis.chunks if self.packed is None else self.packed.most) > 1:
            matrix, norm = self.sums(chunks, H, F, columns - 1), self.sums(chunks, H, F)
            each = States(*_strided(matrix), *_strided(norm))
        if each is not None or last is not None:
            self.gather(party, axis, first, each, last, leftward=leftward)
        return each if each is not None or first is None else _states(first)

    def sums(self, *shape: int) -> Tensor:
        return self.x.q.new_empty(shape, dtype=torch.float32)

    # Launches

    def gather_grid(self, axis: Axis, stretches: int = 1) -> tuple[int, int, int]:
        tiles, size = self.blocks.gather, self.options
        return stretches * axis.rows * self.H, _up(size.D, tiles.key), _up(size.E, tiles.value)

    def gather(
        self,
        party: _Party,
        axis: Axis,
        first: Tensor | None,
        each: States | None,
        last: Tensor | None,
        stretches: int = 1,
        leftward: bool = False,
    ) -> None:
        start, end = (None if t is None else _states(t) for t in (first, last))
        grid = self.gather_grid(axis, stretches)
        tensors = party.side, odd(axis), self.weights, start, each, end
        tiles, steps = self.blocks.gather, self.blocks.steps
        changes = {
            "group": party.group,
            "leftward": leftward,
            "steps": steps,
            "C": self.blocks.chunk // steps,
        }
        self.launch(kernels.gather, grid, tiles, *tensors, **changes)

    def read(
        self, out: Tensor, own: _Party, other: _Party, states: _Entering, norm: Tensor | None = None
    ) -> None:
        """What a party reads of the other's values; with a norm, divided by it."""
        tiles, axis = self.blocks.read, self.axis(own, other)
        grid = self.chunks(axis), _up(self.options.E, tiles.value), own.heads
        tensors = *_strided(out), norm, self.call.eps, own.side, other.side, odd(axis), self.weights, *states
        self.launch(kernels.read, grid, tiles, *tensors, **self.sight(own, other))

    def grad(self, out: Tensor, own: _Party, other: _Party, states: _Entering) -> Tensor | None:
        """The gradient of a party's features; with decay, that of its A is returned: (B, H, length)."""
        tiles, axis, dA = self.blocks.grad, self.axis(own, other), None
        columns = _up(self.options.D, tiles.key)
        if self.options.decay is not None:
            dA = self.sums(self.B, self.H, own.place.length, columns)
        grid = self.chunks(axis), columns, own.heads
        tensors = *_strided(out), dA, own.side, other.side, odd(axis), self.weights, *states
        self.launch(kernels.grad, grid, tiles, *tensors, **self.sight(own, other))
        return None if dA is None else dA.sum(-1, dtype=torch.float64)

    def sight(self, own: _Party, other: _Party) -> dict[str, Any]:
        return {"group": own.group, "shared": other.group, "pairs": self.walks, "sees": own.sees}

    def launch(self, kernel: Any, grid: tuple[int, ...], tiles: Tiles, *tensors: Any, **changes: Any) -> None:
        if 0 in grid:
            return
        options = replace(self.options, BK=tiles.key, BV=tiles.value, **changes)
        with _on(self.device):
            _launch(kernel, grid, *tensors, options, **tiles.launched)

    # From A to the rates

    def rate_gradient(self, query: Tensor, key: Tensor) -> Tensor:
        """A is the running sum of the rates, or the rate times the position."""
        assert self.x.decay is not None
        if self.x.decay.ndim == 3:
            total = (query + key).flip(-1).cumsum(-1).flip(-1)
            if self.packed is not None:  # without the sequences behind
                total = total - torch.nn.functional.pad(total, (0, 1))[..., self.packed.end]
            return total.to(self.x.decay.dtype)
        at = torch.arange(1, max(query.shape[2], key.shape[2]) + 1, device=self.device)
        if self.packed is not None:
            at = at - self.packed.begin
        query, key = query * (at[: query.shape[2]] + self.call.q_offset), key * at[: key.shape[2]]
        return (query.sum((0, 2)) + key.sum((0, 2))).to(self.x.decay.dtype)


class _Packed(NamedTuple):
    """Packed sequences, each a row, and their chunks."""

    rows: int
    chunks: int  # of all rows
    most: int  # of one row
    table: Tensor  # the boundaries, the first chunk of each row, the row of each chunk
    begin: Tensor  # of the sequence of each token
    end: Tensor


@lru_cache(maxsize=8)  # for all layers of a model: to another device this is a transfer
def _packed(boundaries: tuple[int, ...], chunk: int, device: torch.device) -> _Packed:
    cu = torch.tensor(boundaries, device="cpu")
    lengths, rows = cu.diff(), len(boundaries) - 1
    counts = (lengths + chunk - 1) // chunk
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    table = torch.cat([cu, first, torch.arange(rows, device="cpu").repeat_interleave(counts)])
    ends = (edge.repeat_interleave(lengths) for edge in (cu[:-1], cu[1:]))
    tensors = (t.to(device, non_blocking=True) for t in (table, *ends))
    return _Packed(rows, int(first[-1]), int(counts.max()), *tensors)


def _arithmetic(dtype: torch.dtype, device: torch.device) -> tuple[Any, Any, str]:
    """How matrix products round: see Options.

    float16 has no room for sums over tokens; TF32 has that room, and as many digits.
    """
    if dtype == torch.bfloat16:
        return tl.bfloat16, tl.float32 if INTERPRETED else tl.bfloat16, "ieee"
    fast = dtype == torch.float16 or torch.backends.cuda.matmul.fp32_precision == "tf32"
    return tl.float32, tl.float32, "tf32" if fast and _has_tf32(device) else "ieee"


@cache
def _has_tf32(device: torch.device) -> bool:
    """Of AMD's devices the MI300 family has it."""
    return not torch.version.hip or "gfx942" in torch.cuda.get_device_properties(device).gcnArchName


def _blocks(D: int, E: int, bytes_: int, device: torch.device) -> Blocks:
    if INTERPRETED:
        return fitted(BLOCKS, D, E)
    return blocks(D, E, bytes_, *_described(device))


@cache
def _described(device: torch.device) -> tuple[str, int]:
    """A device's name, and the bytes of shared memory that one program may use."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return torch.cuda.get_device_name(device), properties["max_shared_mem"]


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    kernel[grid](*arguments, **options)


def _on(device: torch.device) -> AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _strided(t: Tensor | None) -> tuple[Any, tuple[int, ...]]:
    if t is None:
        return None, ()
    t = dense(t)
    return t, t.stride()


def _states(t: Tensor) -> States:
    """(n, H, F, E + 1) as kernels take it."""
    return States(*_strided(t[..., :-1]), *_strided(t[..., -1]))


def _up(n: int, by: int) -> int:
    """n / by, rounded up."""
    return -(-n // by)
