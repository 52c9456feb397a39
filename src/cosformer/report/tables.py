"""The page's tables as data: mixers down, tasks or lengths across, published figures beside ours."""

import itertools
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import ClassVar

from ..results import Cost, Exactness, Quality, growth
from . import costs
from .cells import TIE, Cell, Experiment, Measured, Span, change, span
from .style import NOTHING, count, digits, ident, looks, metric_name, name, percent, score, times
from .summary import verdict_table

PUBLISHED = "published, same protocol"  # columns that were not measured here


@dataclass(frozen=True)
class Entry:
    text: str = NOTHING
    value: float | None = None  # what the best of a column is found by
    more: str = ""  # small, after the text
    badge: str = ""  # the kind of outcome that the text is


@dataclass(frozen=True)
class Column:
    head: str
    group: str = ""  # columns of one group share a heading
    best: str = ""  # "least" or "most" wins; empty where there is nothing to win
    words: bool = False  # text, not numbers


Lines = list[tuple[str, list[Entry]]]


@dataclass(frozen=True)
class Table:
    template: ClassVar[str] = "table.html"
    foreign: ClassVar[str] = PUBLISHED
    caption: str
    corner: str  # the heading of the first column
    columns: list[Column]
    rows: dict[str, Lines] = field(default_factory=dict)  # by heading of a group of rows, or ""
    note: str = ""
    about: str = ""  # more of the caption, less important

    def groups(self) -> list[tuple[int, str, int]]:
        """(first column, heading, how many) of the columns that stand together."""
        together = itertools.groupby(enumerate(self.columns), key=lambda pair: pair[1].group)
        places = [(group, [i for i, _ in mine]) for group, mine in together]
        return [(mine[0], group, len(mine)) for group, mine in places]

    def winners(self, group: str) -> set[tuple[int, int]]:
        """(row, column) of what is best within a group of rows: all that show the same, of two or more."""
        found = set()
        for j, column in enumerate(self.columns):
            entries = [(i, line[j]) for i, (_, line) in enumerate(self.rows[group])]
            values = {i: entry.value for i, entry in entries if entry.value is not None}
            if column.best and len(values) > 1:
                best = (min if column.best == "least" else max)(values, key=lambda i: values[i])
                found |= {(i, j) for i, entry in entries if entry.text == entries[best][1].text}
        return found


def verdicts(measured: Measured) -> Table | None:
    """The summary, task by task."""
    heads, lines = verdict_table(measured)
    rows: Lines = []
    for task, outcome, difference, metric, *values in lines:
        entries = [Entry(outcome, badge=ident(outcome)), Entry(difference), Entry(metric)]
        parts = [value.partition(" (") for value in values]
        rows.append((task, entries + [Entry(text, more=bracket[1:] + more) for text, bracket, more in parts]))
    note = (
        "cosFormer is the recommended configuration, cosFormer (paper) the published one. It is compared with"
        " the better of softmax and softmax + RoPE. Tie: the ranges of the seeds overlap, or the"
        " difference is within two standard errors of two accuracies on so many test examples, or within"
        f" {100 * TIE:g} %. Not learned: no mixer beats the most frequent answer by two standard errors."
        " In brackets: the lowest and the highest seed, and what was published for the same protocol."
    )
    columns = [Column(head, words=True) for head in heads[1:]]
    return Table("Task by task", heads[0], columns, {"": rows}, note) if rows else None


# What the training took: (heading, how it is read, how it is written, what is best).
Effort = tuple[str, Callable[[Quality], float | None], Callable[[float], str], str]
EFFORT: list[Effort] = [
    ("rate", lambda row: row.rate, "{:g}".format, ""),
    ("parameters", lambda row: row.parameters, count, ""),
    ("tokens", lambda row: row.tokens, count, ""),
    ("steps", lambda row: row.steps, "{:,.0f}".format, ""),
    ("seconds", lambda row: row.seconds, digits, "least"),
    ("tokens/s", lambda row: row.tokens_per_second, digits, "most"),
]


def _effort(cell: Cell) -> list[Entry]:
    entries = []
    for _, read, write, best in EFFORT:
        found = cell.over_seeds(read)
        mark = costs.CONTENDED if best and any(row.contended for row in cell.done) else ""
        entries.append(Entry(write(found.mean), found.mean, mark) if found else Entry())
    return entries


def _score(cell: Cell | None, metric: str) -> Entry:
    """What a mixer reached by the task's own metric."""
    if cell is None or not cell.value:
        return Entry(cell.undone[-1].status if cell else NOTHING)
    if cell.learned:
        return _entry(metric, cell.value)
    more = ", ".join(filter(None, [cell.value.range(metric), "not learned"]))
    return Entry(cell.value.text(metric), more=more)  # a guess wins nothing


def _entry(metric: str, found: Span | None) -> Entry:
    return Entry(found.text(metric), found.mean, found.range(metric)) if found else Entry()


def _direction(metric: str) -> str:
    """What is best of a metric that is not the task's own."""
    if percent(metric) or metric in ("bleu", "chrf"):
        return "most"
    return "least" if "loss" in metric or "per" in metric else ""


def _notes(experiments: list[Experiment]) -> str:
    """What stands behind the values of a table, and why some are missing."""
    cells = [cell for e in experiments for cell in e.cells]
    said = ["One seed: another one may change the order of close figures."]
    if any(e.seeds > 1 for e in experiments):
        said = ["Means over seeds, and their range from the lowest to the highest."]
    said += [f"{name(cell.mixer)}: {cell.why_not}." for cell in cells if not cell.value and cell.undone]
    said += dict.fromkeys(f"{row.note}." for cell in cells for row in cell.done if row.note)
    if not all(cell.learned for cell in cells):
        said.append("Not learned: it does not beat the most frequent answer by two standard errors.")
    if any(row.contended for cell in cells for row in cell.done):
        said.append(costs.CONTENDED_NOTE)
    return " ".join(said)


def _published(e: Experiment) -> dict[str, str]:
    """What was published for the same protocol, by mixer."""
    rows = [row for cell in e.cells for row in cell.done]
    return {row.mixer: score(row.metric, row.published) for row in rows if row.published is not None}


def one_task(e: Experiment) -> Table:
    """Everything about one task: its metrics, what the training took, what was published."""
    metric, published = e.row.metric, _published(e)
    rows = [row for cell in e.cells for row in cell.done]
    others = list(dict.fromkeys(other for row in rows for other in row.metrics))
    others = [other for other in others if other not in (metric, "tokens", "loss_per_token")]
    columns = [Column(metric_name(metric), "test", e.best_is)]
    columns += [Column(metric_name(other), "test", _direction(other)) for other in others]
    columns += [Column(head, "training", best) for head, _, _, best in EFFORT]
    columns += [Column(metric_name(metric), PUBLISHED)] if published else []
    body: Lines = []
    for cell in e.cells:
        entries = [_score(cell, metric)]
        entries += [_entry(other, span(row.metrics.get(other) for row in cell.done)) for other in others]
        entries += _effort(cell) + ([Entry(published.get(cell.mixer, NOTHING))] if published else [])
        body.append((name(cell.mixer), entries))
    about = [e.row.data, e.row.size, f"length {e.row.length:,}"]
    return Table(e.row.title, "mixer", columns, {"": body}, _notes([e]), " · ".join(about))


def overview(experiments: list[Experiment]) -> Table:
    """Mixers down, the tasks of a group across."""
    published = [(e.row.title, found) for e in experiments if (found := _published(e))]
    columns = [Column(f"{e.row.title} ({metric_name(e.row.metric)})", "ours", e.best_is) for e in experiments]
    columns += [Column(title, PUBLISHED) for title, _ in published]
    body: Lines = []
    for mixer in looks(cell.mixer for e in experiments for cell in e.cells):
        entries = [_score(e.cell(mixer), e.row.metric) for e in experiments]
        body.append((name(mixer), entries + [Entry(found.get(mixer, NOTHING)) for _, found in published]))
    return Table("What each mixer reached", "mixer", columns, {"": body}, _notes(experiments))


def searches(measured: Measured) -> Table | None:
    """The short runs that chose each mixer's rate of learning."""
    rates = sorted({row.rate for row in measured.searches})
    rows: dict[str, Lines] = {}
    for subject in dict.fromkeys(row.subject for row in measured.searches):
        mine = [row for row in measured.searches if row.subject == subject]
        title = f"{measured.titles.get(subject, subject)}, {max(row.steps for row in mine):,} steps"
        for mixer in looks(row.mixer for row in mine):
            tried = {row.rate: row for row in mine if row.mixer == mixer}
            best = min((row.loss for row in tried.values() if row.loss is not None), default=None)
            entries = []
            for row in map(tried.get, rates):
                if row is None or row.loss is None:
                    entries.append(Entry(row.status if row else NOTHING))
                else:
                    entries.append(Entry(score("loss", row.loss), more="chosen" if row.loss == best else ""))
            rows.setdefault(title, []).append((name(mixer), entries))
    columns = [Column(f"{rate:g}", "loss on the validation set, by rate") for rate in rates]
    note = "Every mixer was searched alike, in short runs, and then trained with its best rate."
    return Table("Rates of learning that were tried", "mixer", columns, rows, note) if rows else None


def cost(caption: str, rows: list[Cost], kinds: tuple[costs.Kind, ...]) -> Table:
    """Each kind of cost by length; of time also the exponent of its growth."""
    lengths, at = sorted({row.length for row in rows}), {(row.mixer, row.length): row for row in rows}
    body: dict[str, list[Entry]] = {mixer: [] for mixer in costs.mixers(rows)}
    columns = []
    for kind in (kind for kind in kinds if any(map(kind.read, rows))):
        columns += [Column(f"{n:,}", kind.title, kind.best) for n in lengths]
        for mixer, entries in body.items():
            for row in (at.get((mixer, n)) for n in lengths):
                value = kind.read(row) if row else None
                mark = costs.CONTENDED if row and row.contended and kind is costs.TIME else ""
                entries.append(Entry(kind.write(value), value, mark) if value else Entry())
        if kind is costs.TIME:
            columns.append(Column("growth (lengths fitted)", kind.title, "least"))
            for mixer, entries in body.items():
                fit = growth(costs.points(rows, mixer))
                entries.append(Entry(f"n^{fit[0]:.2f}", fit[0], f"({fit[1]})") if fit else Entry())
    note = costs.CONTENDED_NOTE if costs.TIME in kinds and any(row.contended for row in rows) else ""
    return Table(caption, "mixer", columns, {"": [(name(m), entries) for m, entries in body.items()]}, note)


def speedups(what: str, rows: list[Cost]) -> Table | None:
    """Speed as a multiple of softmax's."""
    contest = costs.Contest(rows)
    if not contest.lengths:
        return None
    both = [row for row in rows if row.length in contest.lengths]
    ratio = costs.Kind("", "by length", lambda row: contest.theirs[row.length].ms / row.ms, times, "most")
    return cost(f"Speed as a multiple of that of {name(contest.them)}: {what}", both, (ratio,))


PAIRS = [  # (what is added, without, with)
    ("the cosine", "relu", "cosformer-paper"),
    ("the cosine, beside gated decay", "cosformer", "cosformer-cosine"),
    ("all that is recommended", "cosformer-paper", "cosformer"),
    ("constant decay", "cosformer-paper", "cosformer-ladder"),
    ("one softmax layer in four", "cosformer", "cosformer-hybrid"),
    ("rotary positions, in softmax", "softmax", "softmax+rope"),
]


def ablation(e: Experiment) -> Table | None:
    """With and without each part, where both were run."""
    body: Lines = []
    for what, without, with_ in PAIRS:
        a, b = e.cell(without), e.cell(with_)
        if a and b and a.value and b.value:
            before, after = a.value.mean, b.value.mean
            text = f"{'+' if after > before else '-'}{change(e.row.metric, before, after)}"
            names = Entry(f"{name(without)} → {name(with_)}")
            body.append((what, [names, _score(a, e.row.metric), _score(b, e.row.metric), Entry(text)]))
    columns = [Column("mixers", words=True), Column("without"), Column("with"), Column("change")]
    caption = f"What each part is worth, by {metric_name(e.row.metric)}: {e.row.title}"
    return Table(caption, "part", columns, {"": body}, _notes([e])) if body else None


def exactness(measured: Measured) -> Table | None:
    """The largest difference from the definition, beside what is allowed."""
    whats = list(dict.fromkeys(row.what for row in measured.exactness))
    at = {(f"{row.backend}, {row.dtype}", row.mode, row.what): row for row in measured.exactness}
    rows: dict[str, Lines] = {}
    for group, mode in sorted({key[:2] for key in at}):
        found = [at.get((group, mode, what)) for what in whats]
        rows.setdefault(group, []).append((mode, [_difference(row) for row in found]))
    wrong = sum(row.difference > row.allowed for row in measured.exactness)
    note = f"{wrong} of {len(at)} are larger than allowed."
    if not wrong:
        note = f"All {len(at)} are within what is allowed."
    caption = "Largest difference from the definition, computed in float64"
    return Table(caption, "mode", [Column(what) for what in whats], rows, note) if rows else None


def _difference(row: Exactness | None) -> Entry:
    if row is None:
        return Entry()
    word = "allowed" if row.difference <= row.allowed else "too large: allowed"
    return Entry(f"{row.difference:.1e}", more=f"{word} {row.allowed:.0e}")


@dataclass(frozen=True)
class Paper:
    """A table of the paper, from paper.toml; shown apart from ours: it has other data and models."""

    number: int
    title: str
    setting: str
    note: str
    columns: list[str]
    least: list[str]  # columns where less is better
    rows: dict[str, str]  # figures with the paper's digits, - for none


_FILE = resources.files(__package__).joinpath("paper.toml").read_text(encoding="utf-8")
PAPER = {name: Paper(**table) for name, table in tomllib.loads(_FILE).items()}


def paper_table(table: Paper) -> Table:
    """A table of the paper in full."""
    columns = [Column(column, best="least" if column in table.least else "most") for column in table.columns]
    body: Lines = []
    for model, figures in table.rows.items():
        body.append((model, [Entry() if x == "-" else Entry(x, float(x)) for x in figures.split()]))
    caption = f"The paper's table {table.number}: {table.title}"
    return Table(caption, "model", columns, {"": body}, table.note, table.setting)
