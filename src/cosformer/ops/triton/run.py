"""From a call to launches of kernels.

A bidirectional call without decay gathers one state and reads it: two launches. Any other call walks:
a state is carried along the axis of positions, and the states that enter chunks are kept in scratch memory
for the readers, which take all chunks in parallel. If these would exceed SCRATCH bytes, the axis is cut into
parts (parts.py), walked and read one after another. The backward does so for the queries, then for the keys.
Nothing waits for the device.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Call, Grads, Inputs, Outputs, Upstream, dense, lasting, running_sum, theta
from . import device, kernels
from .blocks import Tiles
from .parts import Part, cut, packed
from .tiles import Axis, Options, Place, Side, States, Weights, odd, travelling

SCRATCH = 256 * 2**20  # bytes for states that enter chunks; fewer mean more launches
PROGRAMS = 512  # to keep a device busy: a sum over all tokens is cut into stretches to get as many


def forward(x: Inputs, call: Call) -> Outputs:
    run, y = _Run(x, call), Outputs.empty(x, call)
    for states in run.entering(run.keys, x.state, y.after):
        run.read(y.out, run.queries, run.keys, states, y.norm)
    return y


def backward(upstream: Upstream, x: Inputs, y: Outputs, call: Call) -> Grads:
    run, grads = _Run(x, call), Grads.empty(x)
    q, k = run.weighed(upstream.dout, y), run.keys
    dA_query, dA_key = run.owed(q), run.owed(k)
    for states in run.entering(k, x.state, known=None if run.walks else y.after):
        run.grad(grads.q, dA_query, q, k, states)
    for mirrors in run.entering(q, upstream.dafter, grads.state):
        run.grad(grads.k, dA_key, k, q, mirrors)
        run.read(grads.v, k, q, mirrors)
    if dA_query is None or dA_key is None:
        return grads
    query, key = (t.sum(-1, dtype=torch.float64) for t in (dA_query, dA_key))
    if upstream.dafter is not None and x.k.shape[2]:  # the returned state has decayed, too
        assert y.after is not None
        key[:, :, -1] -= (upstream.dafter * y.after).sum((-2, -1))
    return grads._replace(decay=run.rate_gradient(query, key))


class _Party(NamedTuple):
    """The queries or the keys of a call."""

    side: Side
    place: Place
    heads: int
    group: int  # query heads per head of this party
    sees: str  # "before", "after" or "both"


class _Entering(NamedTuple):
    """The states that enter the chunks of a part from the left and from the right, or None. Without a part:
    one state for all chunks of a row."""

    part: Part | None
    before: States | None = None
    after: States | None = None


class _Run:
    """One call as the kernels see it: two parties on an axis."""

    def __init__(self, x: Inputs, call: Call):
        self.x, self.call, self.device = x, call, x.q.device
        (self.B, self.H, L, D), (_, Hk, S, E) = x.q.shape, x.v.shape
        self.two_sided, self.state_shape = call.two_sided(x), call.state_shape(x.q, x.v)
        self.kept = torch.bfloat16 if x.q.dtype == torch.bfloat16 else torch.float32  # see tiles.States
        self.walks = call.causal or self.two_sided
        arithmetic = device.arithmetic(x.q.dtype, self.device)
        self.blocks = device.blocks(D, E, x.q.dtype, self.device)
        C = self.blocks.chunk
        _, _, F, columns = self.state_shape
        each = self.H * F * (columns - 1) * self.kept.itemsize * (2 if self.two_sided else 1)
        self.fitting = max(1, SCRATCH // max(1, each))  # chunks whose states fit in SCRATCH
        self.packed = None
        if x.cu_seqlens is not None:
            self.packed = packed(tuple(x.cu_seqlens.tolist()), C, self.fitting, self.device)

        rated = None if x.decay is None else {1: "head", 3: "position"}[x.decay.ndim]
        self.options = Options(D, E, C, call.relu, call.cosine, rated, call.signed, *arithmetic)
        angles = theta(call.horizons * (self.H // len(call.horizons)), self.device) if call.cosine else None
        lasting(self.device, angles)
        self.weights = Weights(angles)
        if x.decay is not None:
            decay = dense(x.decay)
            strides = decay.stride() if decay.ndim == 3 else (0, decay.stride(0), 0)
            self.weights = Weights(angles, decay, *map(odd, strides))

        # On a walk both share one axis; queries far after all keys move up to the chunk after these.
        start = min(call.q_offset, _up(S, C) * C) if self.walks else 0
        self.length = max(start + L, S)
        self.rooms: dict[bool, States] = {}
        query = Side(*_strided(x.q), *_strided(None), None, None)
        key = Side(*_strided(x.k), *_strided(x.v), None, None)
        if x.key_mask is not None:
            b, t = map(odd, x.key_mask.stride())
            key = key._replace(keep=x.key_mask, keep_b=b, keep_t=t)
        sees = ("before", "after") if call.causal else ("both", "both")
        self.queries = _Party(query, Place(L, start, call.q_offset - start), self.H, 1, sees[0])
        self.keys = _Party(key, Place(S, 0, 0), Hk, self.H // Hk, sees[1])

    def whole(self, party: _Party) -> Part:
        """All chunks along which a party gathers or reads."""
        chunks = _up(self.length if self.walks else party.place.length, self.options.C)
        return Part(self.B, chunks, self.B * chunks)

    def axis(self, part: Part, own: _Party, other: _Party | None = None) -> Axis:
        """A part as kernels take it."""
        length = self.length if self.walks else own.place.length
        chunks, places = (part.chunks, part.skip, part.chunks), (own.place, (other or own).place)
        return Axis(self.H, part.rows, length, *chunks, self.call.position, *places, part.table)

    def weighed(self, dout: Tensor, y: Outputs) -> _Party:
        """The queries, with m as their values for the backward."""
        norm, length = y.norm.contiguous(), y.norm.shape[2]  # vmap may have expanded it
        scale, unit = torch.empty_like(norm), torch.empty_like(norm)
        grid = (self.B * self.H * _up(length, self.options.C),)
        tensors = scale, unit, norm, self.call.eps, *_strided(y.out), *_strided(dout)
        self.launch(kernels.weigh, grid, self.blocks.read, *tensors, length, self.H)
        side = Side(*_strided(self.x.q), *_strided(dout), scale, unit)
        return self.queries._replace(side=side)

    # What enters chunks

    def entering(
        self, party: _Party, first: Tensor | None, last: Tensor | None = None, known: Tensor | None = None
    ) -> Iterator[_Entering]:
        """Part by part, the states of one party as the other reads them; `last` receives the one after all
        tokens. Without a walk there is one state per row, which may be `known` already."""
        if known is not None:
            yield _Entering(None, _states(known))
        elif self.packed is not None:  # each part on its own
            for part in self.packed.parts:
                if self.walks:
                    yield from self.walked(party, [part], first, last)
                else:
                    yield _Entering(part, _states(self.total(party, part, first, last)))
        elif self.walks:
            parts = cut(self.B, self.whole(party).chunks, self.fitting)
            yield from self.walked(party, parts, first, last)
        else:
            yield _Entering(None, _states(self.total(party, self.whole(party), first, last)))

    def walked(
        self, party: _Party, parts: list[Part], first: Tensor | None, last: Tensor | None
    ) -> Iterator[_Entering]:
        """Consecutive parts; a state is carried from each to the next."""
        rightward = party.sees == "after"
        if self.two_sided:
            right, before = self.ends(party, parts), None
            for part in parts:
                after = self.carry() if part is not parts[-1] else None
                states = self.walk(party, part, before, after)
                yield _Entering(part, states, self.walk(party, part, right.pop(), leftward=True))
                before = after
            return
        for number, part in enumerate(parts if rightward else reversed(parts)):
            after = last if number == len(parts) - 1 else self.carry()
            states = self.walk(party, part, first, after, leftward=not rightward)
            yield _Entering(part, before=states) if rightward else _Entering(part, after=states)
            first = after

    def ends(self, party: _Party, parts: list[Part]) -> list[Tensor | None]:
        """The states that enter each part from its right, the first part's last."""
        found: list[Tensor | None] = [None]
        for part in reversed(parts[1:]):
            after = self.carry()
            self.gather(party, self.axis(part, party), found[-1], None, after, leftward=True)
            found.append(after)
        return found

    def carry(self) -> Tensor:
        """Memory for one state per row."""
        return self.sums(*self.state_shape)

    def total(self, party: _Party, part: Part, first: Tensor | None, last: Tensor | None) -> Tensor:
        """The one state of each row, (rows, H, F, E + 1)."""
        axis, (_, *shape) = self.axis(part, party), self.state_shape
        if last is None:
            last = self.sums(part.rows, *shape)
        programs, stretches = math.prod(self.gather_grid(axis)), 1
        if self.packed is None and first is None and programs:
            stretches = max(1, min(PROGRAMS // programs, part.chunks // 8))
        axis = axis._replace(stretch=_up(part.chunks, stretches))
        sums = last if stretches == 1 else self.sums(stretches * part.rows, *shape)
        self.gather(party, axis, first, None, sums, stretches)
        if stretches > 1:
            torch.sum(sums.unflatten(0, (stretches, part.rows)), 0, out=last)
        return last

    def walk(
        self, party: _Party, part: Part, first: Tensor | None, last: Tensor | None = None, leftward=False
    ) -> States | None:
        """The states that enter the chunks of a part, (chunks, H, F, E); with one chunk per row, that is
        `first`."""
        each = self.room(part.all, leftward and self.two_sided) if part.chunks > 1 else None
        if each is not None or last is not None:
            self.gather(party, self.axis(part, party), first, each, last, leftward=leftward)
        return each if each is not None or first is None else _states(first)

    def room(self, chunks: int, another: bool) -> States:
        """Scratch, reused by all parts and both passes of a backward: the device runs them in order."""
        if another not in self.rooms or len(self.rooms[another].matrix) < chunks:
            self.rooms.pop(another, None)
            _, H, F, columns = self.state_shape
            matrix = self.x.q.new_empty((chunks, H, F, columns - 1), dtype=self.kept)
            self.rooms[another] = States(*_strided(matrix), *_strided(self.sums(chunks, H, F)))
        return self.rooms[another]

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
        tensors = party.side, travelling(axis), self.weights, start, each, end
        steps = self.blocks.steps
        options = {"leftward": leftward, "steps": steps, "C": self.blocks.chunk // steps}
        grid = self.gather_grid(axis, stretches)
        self.launch(kernels.gather, grid, self.blocks.gather, *tensors, group=party.group, **options)

    def read(
        self, out: Tensor, own: _Party, other: _Party, states: _Entering, norm: Tensor | None = None
    ) -> None:
        """What a party reads from the other's values; with a norm, divided by it."""
        tiles = self.blocks.read
        across = _up(self.options.E, tiles.value)
        self.look(kernels.read, tiles, across, own, other, states, *_strided(out), norm, self.call.eps)

    def owed(self, party: _Party) -> Tensor | None:
        """With decay, memory for the gradient of a party's A, in one partial sum per tile of D."""
        if self.options.decay is None:
            return None
        return self.sums(self.B, self.H, party.place.length, _up(self.options.D, self.blocks.grad.key))

    def grad(self, out: Tensor, dA: Tensor | None, own: _Party, other: _Party, states: _Entering) -> None:
        """The gradient of a party's features; with decay, also that of its A."""
        tiles = self.blocks.grad
        self.look(kernels.grad, tiles, _up(self.options.D, tiles.key), own, other, states, *_strided(out), dA)

    def look(
        self,
        kernel: Any,
        tiles: Tiles,
        across: int,
        own: _Party,
        other: _Party,
        states: _Entering,
        *results: Any,
    ) -> None:
        """One party reads the other: all chunks of a part in parallel, `across` tiles wide."""
        part, before, after = states
        part = part or self.whole(own)
        axis = travelling(self.axis(part, own, other))
        tensors = *results, own.side, other.side, axis, self.weights, before, after
        sight = {"group": own.group, "shared": other.group, "pairs": self.walks, "sees": own.sees}
        self.launch(kernel, (part.all, across, own.heads), tiles, *tensors, **sight)

    def launch(self, kernel: Any, grid: tuple[int, ...], tiles: Tiles, *tensors: Any, **changes: Any) -> None:
        if 0 in grid:
            return
        options = _options(self.options, tiles.key, tiles.value, *changes.items())
        with _on(self.device):
            _launch(kernel, grid, *tensors, options, **tiles.launched)

    # From A to the rates

    def rate_gradient(self, query: Tensor, key: Tensor) -> Tensor:
        """A is the running sum of the rates, or the rate times the position."""
        assert self.x.decay is not None
        if self.x.decay.ndim == 3:
            total = running_sum((query + key).flip(-1)).flip(-1)
            if self.packed is not None:  # without the sequences after it
                total = total - torch.nn.functional.pad(total, (0, 1))[..., self.packed.end]
            return total.to(self.x.decay.dtype)
        at = torch.arange(1, max(query.shape[2], key.shape[2]) + 1, device=self.device)
        if self.packed is not None:
            at = at - self.packed.begin
        query, key = query * (at[: query.shape[2]] + self.call.q_offset), key * at[: key.shape[2]]
        return (query.sum((0, 2)) + key.sum((0, 2))).to(self.x.decay.dtype)


@lru_cache(maxsize=256)  # launching takes the host as long as a small kernel runs
def _options(options: Options, key: int, value: int, *changes: tuple[str, Any]) -> Options:
    return replace(options, BK=key, BV=value, **dict(changes))


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
