"""Rows put together for showing: cells over seeds, the tasks they belong to, and who is ahead on each."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from ..results import Cost, Exactness, Machine, Picture, Positions, Quality, Row, Run, Search, latest, of
from .style import Span, digits, looks, name, percent, span

OURS = ("cosformer", "cosformer-paper")
THEIRS = ("softmax+rope", "softmax")
TIE = 0.005  # nothing smaller is a difference: of the value, or of 1 where the metric is a share


@dataclass(frozen=True)
class Cell:
    """What one mixer reached in one experiment, over its seeds."""

    mixer: str
    done: list[Quality]
    undone: list[Quality]  # refused or failed

    def over_seeds(self, read: Callable[[Quality], float | None]) -> Span | None:
        return span(read(row) for row in self.done)

    @cached_property
    def value(self) -> Span | None:
        return self.over_seeds(lambda row: row.value)

    @property
    def learned(self) -> bool:
        """Whether most seeds beat the most frequent answer; yes where there is no such answer."""
        known = [row.learned for row in self.done if row.learned is not None]
        return not known or 2 * sum(known) > len(known)

    @property
    def why_not(self) -> str:
        """Why there is no value: "refused: reason"."""
        return ": ".join(filter(None, [self.undone[-1].status, self.undone[-1].reason]))


@dataclass(frozen=True)
class Experiment:
    """One subject at one size, on which mixers can be compared; `row` is any of its rows."""

    row: Quality
    cells: list[Cell]

    @property
    def greater(self) -> bool:
        return self.row.greater_is_better

    @property
    def best_is(self) -> str:
        return "most" if self.greater else "least"

    @property
    def seeds(self) -> int:
        return max(len(cell.done) for cell in self.cells)

    @property
    def learned(self) -> bool:
        """Whether any mixer beats the most frequent answer."""
        return any(cell.learned for cell in self.cells if cell.value)

    def cell(self, mixer: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.mixer == mixer), None)

    def first(self, mixers: Iterable[str]) -> Cell | None:
        """The first of these mixers that has a value, or else the first that was tried."""
        tried = [cell for mixer in mixers if (cell := self.cell(mixer))]
        return next((cell for cell in tried if cell.value), tried[0] if tried else None)

    def best(self, mixers: Iterable[str]) -> Cell | None:
        """The best of these mixers, or else the first that was tried."""
        reached = [(cell.value.mean, cell) for mixer in mixers if (cell := self.cell(mixer)) and cell.value]
        if not reached:
            return self.first(mixers)
        return (max if self.greater else min)(reached, key=lambda pair: pair[0])[1]


class Measured:
    """All rows of a report, by kind; of rows about the same thing the last."""

    def __init__(self, rows: Iterable[Row]):
        kept = latest(rows)
        self.machines, self.runs = of(kept, Machine), of(kept, Run)
        self.quality, self.searches, self.positions = of(kept, Quality), of(kept, Search), of(kept, Positions)
        self.cost, self.exactness, self.pictures = of(kept, Cost), of(kept, Exactness), of(kept, Picture)
        self.experiments = _experiments(self.quality)
        mixers = [row.mixer for row in self.quality] + [row.mixer for row in self.cost]
        mixers += [row.mixer for row in self.pictures]
        self.mixers = list(looks(mixers))
        self.titles = {row.subject: row.title for row in self.quality}

    def group(self, name: str) -> list[Experiment]:
        return [e for e in self.experiments if e.row.group == name]

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(e.row.group for e in self.experiments))

    @property
    def compared(self) -> list[Experiment]:
        """The study repeats tasks to learn about parts of mixers; it is not a contest."""
        return [e for e in self.experiments if e.row.group != "study"]


def _experiments(rows: list[Quality]) -> list[Experiment]:
    together: dict[tuple, list[Quality]] = {}
    for row in rows:
        together.setdefault((row.subject, row.size, row.length, row.steps), []).append(row)
    return [Experiment(mine[0], _cells(mine)) for mine in together.values()]


def _cells(rows: list[Quality]) -> list[Cell]:
    cells = []
    for mixer in looks(row.mixer for row in rows):
        mine = [row for row in rows if row.mixer == mixer]
        done = [row for row in mine if row.status == "done"]
        cells.append(Cell(mixer, done, [row for row in mine if row.status != "done"]))
    return cells


@dataclass(frozen=True)
class Verdict:
    """One task: our mixer beside the better softmax."""

    experiment: Experiment
    ours: Cell | None
    theirs: Cell | None
    outcome: str  # better, worse, tie, not learned, not compared
    difference: str  # "2.6 % higher"; why nothing can be said, if not compared
    margin: str = ""  # why a tie is one


def verdict(e: Experiment) -> Verdict:
    ours, theirs = e.first(OURS), e.best(THEIRS)  # beating the weaker softmax would prove nothing
    for cell, mixers in ((ours, OURS), (theirs, THEIRS)):
        if cell is None or cell.value is None:
            why = f"{name(cell.mixer)} {cell.why_not}" if cell else f"{name(mixers[0])} not measured"
            return Verdict(e, ours, theirs, "not compared", why)
    assert ours and theirs and ours.value and theirs.value
    a, b = ours.value.mean, theirs.value.mean
    if percent(e.row.metric):
        size, difference = 1.0, f"{100 * abs(a - b):.1f} points"
    else:
        size, difference = abs(b), f"{100 * abs(a - b) / abs(b):.1f} %" if b else digits(abs(a - b))
    difference = "equal" if a == b else f"{difference} {'higher' if a > b else 'lower'}"
    margin = _why_tied(e, ours.value, theirs.value, size)
    if not e.learned:
        outcome = "not learned"
    elif margin:
        outcome = "tie"
    else:
        outcome = "better" if (a > b) == e.greater else "worse"
    return Verdict(e, ours, theirs, outcome, difference, margin)


def _why_tied(e: Experiment, ours: Span, theirs: Span, size: float) -> str:
    """Why the difference of two values proves nothing; empty if it does."""
    a, b = ours.mean, theirs.mean
    if abs(a - b) <= TIE * size:
        return f"less than {100 * TIE:g} %"
    if max(ours.seeds, theirs.seeds) > 1 and ours.low <= theirs.high and theirs.low <= ours.high:
        return "the ranges of the seeds overlap"
    if percent(e.row.metric) and 0 <= min(a, b) and max(a, b) <= 1:
        error = math.sqrt((a * (1 - a) + b * (1 - b)) / max(1, e.row.examples))
        if abs(a - b) <= 2 * error:
            return f"within two standard errors of {e.row.examples:,} test examples"
    return ""
