"""What stands in the tables: mixers down, tasks or lengths across, what was published beside ours."""

import tomllib
from collections.abc import Callable
from importlib import resources
from typing import Any

from ..results import Cost, Exactness, Quality, Shared
from . import costs
from .cells import TIE, Cell, Experiment, Measured, change, span
from .style import NOTHING, count, digits, ident, looks, metric_name, name, percent, score, times
from .table import Column, Entry, Lines, Table

BESIDE = ("cosformer-hybrid", "cosformer-paper")  # in the summary, beside cosFormer and the better softmax
POSITIONS = {"softmax": "learned positions", "softmax+rope": "RoPE"}


def verdicts(measured: Measured) -> Table | None:
    """The summary, task by task: the outcome, and the scores of the main mixers."""
    decided = [found for found in measured.verdicts if found.outcome != "not compared"]
    tried = [found.experiment for found in decided]
    beside = [m for m in BESIDE if any((cell := e.cell(m)) and cell.value for e in tried)]
    rows: Lines = []
    for e, found in zip(tried, decided):
        outcome = [Entry(found.outcome, badge=ident(found.outcome)), Entry(found.difference)]
        contest = [_short(found.ours), _short(found.theirs)]
        others = [_short(e.cell(mixer)) for mixer in beside]
        counts = dict.fromkeys(len(cell.done) for cell in (found.ours, found.theirs) if cell)
        seeds = f"{' and '.join(map(str, counts))} seed{'s' if [*counts] != [1] else ''}"
        metric = Entry(metric_name(e.row.metric), more=f"({seeds})")
        rows.append((e.row.title, [*outcome, metric, *contest, *others]))
    note = (
        "cosFormer is the recommended configuration, cosFormer (paper) the published one. It is compared with"
        " softmax with learned positions or with RoPE; if both were run, with the better. Ahead, behind: by"
        " one seed, and another might end otherwise. Tie: the ranges of the seeds overlap, or accuracies"
        " differ by less than two standard errors on so many test examples, or other values by less than"
        f" {100 * TIE:g} %. Not learned: no mixer beats the most frequent answer by"
        " two standard errors."
        " Seeds: of cosFormer and softmax. In brackets: the lowest and the highest of several seeds, and what"
        " was published for the same protocol."
    )
    heads = ["cosFormer is", "difference", "metric", name("cosformer"), "softmax", *map(name, beside)]
    columns = [Column(head, words=True) for head in heads]
    return Table("Task by task", "task", columns, {"": rows}, note) if rows else None


def _short(cell: Cell | None) -> Entry:
    """A score with its remarks, and the positions of a softmax."""
    if cell is None or not cell.value:
        return Entry()
    remarks = "; ".join(filter(None, [POSITIONS.get(cell.mixer, ""), cell.remarks]))
    return Entry(cell.text, more=f"({remarks})" if remarks else "")


def parts(experiments: list[Experiment]) -> Table:
    """Tasks down, mixers across: each task changes one part of the model for the mixers it concerns."""
    mixers = list(looks(cell.mixer for e in experiments for cell in e.cells))
    columns = [Column(head, words=True) for head in ("metric", *map(name, mixers))]
    rows: Lines = []
    for e in experiments:
        rows.append((e.row.title, [Entry(metric_name(e.row.metric)), *(_short(e.cell(m)) for m in mixers)]))
    return Table("What each reached", "task", columns, {"": rows}, _notes(experiments))


# What training took: (heading, reader, formatter, what is best).
Effort = tuple[str, Callable[[Quality], float | None], Callable[[float], str], str]
EFFORT: list[Effort] = [
    ("rate", lambda row: row.rate, "{:g}".format, ""),
    ("parameters", lambda row: row.parameters, count, ""),
    ("tokens", lambda row: row.tokens, count, ""),
    ("steps", lambda row: row.steps, "{:,.0f}".format, ""),
    ("seconds", lambda row: row.seconds, digits, "least"),
    ("tokens/s", lambda row: row.tokens_per_second, digits, "most"),
]


def _effort(cell: Cell, shown: list[Effort]) -> list[Entry]:
    entries = []
    for _, read, write, best in shown:
        found = cell.over_seeds(read)
        mark = costs.CONTENDED if best and any(row.contended for row in cell.done) else ""
        entries.append(Entry(write(found.mean), found.mean, mark) if found else Entry())
    return entries


def _score(cell: Cell | None) -> Entry:
    """A mixer's score by the task's own metric; a mere guess wins nothing."""
    if cell is None:
        return Entry()
    return Entry(cell.text, cell.value.mean if cell.value and cell.learned else None, cell.remarks)


def _other(metric: str, cell: Cell) -> Entry:
    """Its score by another metric."""
    found = span(row.metrics.get(metric) for row in cell.done)
    return Entry(score(metric, found.mean), found.mean, found.range(metric)) if found else Entry()


def _direction(metric: str) -> str:
    """Whether the least or the most is best of a metric other than the task's own."""
    if percent(metric) or metric in ("bleu", "chrf"):
        return "most"
    return "least" if "loss" in metric or "per" in metric else ""


def _own(e: Experiment) -> str:
    """Whether the least or the most is best of the task's own metric."""
    return "most" if e.row.greater_is_better else "least"


def _notes(experiments: list[Experiment], *, timed: bool = False) -> str:
    """How a table's values came about, and why some are missing."""
    cells = [cell for e in experiments for cell in e.cells]
    said = ["One seed: another one may change the order of close figures."]
    if any(e.seeds > 1 for e in experiments):
        said = ["Means over seeds, and their range from the lowest to the highest."]
    said += [f"{name(cell.mixer)}: {cell.why_not}." for cell in cells if not cell.value and cell.undone]
    said += dict.fromkeys(f"{row.note.rstrip('.')}." for cell in cells for row in cell.done if row.note)
    if any(row.published is not None for cell in cells for row in cell.done):
        said.append("Published: what others reached by the same protocol.")
    if not all(cell.learned for cell in cells):
        said.append("Not learned: it does not beat the most frequent answer by two standard errors.")
    if timed and any(row.contended for cell in cells for row in cell.done):
        said.append(costs.CONTENDED_NOTE)
    return " ".join(said)


def one_task(e: Experiment) -> Table:
    """Everything about one task: its metrics, and what training took."""
    metrics = dict.fromkeys(metric for cell in e.cells for row in cell.done for metric in row.metrics)
    others = [m for m in metrics if m not in (e.row.metric, "tokens", "loss_per_token")]
    columns = [Column(metric_name(e.row.metric), "test", _own(e))]
    columns += [Column(metric_name(other), "test", _direction(other)) for other in others]
    known = [row for cell in e.cells for row in cell.done]
    shown = [effort for effort in EFFORT if any(effort[1](row) is not None for row in known)]
    columns += [Column(head, "training", best) for head, _, _, best in shown]
    timed = any(best for *_, best in shown)
    note = _notes([e], timed=timed)
    if known and not timed:
        note += " Trained on different machines, whose speeds are not compared."
    body: Lines = []
    for cell in e.cells:
        entries = [_score(cell), *(_other(metric, cell) for metric in others), *_effort(cell, shown)]
        body.append((name(cell.mixer), entries))
    about = [e.row.data, e.row.size, f"length {e.row.length:,}"]
    return Table(e.row.title, "mixer", columns, {"": body}, note, " · ".join(about))


def overview(experiments: list[Experiment]) -> Table:
    """Mixers down, the tasks of a group across."""
    heads = [(f"{e.row.title} ({metric_name(e.row.metric)})", _own(e)) for e in experiments]
    columns = [Column(head, best=best) for head, best in heads]
    mixers = looks(cell.mixer for e in experiments for cell in e.cells)
    body: Lines = [(name(mixer), [_score(e.cell(mixer)) for e in experiments]) for mixer in mixers]
    return Table("What each mixer reached", "mixer", columns, {"": body}, _notes(experiments))


def searches(measured: Measured) -> Table | None:
    """The short runs that chose each mixer's learning rate, and longer ones that retried it."""
    rates = sorted({row.rate for row in measured.searches})
    taken = {(row.subject, row.mixer, row.rate) for row in measured.quality}
    rows: dict[str, Lines] = {}
    for subject, steps in dict.fromkeys((row.subject, row.steps) for row in measured.searches):
        mine = [row for row in measured.searches if (row.subject, row.steps) == (subject, steps)]
        lines = rows.setdefault(f"{measured.titles.get(subject, subject)}, {steps:,} steps", [])
        for mixer in looks(row.mixer for row in mine):
            tried = {row.rate: row for row in mine if row.mixer == mixer}
            entries = []
            for row in map(tried.get, rates):
                if row is None or row.loss is None:
                    entries.append(Entry(row.status if row else NOTHING))
                else:
                    chosen = "chosen" if (subject, mixer, row.rate) in taken else ""
                    entries.append(Entry(score("loss", row.loss), more=chosen))
            lines.append((name(mixer), entries))
    columns = [Column(f"{rate:g}", "loss on the validation set, by rate") for rate in rates]
    note = "A search is the same rates for every mixer, in short runs; chosen is what it was trained with."
    return Table("Learning rates that were tried", "mixer", columns, rows, note) if rows else None


def cost(caption: str, rows: list[Cost], *only: costs.Kind) -> Table:
    """Each kind of cost by length, and how it grows; for time also how much faster than softmax."""
    kinds, contest = only or costs.kinds(rows), costs.Contest(rows)
    rows = [row for row in rows if any(kind.read(row) for kind in kinds)]
    lengths, at = sorted({row.length for row in rows}), {(row.mixer, row.length): row for row in rows}
    columns: list[Column] = []
    body: dict[str, list[Entry]] = {mixer: [] for mixer in costs.mixers(rows)}
    for kind in kinds:
        group = kind.title if len(kinds) > 1 else ""
        columns += [Column(f"{n:,}", group, "least") for n in lengths]
        for mixer, entries in body.items():
            entries += [_cost(kind, at.get((mixer, n)), contest.theirs.get(n)) for n in lengths]
        fits = {mixer: costs.growth(costs.points(rows, mixer, kind)) for mixer in body}
        if any(fits.values()):
            columns.append(Column("growth (lengths fitted)", group, "least"))
            for mixer, fit in fits.items():
                entry = Entry(f"n^{fit.exponent:.2f}", fit.exponent, f"({fit.lengths})") if fit else Entry()
                body[mixer].append(entry)
    notes = []
    if costs.TIME in kinds:
        notes += [f"×: as many times as fast as {name(contest.them)}."] if contest.theirs else []
        limit = next((row.limit_gflops for row in rows if row.share), None)
        notes += [f"%: of torch's fastest matrix product, {limit:.0f} GFLOP/s."] if limit else []
        least = {name(row.mixer): digits(row.bound_ms) for row in rows if row.bound_ms}
        bounds = ", ".join(f"{who} {ms}" for who, ms in least.items())
        notes += [f"Reading the weights once from memory takes, in ms: {bounds}."] if bounds else []
        notes += [costs.CONTENDED_NOTE] if any(row.contended for row in rows) else []
    lines = {"": [(name(mixer), entries) for mixer, entries in body.items()]}
    return Table(caption, "tokens", columns, lines, " ".join(notes))


def _cost(kind: costs.Kind, row: Cost | None, softmax: Cost | None) -> Entry:
    value = kind.read(row) if row else None
    if row is None or not value:
        return Entry()
    mark, more = "", []
    if kind is costs.TIME:
        mark = f"{costs.CONTENDED} " if row.contended else ""
        more += [times(softmax.ms / row.ms)] if softmax and softmax is not row else []
        more += [f"{100 * row.share:.0f} %"] if row.share else []
    return Entry(digits(value), value, (mark + (f"({', '.join(more)})" if more else "")).strip())


def speeds(measured: Measured) -> list[Table]:
    """All that was timed, for pages and terminals too narrow for several kinds of cost in one table."""
    found = []
    for work, caption in costs.WORK.items():
        for what, rows in costs.groups(measured, work):
            for kind in costs.kinds(rows):
                found.append(cost(f"{caption.format(what)}; {kind.title}", rows, kind))
    return [*found, *filter(None, [shared(measured.shared)])]


def shared(rows: list[Shared]) -> Table | None:
    """Where the time goes when several processes share a sequence."""
    rows = [row for row in rows if row.ms_at_once is not None]
    if not rows:
        return None
    heads = ["processes", "seconds a step", "without overlap", "waiting", "scan", "states", "beside messages"]
    body: Lines = []
    for row in rows:
        mark = costs.CONTENDED if row.contended else ""
        entries = [str(row.processes), *(f"{ms / 1e3:.3f}{mark}" for ms in (row.ms, row.ms_at_once or 0.0))]
        entries += [f"{row.waiting:.1%}", f"{row.scan:.2%}", f"{row.states:.1%}", f"{row.ms_beside:,.1f} ms"]
        body.append((f"{row.length:,}", [Entry(text) for text in entries]))
    caption = "A training step of one sequence over several processes"
    note = overlap(rows) + (f" {costs.CONTENDED_NOTE}" if any(row.contended for row in rows) else "")
    return Table(caption, "tokens", [Column(head) for head in heads], {"": body}, note)


def overlap(rows: list[Shared]) -> str:
    """What was sent, and whether overlapping messages with work saved more than the times vary."""
    least, most = min(row.sent_bytes for row in rows), max(row.sent_bytes for row in rows)
    sent = f"A process sent {least:,} to {most:,} bytes a step."
    if least == most:
        sent = f"A process sent {most:,} bytes a step, whatever the length and the number of processes."
    saved = [1 - row.ms / (row.ms_at_once or row.ms) for row in rows]
    spread = max(((row.ms_high or row.ms) - (row.ms_low or row.ms)) / row.ms for row in rows)
    shown = "a benefit" if max(saved) > spread else "no benefit is shown here"
    return (
        f"{sent} The overlap took {min(saved):+.1%} to {max(saved):+.1%} off a step, and the middle half of "
        f"a case's steps lay up to {spread:.1%} apart: {shown}."
    )


PAIRS = [  # (what is added, without, with)
    ("the cosine", "relu", "cosformer-paper"),
    ("the cosine, beside gated decay", "cosformer", "cosformer-cosine"),
    ("all that is recommended", "cosformer-paper", "cosformer"),
    ("constant decay", "cosformer-paper", "cosformer-ladder"),
    ("one softmax layer in four", "cosformer", "cosformer-hybrid"),
    ("rotary positions, in softmax", "softmax", "softmax+rope"),
]


def ablation(e: Experiment) -> Table | None:
    """Scores with and without each part, where both were run."""
    body: Lines = []
    for what, without, with_ in PAIRS:
        a, b = e.cell(without), e.cell(with_)
        if a and b and a.value and b.value:
            before, after = a.value.mean, b.value.mean
            text = f"{'+' if after > before else '-'}{change(e.row.metric, before, after)}"
            names = Entry(f"{name(without)} → {name(with_)}")
            body.append((what, [names, _score(a), _score(b), Entry(text)]))
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


# The paper's tables, shown apart from ours: its data and models are others.
PAPER = tomllib.loads(resources.files(__package__).joinpath("paper.toml").read_text(encoding="utf-8"))


def paper_table(table: dict[str, Any]) -> Table:
    """A table of the paper in full."""
    columns = [Column(head, best="least" if head in table["least"] else "most") for head in table["columns"]]
    body: Lines = []
    for model, figures in table["rows"].items():
        body.append((model, [Entry() if x == "-" else Entry(x, float(x)) for x in figures.split()]))
    caption = f"The paper's table {table['number']}: {table['title']}"
    return Table(caption, "model", columns, {"": body}, table["note"], table["setting"])
