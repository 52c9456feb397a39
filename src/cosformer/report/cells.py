"""Rows put together for showing: cells over seeds, the tasks they belong to, and who is ahead on each."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from .. import results
from ..results import Quality, Row, latest, of
from .style import NOTHING, digits, looks, name, percent, score

OURS = ("cosformer", "cosformer-paper")
THEIRS = ("softmax+rope", "softmax")
GROUPS = {  # of tasks, in page order
    "lm": "Language modelling",
    "finetune": "Pre-training and fine-tuning",
    "lra": "Long-Range Arena",
    "recall": "Recall",
    "seq2seq": "Cross attention",
    "parts": "What parts of the model are worth",
    "toy": "Toy tasks",
}
FEW = 50  # steps: fewer, as a busy machine leaves time for, tell nothing of what a mixer learns
TIE = 0.005  # relative: smaller differences tie, except between shares, whose errors are known


class Span(NamedTuple):
    """A value over seeds: its mean and range."""

    mean: float
    low: float
    high: float
    seeds: int

    def range(self, metric: str) -> str:
        """The lowest and highest of several seeds; empty for one."""
        return f"{score(metric, self.low)}–{score(metric, self.high)}" if self.seeds > 1 else ""


def span(values: Iterable[float | None]) -> Span | None:
    """The span of the values that are not None; None if there are none."""
    found = [value for value in values if value is not None]
    return Span(sum(found) / len(found), min(found), max(found), len(found)) if found else None


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
        """Whether most seeds beat the most frequent answer; True where there is no such answer."""
        known = [row.learned for row in self.done if row.learned is not None]
        return not known or 2 * sum(known) > len(known)

    @property
    def text(self) -> str:
        """Its score, else its status."""
        if self.value:
            return score(self.done[0].metric, self.value.mean)
        return self.undone[-1].status

    @property
    def remarks(self) -> str:
        """The range of its seeds, the published score by the same protocol, whether it is a mere guess."""
        if not self.value:
            return ""
        metric, published = self.done[0].metric, self.done[0].published
        said = [self.value.range(metric), "" if self.learned else "not learned"]
        if published is not None:
            said.insert(1, f"published {score(metric, published)}")
        return "; ".join(filter(None, said))

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
    def seeds(self) -> int:
        return max(len(cell.done) for cell in self.cells)

    def cell(self, mixer: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.mixer == mixer), None)


class Measured:
    """All rows of a report, by kind; only the last of rows about the same thing."""

    def __init__(self, rows: Iterable[Row]):
        rows = [*rows]
        kept = latest(rows)
        self.machines, self.runs = of(kept, results.Machine), of(kept, results.Run)
        self.quality, self.searches = of(kept, Quality), of(kept, results.Search)
        self.positions, self.pictures = of(kept, results.Positions), of(kept, results.Picture)
        self.exactness = of(kept, results.Exactness)
        self.shared = sorted(of(kept, results.Shared), key=lambda row: (row.length, row.processes))
        self.cost = of(kept, results.Cost) + [_cost(row) for row in self.shared]
        self.experiments = _experiments(_comparable(self.quality, _machines(rows)))
        named: list[Any] = [*self.quality, *self.positions, *self.pictures, *self.cost]
        self.mixers = list(looks(row.mixer for row in named))
        self.titles = {row.subject: row.title for row in self.quality}

    def group(self, name: str) -> list[Experiment]:
        return [e for e in self.experiments if e.row.group == name]

    @property
    def verdicts(self) -> list["Verdict"]:
        """cosFormer beside softmax, task by task; studies of a part do not compare the two."""
        return [verdict(e) for e in self.experiments if e.row.group != "parts"]


def _machines(rows: list[Row]) -> dict[str, tuple]:
    """The machine that each thing was measured on: of the row above it."""
    found: dict[str, tuple] = {}
    machine: tuple = ()
    for row in rows:
        if isinstance(row, results.Machine):
            machine = (row.cpu, row.isa, row.threads)
        found[row.key] = machine
    return found


def _comparable(rows: list[Quality], machines: dict[str, tuple]) -> list[Quality]:
    """The rows; those of one experiment on several machines without their speeds."""
    places: dict[tuple, set] = {}
    for row in rows:
        places.setdefault(_experiment(row), set()).add(machines[row.key])
    return [_without_speed(row) if len(places[_experiment(row)]) > 1 else row for row in rows]


def _experiment(row: Quality) -> tuple:
    return row.subject, row.size, row.length, row.steps, row.metric


def _without_speed(row: Quality) -> Quality:
    curve = [{key: x for key, x in point.items() if key != "seconds"} for point in row.curve]
    return replace(row, seconds=None, tokens_per_second=None, curve=curve)


def _recalled(row: Quality) -> tuple[int, int]:
    """The place of a setting of recall among the others: by length and pairs."""
    return (row.length, row.settings.get("pairs", 0)) if row.group == "recall" else (0, 0)


def _cost(row: results.Shared) -> results.Cost:
    """A step that several processes share, as a cost; their number takes the mixer's place."""
    who = "1 process" if row.processes == 1 else f"{row.processes} processes"
    size = f"{row.size}, one shared sequence"
    names = ("length", "ms", "ms_low", "ms_high", "waited", "memory_mib")
    known: dict[str, Any] = {name: getattr(row, name) for name in names}
    return results.Cost(what="model", work="training", mixer=who, causal=True, size=size, **known)


def _experiments(rows: list[Quality]) -> list[Experiment]:
    together: dict[tuple, dict[str, Cell]] = {}
    firsts: dict[tuple, Quality] = {}
    for row in rows:
        key = _experiment(row)
        firsts.setdefault(key, row)
        cell = together.setdefault(key, {}).setdefault(row.mixer, Cell(row.mixer, [], []))
        (cell.done if row.status == "done" else cell.undone).append(row)
    order = [*GROUPS, *(row.group for row in rows)]
    titles = [row.title for row in firsts.values()]
    found = [Experiment(firsts[key], [cells[m] for m in looks(cells)]) for key, cells in together.items()]
    return sorted(found, key=lambda e: (order.index(e.row.group), _recalled(e.row), _place(e.row, titles)))


def _place(row: Quality, titles: list[str]) -> int:
    """Where a task stands: behind the one whose title its own begins with ("x" and "x, 5,000 steps")."""
    return next(place for place, title in enumerate(titles) if row.title.startswith(title))


@dataclass(frozen=True)
class Verdict:
    """One task: our mixer beside the better softmax."""

    experiment: Experiment
    ours: Cell | None
    theirs: Cell | None
    outcome: str  # better, worse; ahead, behind (one seed); tie, not learned, not compared
    difference: str  # "2.6 % higher", or why they are not compared
    margin: str = ""  # why a tie is one

    @property
    def won(self) -> bool:
        return self.outcome in ("better", "ahead")

    @property
    def lost(self) -> bool:
        return self.outcome in ("worse", "behind")


def verdict(e: Experiment) -> Verdict:
    found = []
    sign = 1 if e.row.greater_is_better else -1
    for mixers in (OURS, THEIRS):
        cells = [cell for mixer in mixers if (cell := e.cell(mixer))]
        reached = [cell for cell in cells if cell.value]
        if not reached:
            missing = f"{name(mixers[0])} not measured"
            if cells:
                missing = f"{name(cells[0].mixer)} {cells[0].why_not}"
            return Verdict(e, None, None, "not compared", missing)
        found.append(reached)
    # Ours is the first that has a value, theirs the best: beating the weaker would prove nothing.
    mine, other = found[0][0], max(found[1], key=lambda cell: sign * cell.value.mean if cell.value else 0.0)
    assert mine.value and other.value
    if not any(cell.learned for cell in e.cells if cell.value):
        return Verdict(e, mine, other, "not learned", NOTHING)
    if not other.learned:  # to beat a guess proves nothing; to lose against one does
        return Verdict(e, mine, other, "not compared", f"{name(other.mixer)} has not learned")
    if e.row.steps < FEW:
        return Verdict(e, mine, other, "not compared", f"{e.row.steps} steps are too few")
    a, b = mine.value.mean, other.value.mean
    higher = "higher" if a > b else "lower"
    difference = "equal" if a == b else f"{change(e.row.metric, b, a)} {higher}"
    if margin := _why_tied(e, mine.value, other.value):
        return Verdict(e, mine, other, "tie", difference, margin)
    several = min(mine.value.seeds, other.value.seeds) > 1  # of one seed nobody knows what another would give
    won, lost = ("better", "worse") if several else ("ahead", "behind")
    return Verdict(e, mine, other, won if sign * (a - b) > 0 else lost, difference)


def change(metric: str, before: float, after: float) -> str:
    """The size of a difference: in percentage points for shares, else in per cent of `before`."""
    size = abs(after - before)
    if percent(metric):
        return f"{100 * size:.{1 if size >= 0.01 else 2}f} points"
    return f"{100 * size / abs(before):.1f} %" if before else digits(size)


def _why_tied(e: Experiment, ours: Span, theirs: Span) -> str:
    """Why the difference of two values proves nothing; empty if it does."""
    a, b, share = ours.mean, theirs.mean, percent(e.row.metric)
    if not share and abs(a - b) <= TIE * abs(b):
        return f"less than {100 * TIE:g} %"
    if max(ours.seeds, theirs.seeds) > 1 and ours.low <= theirs.high and theirs.low <= ours.high:
        return "the ranges of the seeds overlap"
    if share and 0 <= min(a, b) and max(a, b) <= 1:
        variances = (
            x.mean * (1 - x.mean) / max(1, e.row.examples) for x in (ours, theirs)
        )  # seeds share them
        if abs(a - b) <= 2 * math.sqrt(sum(variances)):
            return f"within two standard errors of {e.row.examples:,} test examples"
    return ""
