"""Pathfinder: do two discs lie on one dashed curve? Drawn with Long-Range Arena's parameters for each size.

Two dashed curves of equal length begin near one another; one disc marks the beginning of one curve, another
the end of the same curve (label 1) or of the other (label 0). Short curves distract. A curve continues from
its last dash with a random turn: the higher the continuity, the smaller. Where no dash finds room, both
curves are taken back some dashes and redrawn from there.

    |--dash--|..margin..o..margin..|--dash--|       o: the pivot about which the next dash turns
                                                    dashes of different curves keep two margins between them

All drawings of a batch grow together in numpy, on the plane; pixels come last. The published generator works
on a grid of pixels with libraries that are gone: these images follow its parameters, but are not identical.
"""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .contract import SPLITS, Special, Task
from .published import arena

TURNS = 16  # candidate directions, or places, for each dash
PATIENCE = 10  # rounds per dash before a drawing is given up
BATCH = 128
FINE = 4  # subpixels along a pixel's side, to measure how much of it a shape covers
DIFFICULTY = {"easy": 6, "intermediate": 9, "hard": 14}  # dashes per curve


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The published parameters, in pixels of a `window` x `window` drawing."""

    window: int
    margins: tuple[int, ...]  # one is chosen for each image
    padding: int
    seed_distance: int  # between the beginnings of the two curves
    radius: float  # of the discs
    dash: float  # its length
    thickness: float
    continuity: float
    distractor_dashes: int  # of all distractors together
    contrast: float
    dashes: int = DIFFICULTY["hard"]  # of each curve; a distractor has a third


DRAWINGS = {
    32: Drawing(window=32, margins=(1,), padding=1, seed_distance=7, radius=1.5, dash=2, thickness=0.5,
                continuity=1.0, distractor_dashes=20, contrast=1.5),
    64: Drawing(window=64, margins=(1,), padding=1, seed_distance=12, radius=2.5, dash=5, thickness=1,
                continuity=1.8, distractor_dashes=22, contrast=0.8),
    128: Drawing(window=128, margins=(2, 3), padding=1, seed_distance=20, radius=3, dash=5, thickness=1.5,
                 continuity=1.8, distractor_dashes=35, contrast=0.9),
    256: Drawing(window=256, margins=(3,), padding=22, seed_distance=27, radius=5, dash=5, thickness=2,
                 continuity=1.8, distractor_dashes=30, contrast=1.0),
}  # fmt: skip


@dataclass
class Sketches:
    """B drawings on the plane."""

    dashes: np.ndarray  # (B, S, 2, 2): both ends, (x, y); NaN for a distractor that found no room
    discs: np.ndarray  # (B, 2, 2): centres
    labels: np.ndarray  # (B,)
    margins: np.ndarray  # (B,)


def _heading(angle: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angle), np.sin(angle)], -1)


def _squared_distances(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """From points to segments a-b (..., 2), elementwise; a segment may be a point."""
    x, y = x - a[..., 0], y - a[..., 1]
    dx, dy = (b - a)[..., 0], (b - a)[..., 1]
    along = np.clip((x * dx + y * dy) / np.maximum(dx**2 + dy**2, 1e-12), 0, 1)
    return (x - along * dx) ** 2 + (y - along * dy) ** 2


class _Field:
    """B drawings as they grow: dashes in slots. `rows` are indices of drawings."""

    def __init__(self, rng: np.random.Generator, drawing: Drawing, margins: np.ndarray, slots: int):
        self.rng, self.drawing, self.margins = rng, drawing, margins
        self.dashes = np.full((len(margins), slots, 2, 2), np.nan, np.float32)

    def room(self, rows: np.ndarray, slot: np.ndarray, last: np.ndarray, dashes: np.ndarray) -> np.ndarray:
        """(n, K, 2, 2) dashes -> (n, K): is each inside the padding, and clear of all others but `last`?

        Clear: two margins and a thickness away. Only earlier slots count. Distances are measured from points
        at most two pixels apart along the dash.
        """
        low, high = self.drawing.padding, self.drawing.window - 1 - self.drawing.padding
        inside = ((dashes >= low) & (dashes <= high)).all((-1, -2))
        share = np.linspace(0, 1, math.ceil(self.drawing.dash / 2) + 1, dtype=np.float32)
        x, y = (dashes[:, :, 0, i, None] * (1 - share) + dashes[:, :, 1, i, None] * share for i in (0, 1))
        before = np.arange(int(slot.max(initial=0)))
        a, b = self.dashes[rows, : len(before), 0], self.dashes[rows, : len(before), 1]
        other = (before < slot[:, None]) & (before != last[:, None]) & ~np.isnan(a[..., 0])
        apart = _squared_distances(x[..., None], y[..., None], a[:, None, None], b[:, None, None])
        apart[np.broadcast_to(~other[:, None, None], apart.shape)] = np.inf
        clearance = 2 * self.margins[rows, None] + self.drawing.thickness
        return inside & (apart.min((2, 3), initial=np.inf) >= clearance**2)

    def choose(self, rows, slot, last, ends: tuple[np.ndarray, np.ndarray], weight: np.ndarray) -> np.ndarray:
        """Draws a dash that has room by `weight` (n, K) into `slot`; returns (n,) whether there was one."""
        candidates = np.stack(ends, -2).astype(np.float32)
        total = (weight * self.room(rows, slot, last, candidates)).cumsum(1)
        drawn = (total > self.rng.random((len(rows), 1)) * total[:, -1:]).argmax(1)
        self.dashes[rows, slot] = candidates[np.arange(len(rows)), drawn]
        return total[:, -1] > 1e-4  # published: below this the curve is at a dead end

    def begin(self, rows: np.ndarray, slot: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The first dash of a curve, from one of the places (n, K, 2) in any direction."""
        heading = _heading(self.rng.uniform(-math.pi, math.pi, places.shape[:2]))
        ends = places, places + self.drawing.dash * heading
        return self.choose(rows, slot, np.full(len(rows), -1), ends, np.ones(places.shape[:2]))

    def extend(self, rows: np.ndarray, slot: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Continues the dash in `last`; turns have probability proportional to cos^2(continuity * turn)."""
        start, end = self.dashes[rows, last, 0], self.dashes[rows, last, 1]
        angle = np.arctan2(end[:, 1] - start[:, 1], end[:, 0] - start[:, 0])
        margin, limit = self.margins[rows, None], min(math.pi / 2 / self.drawing.continuity, math.pi)
        turn = ((np.arange(TURNS) + self.rng.random((len(rows), 1))) / TURNS * 2 - 1) * limit
        heading = _heading(angle[:, None] + turn)
        first = (end + margin * _heading(angle))[:, None] + margin[..., None] * heading
        weight = np.cos(self.drawing.continuity * turn) ** 2 / TURNS
        return self.choose(rows, slot, last, (first, first + self.drawing.dash * heading), weight)


def _curves(field: _Field, size: int) -> np.ndarray:
    """Draws two long curves, 0 in even slots and 1 in odd ones; returns the drawings where both found room.

    They take turns, so neither gets the better places. At a dead end both are taken back some dashes.
    """
    drawing, rng, rows, zero = field.drawing, field.rng, np.arange(size), np.zeros(size, int)
    edge = min(2 * drawing.seed_distance, drawing.window // 2 - 2)
    begun = field.begin(rows, zero, rng.uniform(edge, drawing.window - edge, (size, TURNS, 2)))
    around = drawing.seed_distance * _heading(rng.uniform(-math.pi, math.pi, (size, TURNS)))
    begun &= field.begin(rows, zero + 1, field.dashes[:, 0, None, 0] + around)
    slot, goal = np.where(begun, 2, -1), 2 * drawing.dashes
    for _ in range(PATIENCE * goal):
        rows = np.flatnonzero((slot >= 0) & (slot < goal))
        if not len(rows):
            break
        found = field.extend(rows, slot[rows], slot[rows] - 2)
        slot[rows[found]] += 1
        bad = rows[~found]
        slot[bad] = np.maximum(slot[bad] - rng.geometric(0.2, len(bad)), 2)
    return np.flatnonzero(slot == goal)


def sketch(rng: np.random.Generator, size: int, drawing: Drawing) -> Sketches:
    """Attempts `size` drawings and returns those whose two long curves found room."""
    third, long = drawing.dashes // 3, 2 * drawing.dashes
    slots = long + drawing.distractor_dashes // third * third
    field = _Field(rng, drawing, rng.choice(drawing.margins, size), slots)
    rows = _curves(field, size)
    for first in range(long, slots, third):
        slot = np.full(len(rows), first)
        whole = field.begin(rows, slot, rng.uniform(0, drawing.window, (len(rows), TURNS, 2)))
        for step in range(1, third):
            whole &= field.extend(rows, slot + step, slot + step - 1)
        field.dashes[rows[~whole], first : first + third] = np.nan  # no room for all of it: left out

    labels, origin = rng.integers(2, size=(2, len(rows)))
    dashes, end, one = field.dashes[rows], np.where(labels == 1, origin, 1 - origin), np.arange(len(rows))
    discs = np.stack([dashes[one, origin, 0], dashes[one, long - 2 + end, 1]], 1)
    return Sketches(dashes, discs, labels, field.margins[rows])


def render(sketches: Sketches, drawing: Drawing) -> np.ndarray:
    """Pixels (B, window, window), uint8: each by how much of it a dash or disc covers."""
    canvas = np.zeros((len(sketches.labels), drawing.window, drawing.window), np.float32)
    _stamp(canvas, sketches.dashes, drawing, drawing.thickness / 2, drawing.contrast)
    _stamp(canvas, np.stack([sketches.discs, sketches.discs], 2), drawing, drawing.radius, 1.0)
    return np.clip(canvas * 255 + 0.5, 0, 255).astype(np.uint8)


def _stamp(canvas: np.ndarray, shapes: np.ndarray, drawing: Drawing, radius: float, value: float) -> None:
    """Draws segments (B, S, 2, 2) of half-width `radius`, each on a square patch around it."""
    reach = math.ceil(drawing.dash / 2 + radius) + 1
    side = 2 * reach + 1
    row, slot = np.nonzero(~np.isnan(shapes[..., 0, 0]))
    a, b = shapes[row, slot, 0], shapes[row, slot, 1]
    corner = np.round((a + b) / 2).astype(int) - reach  # (n, 2), x and y
    fine = ((np.arange(side * FINE) + 0.5) / FINE - 0.5).astype(np.float32)  # centres of a patch's subpixels
    x, y = (corner[:, i, None].astype(np.float32) + fine for i in (0, 1))
    near = _squared_distances(x[:, None, :], y[:, :, None], a[:, None, None], b[:, None, None]) <= radius**2
    patch = near.reshape(len(a), side, FINE, side, FINE).mean((2, 4), dtype=np.float32) * value
    x, y = (corner[:, i, None] + np.arange(side) for i in (0, 1))
    image, y, x = np.broadcast_arrays(row[:, None, None], y[:, :, None], x[:, None, :])
    shown = (y >= 0) & (y < drawing.window) & (x >= 0) & (x < drawing.window)
    np.maximum.at(canvas, (image[shown], y[shown], x[shown]), patch[shown])


def images(drawing: Drawing, seed: Sequence[int]) -> Iterator[tuple[np.ndarray, int]]:
    """Endless (pixels (window, window), label); batches have their own seeds, so workers do not matter."""

    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        made = sketch(np.random.default_rng((*seed, number)), BATCH, drawing)
        return render(made, drawing), made.labels

    workers, idle = os.cpu_count() or 1, 0
    with ThreadPoolExecutor(workers) as pool:  # numpy's loops release the GIL
        for start in itertools.count(step=workers):
            for pixels, labels in pool.map(batch, range(start, start + workers)):
                yield from zip(pixels, map(int, labels))
                idle = 0 if len(labels) else idle + 1
            if idle >= 100:
                tried = f"{idle * BATCH:,} attempts on {drawing.window} pixels"
                raise ValueError(f"no drawing of {drawing.dashes} dashes found room in {tried}")


def pathfinder(
    *,
    size: int = 32,
    difficulty: str = "hard",
    examples: Sequence[int] = (160_000, 20_000, 20_000),
    seed: int = 0,
    cache: Any = None,
) -> Task:
    """Pathfinder at `size` x `size` (128 is Path-X); `difficulty` sets how many dashes a curve has."""
    if size not in DRAWINGS:
        raise ValueError(f"size must be one of {', '.join(map(str, DRAWINGS))}; got {size}")
    if difficulty not in DIFFICULTY:
        raise ValueError(f"difficulty must be one of {', '.join(DIFFICULTY)}; got {difficulty!r}")
    drawing = replace(DRAWINGS[size], dashes=DIFFICULTY[difficulty])

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        for number, (split, wanted) in enumerate(zip(SPLITS, examples, strict=True)):
            for pixels, label in itertools.islice(images(drawing, (seed, 7, number)), wanted):
                ids = pixels.reshape(-1).astype(np.uint16) + Special.count
                yield split, {"input_ids": ids, "labels": label}

    settings = {"drawing": asdict(drawing), "size": size, "examples": list(examples), "seed": seed}
    labels = ("apart", "joined")
    return arena("pathfinder", rows, values=256, length=size**2, labels=labels, cache=cache, **settings)
