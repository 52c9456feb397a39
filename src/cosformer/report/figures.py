"""The page's figures as data: which lines are in a panel, its caption, what to see. Drawing them is plots.py's job."""

import dataclasses
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from .results import Cell, Experiment, Results
from .style import digits, listed, looks, metric_name, percent
from .summary import OURS, THEIRS, name

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    mixer: str
    points: Points
    band: list[tuple[float, float, float]] = dataclasses.field(
        default_factory=list
    )  # (x, low, high) over seeds
    variant: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes; with `log` both are logarithmic."""

    id: str
    title: str  # of the vertical axis, written above it
    x: str
    lines: list[Line]
    log: bool = False
    crossings: Points = dataclasses.field(default_factory=list)
    scatter: bool = False
    ceiling: float | None = None  # where the vertical axis ends, if not above the highest point


@dataclass(frozen=True)
class Figure:
    id: str
    title: str
    caption: str
    panels: list[Panel]


def fit(points: Points) -> float | None:
    """The exponent b of y ~ x^b: least squares on logarithms over the longest four lengths; None below two."""
    logs = [(math.log(x), math.log(y)) for x, y in sorted(points)[-4:] if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    mx, my = (sum(p[i] for p in logs) / len(logs) for i in (0, 1))
    return sum((x - mx) * (y - my) for x, y in logs) / sum((x - mx) ** 2 for x, _ in logs)


def crossing(a: Points, b: Points) -> tuple[float, float] | None:
    """Where curve a first passes curve b, between two lengths both have; straight lines on log axes."""
    first, second = dict(a), dict(b)
    both = sorted(x for x in first.keys() & second.keys() if first[x] > 0 and second[x] > 0)
    gaps = [(x, math.log(first[x] / second[x])) for x in both]
    for (x0, g0), (x1, g1) in zip(gaps, gaps[1:]):
        if g0 * g1 < 0:
            share = g0 / (g0 - g1)
            x = math.exp(math.log(x0) + share * math.log(x1 / x0))
            return x, math.exp(math.log(first[x0]) + share * math.log(first[x1] / first[x0]))
    return None


def ident(*words: object) -> str:
    """Letters, digits and hyphens: a file name, and part of an id."""
    text = "-".join(str(w) for w in words if w not in (None, ""))
    return "-".join("".join(c if c.isascii() and c.isalnum() else " " for c in text).split()).lower() or "x"


def learning(experiments: list[Experiment], id_: str) -> Figure | None:
    """Loss against tokens and against seconds, the mean over seeds; two panels a task."""
    panels, lowest = [], []
    for number, e in enumerate(experiments):
        held = all(len(_curve(c, "eval_loss", "tokens")) > 1 for c in e.cells if c.done)
        loss, title = ("eval_loss", "held-out loss") if held else ("loss", "training loss")
        if len(experiments) > 1:
            title = f"{textwrap.shorten(e.title, 48)}\n{title}"
        drawn = []
        for x, label in (("tokens", "tokens seen"), ("seconds", "seconds of training")):
            lines = [
                Line(c.mixer, p, _band(c, loss, x), c.variant)
                for c in e.cells
                if len(p := _curve(c, loss, x)) > 1
            ]
            if lines:
                drawn.append(
                    Panel(
                        ident("learning", id_, number, e.task, x),
                        title,
                        label,
                        lines,
                        ceiling=_ceiling(lines),
                    )
                )
        if drawn:
            best = name(min(drawn[0].lines, key=lambda line: line.points[-1][1]).mixer)
            lowest.append(f"{best} on {e.title}" if len(experiments) > 1 else best)
        panels += drawn
    if not panels:
        return None
    caption = f"What each mixer learns from the same tokens, and in the same time. Lowest at the end: {'; '.join(lowest)}."
    if any(p.ceiling for p in panels):
        caption += " The first tenth of the training runs out of the frame."
    if any(e.seeds > 1 for e in experiments):
        caption += " Lines are means over seeds, bands their range."
    return Figure(ident("learning", id_), "Learning", caption, panels)


def _ceiling(lines: list[Line]) -> float | None:
    """The highest loss after a tenth of each training: the fall at the start would flatten all that differs."""
    later = [y for line in lines for x, y in line.points if x > 0.1 * line.points[-1][0]]
    if not later:
        return None
    low, high = min(later), max(later)
    top = high + 0.08 * (high - low)
    return top if top < max(y for line in lines for _, y in line.points) else None


def _by_step(cell: Cell, field: str, x: str) -> list[list[tuple[float, float]]]:
    """For each step that every seed has, the (x, value) of each seed."""
    seeds = []
    for row in cell.done:
        kept = [p for p in row.get("curve") or [] if p.get(x) is not None and p.get(field) is not None]
        seeds.append(
            {i if p.get("step") is None else p["step"]: (p[x], p[field]) for i, p in enumerate(kept)}
        )
    steps = sorted(set.intersection(*(set(s) for s in seeds))) if seeds else []
    return [[s[step] for s in seeds] for step in steps]


def _curve(cell: Cell, field: str, x: str) -> Points:
    return [(mean(p[0] for p in at), mean(p[1] for p in at)) for at in _by_step(cell, field, x)]


def _band(cell: Cell, field: str, x: str) -> list[tuple[float, float, float]]:
    if len(cell.done) < 2:
        return []
    return [
        (sum(p[0] for p in at) / len(at), min(p[1] for p in at), max(p[1] for p in at))
        for at in _by_step(cell, field, x)
    ]


def cost_groups(results: Results, work: str) -> Iterator[tuple[str, list[dict]]]:
    """Rows that may stand in one table, with what they are: of one kind of work, whole model or operator, causal or not."""
    groups: dict[tuple, list[dict]] = {}
    for row in results.cost:
        if row["work"] == work:
            key = (row.get("what") or "operator", row.get("causal", True), row.get("heads"), row.get("size"))
            groups.setdefault(key, []).append(row)
    for (what, causal, heads, size), rows in sorted(
        groups.items(), key=lambda g: (g[0][0] != "model", not g[0][1])
    ):
        shape = f", {heads:g} heads of {size:g}" if heads and size else ""
        what = {"model": "a whole model", "operator": "one attention alone"}.get(what, what)
        yield f"{what}, {'causal' if causal else 'not causal'}{shape}", rows


def points(rows: list[dict], mixer: str, field: str, scale: float = 1.0) -> Points:
    return sorted(
        (r["length"], r[field] * scale) for r in rows if r["mixer"] == mixer and (r.get(field) or 0) > 0
    )


def training_cost(results: Results) -> list[Figure]:
    """Time and memory against length on log axes, with exponents and crossings."""
    figures = []
    for number, (what, rows) in enumerate(cost_groups(results, "training")):
        if len({r["length"] for r in rows}) < 2:
            continue
        mixers = list(looks(r["mixer"] for r in rows))
        panels = []
        for quantity, title in (
            ("ms", "time of forward and backward, ms"),
            ("memory_mib", "peak memory, MiB"),
        ):
            lines = [Line(m, p) for m in mixers if len(p := points(rows, m, quantity)) > 1]
            cross = [c for _, _, c in _pairs(rows, quantity)] if quantity == "ms" else []
            if lines:
                panels.append(
                    Panel(
                        ident("cost", number, quantity),
                        title,
                        "length, tokens",
                        lines,
                        log=True,
                        crossings=cross,
                    )
                )
        caption = f"Training {what}. {growth_text(rows, mixers)} {crossing_text(rows)}".strip()
        figures.append(Figure(ident("cost", number), "Cost against length", caption, panels))
    return figures


def growth_text(rows: list[dict], mixers: list[str]) -> str:
    slopes = [(name(m), slope) for m in mixers if (slope := fit(points(rows, m, "ms"))) is not None]
    return (
        "Fitted to the longest four lengths, time grows as "
        + listed([f"n^{s:.2f} ({m})" for m, s in slopes])
        + "."
        if slopes
        else ""
    )


def _pairs(rows: list[dict], field: str) -> list[tuple[str, str, tuple[float, float]]]:
    """Our mixer and each softmax that it passes."""
    ours = next((m for m in OURS if any(r["mixer"] == m for r in rows)), OURS[0])
    found = [(ours, m, crossing(points(rows, ours, field), points(rows, m, field))) for m in THEIRS]
    return [(a, b, c) for a, b, c in found if c]


def crossing_text(rows: list[dict]) -> str:
    """Where the time of our mixer crosses softmax's, or which is ahead throughout."""
    ours = next((m for m in OURS if any(r["mixer"] == m for r in rows)), OURS[0])
    mine, said = dict(points(rows, ours, "ms")), []
    crossed = {b: c for _, b, c in _pairs(rows, "ms")}
    for softmax in THEIRS:
        theirs = dict(points(rows, softmax, "ms"))
        if both := sorted(mine.keys() & theirs.keys()):
            if softmax in crossed:
                said.append(
                    f"The ring marks where {name(ours)} and {name(softmax)} cross, near {digits(crossed[softmax][0])} tokens."
                )
            else:
                word = "faster" if mine[both[-1]] < theirs[both[-1]] else "slower"
                said.append(f"{name(ours)} is {word} than {name(softmax)} at every length measured.")
    return " ".join(said)


def decoding_cost(results: Results) -> list[Figure]:
    figures = []
    for number, (what, rows) in enumerate(cost_groups(results, "decoding")):
        mixers = list(looks(r["mixer"] for r in rows))
        panels = []
        for quantity, title, scale in (
            ("ms", "time per token, ms", 1.0),
            ("cache_bytes", "cache, MiB", 2.0**-20),
        ):
            lines = [Line(m, p) for m in mixers if len(p := points(rows, m, quantity, scale)) > 1]
            if lines:
                panels.append(
                    Panel(ident("decoding", number, quantity), title, "tokens of context", lines, log=True)
                )
        flat = [
            name(m) for m in mixers if len(c := {y for _, y in points(rows, m, "cache_bytes")}) == 1 and c
        ]
        caption = f"Decoding with {what}: what the next token costs after a context. "
        caption += (
            f"A flat line is a cost that does not grow; the cache of {listed(flat)} does not." if flat else ""
        )
        if panels:
            figures.append(Figure(ident("decoding", number), "Decoding", caption.strip(), panels))
    return figures


def trade(results: Results) -> Figure | None:
    """Quality against the speed of training, one panel a task."""
    panels = []
    for number, e in enumerate(results.experiments):
        lines = []
        scale = 100.0 if percent(e.metric) else 1.0
        for c in e.cells:
            rate, value = c.over_seeds("tokens_per_second"), c.value
            if rate and value:
                spread = scale * (value[1] or 0)
                at = (rate[0], scale * value[0])
                lines.append(
                    Line(
                        c.mixer, [at], [(at[0], at[1] - spread, at[1] + spread)] if spread else [], c.variant
                    )
                )
        if len(lines) > 1:
            better = "higher is better" if e.greater else "lower is better"
            title = f"{textwrap.shorten(e.title, 48)}\n{metric_name(e.metric)} ({better})"
            panels.append(
                Panel(
                    ident("trade", number, e.task),
                    title,
                    "tokens per second of training",
                    lines,
                    scatter=True,
                )
            )
    caption = (
        "Each point is a mixer on a task: how fast it trains (to the right is faster) and what it reached."
    )
    return Figure("trade", "", caption, panels) if panels else None
