"""The page's figures as data: which lines are in a panel, and what the caption says of them."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from ..results import Cost
from . import costs
from .cells import Cell, Experiment, Measured, span
from .chart import Line, Panel
from .style import count, digits, ident, looks, metric_name, name, percent
from .table import Column, Entry, Lines, Table


@dataclass(frozen=True)
class Figure:
    template: ClassVar[str] = "figure.html"
    id: str
    title: str
    caption: str
    panels: list[Panel]

    def mixers(self) -> set[str]:
        return {line.mixer for panel in self.panels for line in panel.lines}


def _title(text: str) -> str:
    return textwrap.shorten(text, 54, placeholder=" …")


def _seeds(experiments: list[Experiment]) -> str:
    return " Lines are means over seeds, bands their range." if any(e.seeds > 1 for e in experiments) else ""


def learning(experiments: list[Experiment]) -> Figure | None:
    """Loss against tokens and, unless the machine was contended, against seconds; means over seeds."""
    panels, lowest = [], []
    for number, e in enumerate(experiments):
        held = all(len(_curve(cell, "eval_loss", "tokens").points) > 1 for cell in e.cells if cell.done)
        loss, title = ("eval_loss", "held-out loss") if held else ("loss", "training loss")
        several = len(experiments) > 1
        drawn, axes = [], [("tokens", "tokens seen"), ("seconds", "seconds of training")]
        busy = any(row.contended for cell in e.cells for row in cell.done)
        for x, label in axes[:1] if busy else axes:
            lines = [line for cell in e.cells if len((line := _curve(cell, loss, x)).points) > 1]
            if lines:
                id_ = ident("learning", e.row.group, number, e.row.task, x)
                heading = _title(e.row.title) if several else ""
                drawn.append(Panel(id_, title, label, lines, heading, reach=_reach(lines)))
        if drawn:
            best = name(min(drawn[0].lines, key=lambda line: line.points[-1][1]).mixer)
            lowest.append(f"{best} on {e.row.title}" if several else best)
        panels += drawn
    if not panels:
        return None
    timed = any(panel.x.startswith("seconds") for panel in panels)
    caption = f"What each mixer learns from the same tokens{', and in the same time' if timed else ''}."
    caption += f" Lowest at the end: {'; '.join(lowest)}."
    if any(panel.reach for panel in panels):
        caption += " The first tenth of the training runs out of the frame."
    id_ = ident("learning", experiments[0].row.group)
    return Figure(id_, "Learning", caption + _seeds(experiments), panels)


def _reach(lines: list[Line]) -> tuple[float, float] | None:
    """The range of losses after a tenth of each training: the first fall would flatten all differences."""
    later = [y for line in lines for x, y in line.points if x > 0.1 * line.points[-1][0]]
    highest = max(y for line in lines for _, y in line.points)
    return (min(later), max(later)) if later and min(later) < max(later) < highest else None


def _curve(cell: Cell, loss: str, x: str) -> Line:
    """A loss at the steps that every seed has."""
    seeds = []
    for row in cell.done:
        whole = [point for point in row.curve if {"step", x, loss} <= point.keys()]
        seeds.append({point["step"]: (point[x], point[loss]) for point in whole})
    steps = sorted(set.intersection(*map(set, seeds))) if seeds else []
    at = [zip(*(seed[step] for seed in seeds)) for step in steps]
    return _line(cell.mixer, [(fmean(places), values) for places, values in at])


def _line(mixer: str, at: Iterable[tuple[float, Sequence[float]]]) -> Line:
    """Means over seeds, and their range; `at` holds (x, the values of all seeds there)."""
    found = [(x, span(values)) for x, values in at]
    band = [(x, value.low, value.high) for x, value in found if value and value.seeds > 1]
    return Line(mixer, [(x, value.mean) for x, value in found if value], band)


def recall(experiments: list[Experiment]) -> Figure | None:
    """Accuracy against the number of pairs, one panel per length."""
    asked = [e for e in experiments if isinstance(e.row.settings.get("pairs"), int)]
    asked.sort(key=lambda e: e.row.settings["pairs"])
    panels = []
    for length in sorted({e.row.length for e in asked}):
        found: dict[str, list[tuple[float, list[float]]]] = {}
        for e in asked:
            for cell in e.cells:
                if e.row.length == length and cell.value:
                    values = [100 * row.value for row in cell.done if row.value is not None]
                    found.setdefault(cell.mixer, []).append((e.row.settings["pairs"], values))
        lines = [_line(mixer, at) for mixer, at in found.items()]
        if any(len(line.points) > 1 for line in lines):
            id_, heading = ident("recall", length), f"{length:,} tokens"
            title, x = "accuracy, %", "pairs to remember"
            panels.append(Panel(id_, title, x, lines, heading, "x", reach=(0.0, 100.0)))
    title = "Accuracy against the number of pairs"
    caption = "Accuracy by the number of pairs, at each length after the same number of steps. Every key is"
    caption += (
        " asked for once: with fewer pairs there are fewer answers to learn from, and more random tokens."
    )
    return Figure("recall", title, caption + _seeds(asked), panels) if panels else None


def positions(experiments: list[Experiment], measured: Measured) -> Figure | None:
    """Loss against the position in the context: does more context help?"""
    panels: list[Panel] = []
    for subject in dict.fromkeys(e.row.subject for e in experiments):
        rows = [row for row in measured.positions if row.subject == subject]
        lines = []
        for mixer in looks(row.mixer for row in rows):
            seeds = [row for row in rows if row.mixer == mixer]
            lines.append(_line(mixer, zip(seeds[0].ends, zip(*(row.loss for row in seeds)))))
        if any(len(line.points) > 1 for line in lines):
            id_, heading = ident("positions", len(panels), subject), _title(measured.titles[subject])
            title, x = "loss, nats a token", "position in the context"
            panels.append(Panel(id_, title, x, lines, heading, "x"))
    caption = "Loss by the position in the context, on the test set"
    caption += f": a line that still falls uses more context.{_seeds(experiments)}"
    return Figure("positions", "Loss against context", caption, panels) if panels else None


def cost_panels(rows: list[Cost], id_: str) -> list[Panel]:
    """A panel for each kind of cost measured at two lengths or more; a ring where ours crosses softmax."""
    panels = []
    place = costs.Contest(rows).crossing
    x = "tokens of context" if rows[0].work in ("decoding", "generating") else "length, tokens"
    for kind in costs.kinds(rows):
        curves = {mixer: costs.points(rows, mixer, kind) for mixer in costs.mixers(rows)}
        if lines := [Line(mixer, curve) for mixer, curve in curves.items() if len(curve) > 1]:
            rings = [place] if place and kind is costs.TIME else []
            panels.append(Panel(f"{id_}-{kind.id}", kind.title, x, lines, log="xy", rings=rings))
    return panels


def cost(caption: str, rows: list[Cost], number: int) -> Figure | None:
    """What the work costs against length, on log axes."""
    id_, said = f"{rows[0].work}-{number}", f"{caption}. {costs.Contest(rows).crossing_text()}"
    panels = cost_panels(rows, id_)
    return Figure(id_, "Cost against length", said.strip(), panels) if panels else None


def trade(measured: Measured) -> Figure | None:
    """Quality against the speed of training, one panel per task; speeds are of undisturbed seeds."""
    panels = []
    for number, e in enumerate(measured.experiments):
        lines = []
        scale = 100.0 if percent(e.row.metric) else 1.0
        for cell in e.cells:
            rate = cell.over_seeds(lambda row: None if row.contended else row.tokens_per_second)
            value = cell.value
            if rate and value:
                band = [(rate.mean, scale * value.low, scale * value.high)] if value.seeds > 1 else []
                lines.append(Line(cell.mixer, [(rate.mean, scale * value.mean)], band))
        if len(lines) > 1 and e.row.group != "recall":  # its settings have a figure of their own
            better = "higher" if e.row.greater_is_better else "lower"
            title = f"{metric_name(e.row.metric)} ({better} is better)"
            id_, heading = ident("trade", number, e.row.task), _title(e.row.title)
            panels.append(Panel(id_, title, "tokens per second of training", lines, heading, scatter=True))
    caption = "Each point is a mixer on a task: how fast it trains (to the right is faster)"
    caption += " and what it reached."
    return Figure("trade", "", caption, panels) if panels else None


def described(panel: Panel) -> str:
    """A panel in words, for readers who cannot see it."""
    ends = [(name(line.mixer), *line.points[-1]) for line in panel.lines]
    said = "; ".join(f"{mixer} {digits(y)} at {count(x)}" for mixer, x, y in ends)
    return f"{_full_title(panel)} against {panel.x}. At the end: {said}."


def _full_title(panel: Panel) -> str:
    text = ", ".join(filter(None, [panel.heading, panel.title]))
    return text[:1].upper() + text[1:]


def values(panel: Panel) -> Table:
    """A panel's numbers as a table: a column per mixer if all have the same x."""
    caption = f"{_full_title(panel)} against {panel.x}"
    places = sorted({x for line in panel.lines for x, _ in line.points})
    if panel.log or all([x for x, _ in line.points] == places for line in panel.lines):
        at = [dict(line.points) for line in panel.lines]
        body: Lines = [(f"{x:,g}", [Entry(digits(y[x])) if x in y else Entry() for y in at]) for x in places]
        return Table(caption, panel.x, [Column(name(line.mixer)) for line in panel.lines], {"": body})
    rows: dict[str, Lines] = {}
    for line in panel.lines:
        rows[name(line.mixer)] = [(digits(x), [Entry(digits(y))]) for x, y in line.points]
    return Table(caption, panel.x, [Column(panel.title)], rows)
