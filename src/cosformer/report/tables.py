"""The page's tables as data, laid out as the paper's: mixers down, tasks or lengths across, the paper's figures beside ours."""

from collections.abc import Callable
from dataclasses import dataclass, field

from . import paper
from .figures import cost_groups, fit, points
from .paper import PaperTable
from .results import Cell, Experiment, Results
from .style import count, digits, listed, looks, metric_name, percent, score, times

PAPER = "paper, at the paper's scale"
NOTHING = "–"


@dataclass(frozen=True)
class Entry:
    text: str
    value: float | None = None  # what the best of a column is found by
    why: str = ""  # why there is no value


@dataclass(frozen=True)
class Column:
    head: str
    group: str = ""  # columns of one group share a heading; PAPER marks the paper's
    best: str = ""  # "least" or "most" wins; empty where there is nothing to win
    words: bool = False  # text, not numbers


@dataclass(frozen=True)
class Table:
    caption: str
    corner: str  # the heading of the first column
    columns: list[Column]
    rows: dict[str, list[tuple[str, list[Entry]]]] = field(
        default_factory=dict
    )  # by heading of a group of rows, or ""
    note: str = ""
    about: str = ""  # more of the caption, less important

    def winners(self, group: str) -> set[tuple[int, int]]:
        """(row, column) of what is best within a group of rows: all that show the same, of two or more."""
        found = set()
        for j, column in enumerate(self.columns):
            values = [(i, e[j]) for i, (_, e) in enumerate(self.rows[group]) if e[j].value is not None]
            if column.best and len(values) > 1:
                best = (min if column.best == "least" else max)(values, key=lambda v: v[1].value or 0.0)[
                    1
                ].text
                found |= {(i, j) for i, entry in values if _bare(entry.text) == _bare(best)}
        return found


def _bare(text: str) -> str:
    return text.split(" ±")[0]


def label(cell: Cell) -> str:
    text = looks([cell.mixer])[cell.mixer].label
    return f"{text}, {cell.variant}" if cell.variant else text


def in_order(cells: list[Cell]) -> list[Cell]:
    order = list(looks(c.mixer for c in cells))
    return sorted(cells, key=lambda c: order.index(c.mixer))


def score_entry(cell: Cell | None, metric: str) -> Entry:
    if cell is None:
        return Entry(NOTHING, why="not measured")
    if not cell.value:
        return Entry(cell.undone[-1]["status"] if cell.undone else NOTHING, why=cell.why_not)
    return Entry(score(metric, *cell.value), cell.value[0])


def paper_entry(table: PaperTable, mixer: str, column: str, mixers: list[str]) -> Entry:
    figure = paper.figure(table, mixer, column, mixers)
    return Entry(NOTHING) if figure is None else Entry(paper.shown(table, column, figure))


# What the training took: (heading, field, how it is written).
EFFORT: list[tuple[str, str, Callable[[float], str]]] = [
    ("parameters", "parameters", count),
    ("tokens", "tokens", count),
    ("steps", "steps", lambda v: f"{v:,.0f}"),
    ("seconds", "seconds", digits),
    ("tokens/s", "tokens_per_second", digits),
]


def effort(cell: Cell) -> list[Entry]:
    entries = []
    for _, name, write in EFFORT:
        found = cell.over_seeds(name)
        entries.append(Entry(write(found[0]), found[0]) if found else Entry(NOTHING))
    return entries


def _effort_columns() -> list[Column]:
    best = {"seconds": "least", "tokens_per_second": "most"}
    return [Column(head, "training", best.get(name, "")) for head, name, _ in EFFORT]


def _better(e: Experiment) -> str:
    return "most" if e.greater else "least"


def about(e: Experiment) -> str:
    """What a table compares, in one line."""
    length = f"length {e.length:,}" if e.length else ""
    data = e.data if e.data != e.title else ""
    return " · ".join(filter(None, [data, e.size, length]))


def seeds_note(experiments: list[Experiment]) -> str:
    """What stands behind a value."""
    if max((e.seeds for e in experiments), default=0) > 1:
        return "Mean over seeds ± half the range between them."
    return "One seed: another one may change the order of close figures."


def one_task(e: Experiment, table: PaperTable | None = None, column: str = "") -> Table:
    """Everything about one task: its metrics, what the training took, the paper's figure."""
    done = e.rows
    names = list(
        dict.fromkeys(
            n for r in done for n in r.get("metrics") or {} if n not in (e.metric, "tokens", "loss_per_token")
        )
    )
    columns = [Column(metric_name(e.metric), "test", _better(e))]
    columns += [Column(metric_name(n), "test", _direction(n)) for n in names] + _effort_columns()
    mixers = [c.mixer for c in e.cells]
    rows = []
    for cell in in_order(e.cells):
        entries = [score_entry(cell, e.metric)]
        for n in names:
            found = cell.over_seeds(n, metric=True)
            entries.append(Entry(score(n, *found), found[0]) if found else Entry(NOTHING))
        rows.append((label(cell), entries + effort(cell)))
        if table:
            rows[-1][1].append(paper_entry(table, cell.mixer, column, mixers))
    if table:
        unit = "perplexity" if table is paper.LM else "accuracy, %"
        columns.append(Column(f"{unit} ({column})", PAPER))
    why = _why(e.cells)
    return Table(e.title, "mixer", columns, {"": rows}, f"{seeds_note([e])} {why}".strip(), about(e))


def _direction(metric: str) -> str:
    return (
        "most"
        if percent(metric) or metric in ("bleu", "chrf")
        else "least"
        if "loss" in metric or "per" in metric
        else ""
    )


def _why(cells: list[Cell]) -> str:
    """The reasons of what was refused or failed."""
    return " ".join(f"{label(c)}: {c.why_not}." for c in cells if not c.value and c.undone)


def several_tasks(experiments: list[Experiment], table: PaperTable, names: dict[int, str]) -> Table:
    """Mixers down, tasks across; `names` holds the paper's names of tasks by index."""
    cells = [c for e in experiments for c in e.cells]
    mixers = list(looks(c.mixer for c in cells))
    columns = [Column(_short(e, names.get(i)), "ours", _better(e)) for i, e in enumerate(experiments)]
    columns += [Column(names[i], PAPER) for i in sorted(names)]
    rows = []
    for mixer in mixers:
        entries = [score_entry(e.cell(mixer), e.metric) for e in experiments]
        for i in sorted(names):
            entries.append(paper_entry(table, mixer, names[i], mixers))
        rows.append((looks([mixer])[mixer].label, entries))
    note = f"{seeds_note(experiments)} {_why(cells)}".strip()
    return Table("What each mixer reached", "mixer", columns, {"": rows}, note)


def _short(e: Experiment, name: str | None) -> str:
    return f"{name or e.title} ({metric_name(e.metric)})"


def took(experiments: list[Experiment]) -> Table:
    """What the training took, task by task."""
    rows = {
        " · ".join(filter(None, [e.title, about(e)])): [
            (label(c), effort(c)) for c in in_order(e.cells) if c.done
        ]
        for e in experiments
    }
    columns = [Column(c.head, "", c.best) for c in _effort_columns()]
    return Table("What the training took", "mixer", columns, rows)


def training_cost(results: Results) -> list[Table]:
    """Time and memory against length, with the exponent of growth."""
    tables = []
    for what, rows in cost_groups(results, "training"):
        mixers = list(looks(r["mixer"] for r in rows))
        lengths = sorted({r["length"] for r in rows})
        parts = [("ms", "time, ms")] + [("memory_mib", "peak memory, MiB")] * any(
            r.get("memory_mib") for r in rows
        )
        columns = [Column(f"{n:,}", head, "least") for _, head in parts for n in lengths]
        columns.insert(len(lengths), Column("growth", "time, ms", "least"))
        body = []
        for m in mixers:
            entries = []
            for name, _ in parts:
                mine = dict(points(rows, m, name))
                entries += [Entry(digits(mine[n]), mine[n]) if n in mine else Entry(NOTHING) for n in lengths]
                if name == "ms":
                    slope = fit(points(rows, m, name))
                    entries.append(Entry(f"n^{slope:.2f}", slope) if slope is not None else Entry(NOTHING))
            body.append((looks([m])[m].label, entries))
        tables.append(Table(f"Training {what}: forward and backward", "mixer", columns, {"": body}))
    return tables


def speedups(results: Results) -> list[Table]:
    """Speed as a multiple of softmax's, which can stand beside the paper's."""
    made = []
    for what, rows in cost_groups(results, "training"):
        mixers = list(looks(r["mixer"] for r in rows))
        base = next((m for m in ("softmax", "softmax+rope") if m in mixers), None)
        if base is None or len(mixers) < 2:
            continue
        softmax = dict(points(rows, base, "ms"))
        theirs = [
            c
            for c in paper.SPEED.columns
            if c.startswith("training") and paper.figure(paper.SPEED, "softmax", c, ["softmax"])
        ]
        columns = [Column(f"{n:,}", "ours, by length", "most") for n in softmax]
        columns += [Column(c.removeprefix("training, "), PAPER) for c in theirs]
        body = []
        for m in mixers:
            mine = dict(points(rows, m, "ms"))
            entries = [
                Entry(times(softmax[n] / mine[n]), softmax[n] / mine[n]) if n in mine else Entry(NOTHING)
                for n in softmax
            ]
            for c in theirs:
                one, other = (paper.figure(paper.SPEED, x, c, mixers) for x in (m, base))
                entries.append(Entry(times(one / other), one / other) if one and other else Entry(NOTHING))
            body.append((looks([m])[m].label, entries))
        note = "The paper's: byte classification, not causal, one A6000; its Transformer ran out of memory beyond 2K."
        name = looks([base])[base].short
        made.append(
            Table(f"Training speed as a multiple of {name}'s", "mixer", columns, {"": body}, note, what)
        )
    return made


def decoding_cost(results: Results) -> list[Table]:
    tables = []
    for what, rows in cost_groups(results, "decoding"):
        mixers, lengths = list(looks(r["mixer"] for r in rows)), sorted({r["length"] for r in rows})
        parts = [("ms", "time per token, ms", 1.0), ("cache_bytes", "cache, MiB", 2.0**-20)]
        columns = [Column(f"{n:,}", head, "least") for _, head, _ in parts for n in lengths]
        body = []
        for m in mixers:
            entries = []
            for name, _, scale in parts:
                mine = dict(points(rows, m, name, scale))
                entries += [Entry(digits(mine[n]), mine[n]) if n in mine else Entry(NOTHING) for n in lengths]
            body.append((looks([m])[m].label, entries))
        tables.append(
            Table(
                f"Decoding with {what}: the next token after a context of so many tokens",
                "mixer",
                columns,
                {"": body},
            )
        )
    return tables


STUDIED = ["identity", "leaky_relu", "relu", "softmax", "softmax+rope"]
PAIRS = [  # (what is added, without, with)
    ("the cosine", "relu", "cosformer-paper"),
    ("the cosine, beside gated decay", "cosformer-no-cosine", "cosformer"),
    ("gated decay", "cosformer-paper", "cosformer"),
    ("constant decay", "cosformer-paper", "cosformer-ladder"),
    ("rotary positions, in softmax", "softmax", "softmax+rope"),
]


def study(e: Experiment) -> Table | None:
    """The paper's table 1: only the similarity changes."""
    cells = [c for m in STUDIED if (c := e.cell(m)) and c.value]
    if not any(c.mixer in ("identity", "leaky_relu", "relu") for c in cells) or len(cells) < 2:
        return None
    mixers = [c.mixer for c in cells]
    loss = next(
        (
            n
            for n in ("test_loss", "loss", "loss_per_token")
            if any(c.over_seeds(n, metric=True) for c in cells)
        ),
        None,
    )
    columns = [Column(metric_name(e.metric), "ours", _better(e))] + [Column("loss", "ours", "least")] * bool(
        loss
    )
    columns += [Column(c, f"{PAPER} (unconfirmed)") for c in paper.STUDY.columns]
    rows = []
    for c in cells:
        entries = [score_entry(c, e.metric)]
        if loss:
            found = c.over_seeds(loss, metric=True)
            entries.append(Entry(score(loss, *found), found[0]) if found else Entry(NOTHING))
        for column in paper.STUDY.columns:
            entries.append(paper_entry(paper.STUDY, c.mixer, column, mixers))
        rows.append((label(c), entries))
    return Table(f"Which similarity: {e.title}", "similarity", columns, {"": rows}, seeds_note([e]))


def ablation(e: Experiment) -> Table | None:
    """With and without each part, where both were run."""
    rows = []
    for what, without, with_ in PAIRS:
        a, b = e.cell(without), e.cell(with_)
        if a and b and a.value and b.value:
            change = b.value[0] - a.value[0]
            text = (
                f"{100 * change:+.1f} points"
                if percent(e.metric)
                else f"{100 * change / a.value[0]:+.1f} %"
                if a.value[0]
                else NOTHING
            )
            names = f"{looks([without])[without].short} → {looks([with_])[with_].short}"
            rows.append(
                (what, [Entry(names), score_entry(a, e.metric), score_entry(b, e.metric), Entry(text)])
            )
    if not rows:
        return None
    columns = [Column("mixers", words=True), Column("without"), Column("with"), Column("change")]
    note = f"By {metric_name(e.metric)}; {'higher' if e.greater else 'lower'} is better. {seeds_note([e])}"
    return Table(f"What each part is worth: {e.title}", "part", columns, {"": rows}, note)


def exactness(results: Results) -> Table:
    """The largest difference from the definition, beside what is allowed."""
    whats = [w for w in ("output", "gradient") if any(r["what"] == w for r in results.exactness)]
    whats += sorted({r["what"] for r in results.exactness} - {"output", "gradient"})
    columns = [Column(head, what) for what in whats for head in ("largest", "allowed")]
    at = {(f"{r['backend']}, {r['dtype']}", r["mode"], r["what"]): r for r in results.exactness}
    rows: dict[str, list[tuple[str, list[Entry]]]] = {}
    for group, mode in sorted({key[:2] for key in at}):
        entries = []
        for row in (at.get((group, mode, what)) for what in whats):
            too_large = row and row["difference"] > row["allowed"]
            entries.append(
                Entry(f"{row['difference']:.1e}{' (too large)' * bool(too_large)}" if row else NOTHING)
            )
            entries.append(Entry(f"{row['allowed']:.0e}" if row else NOTHING))
        rows.setdefault(group, []).append((mode, entries))
    wrong = sum(r["difference"] > r["allowed"] for r in results.exactness)
    note = (
        f"{wrong} of {len(at)} are larger than allowed."
        if wrong
        else f"All {len(at)} are within what is allowed."
    )
    return Table("Difference from the definition, computed in float64", "mode", columns, rows, note)


def paper_table(table: PaperTable) -> Table:
    """A table of the paper in full."""
    columns = [Column(c, best="least" if table is paper.LM or c == "loss" else "most") for c in table.columns]
    rows = []
    for name, values in table.rows.items():
        cells = zip(table.columns, values)
        rows.append(
            (name, [Entry(NOTHING) if v is None else Entry(paper.shown(table, c, v), v) for c, v in cells])
        )
    unconfirmed = (
        "Unconfirmed: these figures could not be checked against the paper."
        if table.number in paper.UNCONFIRMED
        else ""
    )
    caption = f"The paper's table {table.number}: {table.title}"
    return Table(
        caption,
        "model",
        columns,
        {"": rows},
        " ".join(filter(None, [table.note, unconfirmed])),
        table.setting,
    )


def not_measured(found: list[str], table: PaperTable) -> str:
    """The paper's tasks that this report has not."""
    missing = [c for c in table.columns if c != "average" and c not in found]
    return f"Not measured here: {listed(missing)}." if missing else ""
