"""Time, memory and cache against length: which rows belong together, how they grow, where they cross."""

import math
from collections.abc import Callable, Iterable, Iterator
from statistics import linear_regression
from typing import NamedTuple

from ..results import Cost
from .cells import OURS, THEIRS, Measured
from .chart import Points
from .style import digits, looks, mib, name, times

FITTED = 4  # how many of the longest lengths an exponent is fitted to
FEWEST = 3  # any two points lie on a line
CONTENDED = "†"
CONTENDED_NOTE = f"{CONTENDED} measured while other processes took part of the machine: slower than it is."


class Kind(NamedTuple):
    """One kind of cost."""

    id: str
    title: str
    read: Callable[[Cost], float | None]


TIME = Kind("ms", "time, ms", lambda row: row.ms)
MEMORY = Kind("memory", "peak memory, MiB", lambda row: row.memory_mib)
CACHE = Kind("cache", "cache, MiB", lambda row: row.cache_bytes and row.cache_bytes / 2**20)
WORK = {  # decoding: forward of one token; generating: a token of `generate`, with all that it does
    "forward": "Forward of {}",
    "training": "Training {}: forward and backward",
    "decoding": "Decoding with {}",
    "generating": "A token of generate with {}",
}


def kinds(rows: list[Cost]) -> list[Kind]:
    """The kinds that were measured."""
    return [kind for kind in (TIME, MEMORY, CACHE) if any(map(kind.read, rows))]


def groups(measured: Measured, work: str) -> Iterator[tuple[str, list[Cost]]]:
    """(description, rows) of each set of rows that may share a table; of several backends the fastest."""
    found: dict[tuple, dict[tuple, Cost]] = {}
    for row in measured.cost:
        if row.work == work:
            what = (row.what, row.causal, row.size, row.heads, row.head_dim, row.dtype)
            fastest, at = found.setdefault(what, {}), (row.mixer, row.length)
            fastest[at] = min(row, fastest.get(at, row), key=lambda row: row.ms)
    order = {"model": 0, "mixer": 1, "operator": 2}  # whole models first, causal before not causal
    for _, fastest in sorted(found.items(), key=lambda item: (order[item[0][0]], not item[0][1])):
        rows = list(fastest.values())
        yield _described(rows[0]), rows


def _described(row: Cost) -> str:
    what = {"model": "a whole model", "mixer": "one mixer alone", "operator": "one attention alone"}[row.what]
    shape = f"{row.heads} heads of {row.head_dim}" if row.heads and row.head_dim else None
    dtype = None if row.dtype == "float32" else row.dtype
    return ", ".join(filter(None, [what, "causal" if row.causal else "not causal", row.size, shape, dtype]))


def where(measured: Measured) -> str:
    """The machine; empty if unknown."""
    threads = "one thread a process" if measured.shared else "{0.threads} threads"
    return "".join(f"{machine.cpu}, {threads.format(machine)}" for machine in measured.machines[-1:])


def mixers(rows: list[Cost]) -> list[str]:
    """The mixers of the rows, in the order they are shown."""
    return list(looks(row.mixer for row in rows))


def points(rows: list[Cost], mixer: str, kind: Kind = TIME) -> Points:
    found = [(row.length, kind.read(row)) for row in rows if row.mixer == mixer]
    return sorted((length, value) for length, value in found if value)


class Fit(NamedTuple):
    exponent: float
    lengths: int  # how many it was fitted to


def growth(points: Iterable[tuple[float, float]]) -> Fit | None:
    """The exponent b of cost ~ length^b over the longest lengths, by least squares; None for fewer than 3."""
    logs = [(math.log(n), math.log(cost)) for n, cost in sorted(points)[-FITTED:] if n > 0 and cost > 0]
    if len({x for x, _ in logs}) < FEWEST:
        return None
    return Fit(linear_regression(*zip(*logs)).slope, len(logs))


def crossing(a: Points, b: Points) -> tuple[float, float] | None:
    """Where curve a first crosses curve b, between two lengths both have; lines are straight on log axes."""
    first, second = dict(a), dict(b)
    gaps = [(x, math.log(first[x] / second[x])) for x in sorted(first.keys() & second.keys())]
    for (x0, g0), (x1, g1) in zip(gaps, gaps[1:]):
        if g0 * g1 < 0:
            share = g0 / (g0 - g1)
            x = math.exp(math.log(x0) + share * math.log(x1 / x0))
            return x, math.exp(math.log(first[x0]) + share * math.log(first[x1] / first[x0]))
    return None


class Contest:
    """Our rows and softmax's at the lengths where both were measured."""

    def __init__(self, rows: list[Cost]):
        measured = {row.mixer for row in rows}
        self.us, self.them = (next((m for m in those if m in measured), those[0]) for those in (OURS, THEIRS))
        self.ours = {row.length: row for row in rows if row.mixer == self.us}
        self.theirs = {row.length: row for row in rows if row.mixer == self.them}
        self.lengths = sorted(self.ours.keys() & self.theirs.keys())
        self.crossing = crossing(points(rows, self.us), points(rows, self.them))

    def ratio(self, length: int) -> float | None:
        """Softmax's time over ours; None where the measured ranges overlap."""
        a, b = self.ours[length], self.theirs[length]
        if (a.ms_low or a.ms) <= (b.ms_high or b.ms) and (b.ms_low or b.ms) <= (a.ms_high or a.ms):
            return None
        return b.ms / a.ms

    def outcome(self, length: int) -> str:
        """ "3.1× as fast as"."""
        ratio = self.ratio(length)
        if ratio is None:
            return "as fast (the measured ranges overlap) as"
        busy = " (on a busy machine)" if self.ours[length].contended or self.theirs[length].contended else ""
        return f"{times(ratio)} as fast{busy} as"

    def lost(self) -> list[str]:
        """The lengths at which softmax is faster."""
        return [f"{n:,}" for n in self.lengths if (self.ratio(n) or 1.0) < 1.0]

    def crossing_text(self) -> str:
        """Where the two cross, or which is ahead throughout."""
        if self.crossing:
            place = digits(self.crossing[0])
            return f"The ring marks where {name(self.us)} and {name(self.them)} cross, near {place} tokens."
        if not self.lengths:
            return ""
        word = "faster" if self.ours[self.lengths[-1]].ms < self.theirs[self.lengths[-1]].ms else "slower"
        return f"{name(self.us)} is {word} than {name(self.them)} at every length measured."

    def cache_text(self) -> str:
        """Our cache after the longest context, beside softmax's."""
        mine, other = (CACHE.read(rows[self.lengths[-1]]) for rows in (self.ours, self.theirs))
        if not mine:
            return ""
        sizes = {row.cache_bytes for row in self.ours.values()}
        grows = " that does not grow" if len(self.ours) > 1 and len(sizes) == 1 else ""
        return f", with a cache of {mib(mine)}{grows}" + (f" against {mib(other)}" if other else "")


def contest(measured: Measured, work: str) -> Contest:
    """The contest of the first group that has both: whole models before parts of them."""
    contests = [Contest(rows) for _, rows in groups(measured, work)]
    return next((found for found in contests if found.lengths), Contest([]))
