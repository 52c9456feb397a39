"""One self-contained HTML page of results, and its charts as files; the same results give the same bytes.

A page is a list of sections, a section is a list of parts, and a part names its template.
"""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ..results import Picture, Row
from . import chart, costs, figures, heatmap, tables
from .cells import GROUPS, Measured
from .figures import Figure
from .style import PALETTE, digits, ident, looks, name
from .summary import paragraphs

SCALE = (
    "The paper's figures come from other data, models and machines: compare the order of mixers with them,"
    " never a number with a number."
)
PICTURES = (
    "Queries down, keys across; bright is much weight, on a scale of its own for each matrix (red is positive"
    " and blue negative where weights have signs); blank is masked."
)
MACHINE = {"cpu": "processor", "isa": "instruction set", "memory_gib": "memory, GiB"}
Part = tables.Table | Figure | SimpleNamespace  # each names its template
Parts = list[Part | None]


class Section(NamedTuple):
    id: str
    heading: str
    parts: Parts


def write_page(rows: Iterable[Row], path: str | Path, plots: str | Path | None = None) -> None:
    """Write rows as a page, and its figures as files into the folder `plots`: charts as SVG, matrices as PNG.

    >>> write_page(rows, "report.html", plots="plots")
    """
    measured = Measured(rows)
    made, shown = sections(measured), looks(measured.mixers)
    _write(Path(path), "page.html", sections=made, subtitle=_subtitle(measured), shown=shown)
    if plots is None:
        return
    for figure in (part for section in made for part in section.parts if isinstance(part, Figure)):
        for panel in figure.panels:
            write_svg([panel], Path(plots, f"{panel.id}.svg"))
    for title, pictures in _pictures(measured).items():
        panels = {_picture_name(row): heatmap.numbers(row.matrix) for row in pictures}
        heatmap.draw(panels, Path(plots, f"attention-{ident(title)}.png"), title=title)


def plot(rows: Iterable[Row], path: str | Path) -> None:
    """Draw time and memory of training against length, as `cosformer bench` measured them, to an SVG."""
    if Path(path).suffix != ".svg":
        raise ValueError(f"a chart is drawn to a file whose name ends in .svg; got {path}")
    measured = Measured(rows)
    for what, mine in costs.groups(measured, "training"):
        if panels := figures.cost_panels(mine, "cost"):
            title = "; ".join(filter(None, [f"Training {what}", costs.where(measured)]))
            return write_svg(panels, Path(path), title)
    raise ValueError("there is no training at two lengths among the results, so there is nothing to draw")


def write_svg(panels: list[chart.Panel], path: Path, title: str = "") -> None:
    """Panels side by side with their legend, as a standalone file."""
    shown = looks(line.mixer for panel in panels for line in panel.lines)
    drawings = [chart.Drawing(panel, shown) for panel in panels]
    _write(path, "chart.svg", drawings=drawings, shown=shown, title=title)


def _write(path: Path, template: str, **content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _environment().get_template(template).render(content)
    path.write_text(text, encoding="utf-8", newline="\n")


@functools.cache  # templates are compiled once
def _environment() -> Environment:
    loader, strict = PackageLoader("cosformer.report"), StrictUndefined
    made = Environment(loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    made.filters["raised"] = _raised
    made.globals.update(chart=chart, described=figures.described, values=figures.values, palette=PALETTE)
    return made


def _raised(text: str) -> Markup:
    """Escaped, with exponents raised: n^1.02."""
    return Markup(re.sub(r"\bn\^(-?[\d.]*\d)", r"n<sup>\1</sup>", str(escape(text))))


def sections(measured: Measured) -> list[Section]:
    """All sections that have content, in order."""
    others = {e.row.group: e.row.group for e in measured.experiments if e.row.group not in GROUPS}
    lead = _part("text", paragraphs=paragraphs(measured), kind="lead")
    pictures = [_gallery(title, rows) for title, rows in _pictures(measured).items()]
    found: list[tuple[str, str, Parts]] = [
        ("summary", "Summary", [lead, tables.verdicts(measured)]),
        *((ident(group), heading, _tasks(measured, group)) for group, heading in (GROUPS | others).items()),
        ("cost", "Speed and memory", _cost(measured)),
        ("trade-off", "Quality against cost", [figures.trade(measured)]),
        ("ablation", "Ablation", _ablation(measured)),
        ("rates", "Learning rates", [tables.searches(measured)]),
        ("attention", "Attention matrices", [*pictures]),
        ("exactness", "Exactness", [tables.exactness(measured)]),
        ("origin", "How these numbers were made", _origin(measured)),
    ]
    made = [Section(id_, heading, [part for part in parts if part]) for id_, heading, parts in found]
    return [section for section in made if section.parts]


def _part(template: str, **content: Any) -> Part:
    return SimpleNamespace(template=f"{template}.html", **content)


def _paper(*names: str) -> Parts:
    """Tables of the paper in full, with a warning."""
    found = [tables.PAPER[name] for name in names]
    numbers = " and ".join(str(table["number"]) for table in found)
    title = f"The paper's table{'s' if len(found) > 1 else ''} {numbers} in full"
    warning = _part("text", paragraphs=[SCALE], kind="note")
    return [warning, _part("details", title=title, parts=[tables.paper_table(table) for table in found])]


def _tasks(measured: Measured, group: str) -> Parts:
    """A table for one task; for several an overview, and each in full below it; then the figures."""
    mine = measured.group(group)
    if not mine:
        return []
    each: Parts = [tables.one_task(e) for e in mine]
    parts = each
    if len(mine) > 1:
        overview = tables.parts if group == "parts" else tables.overview
        parts = [overview(mine), _part("details", title="Each task in full", parts=each)]
    paper = _paper(group) if group in tables.PAPER else []
    if group == "parts":  # too many tasks, each with few mixers
        return parts
    curves = figures.recall(mine) or figures.learning(mine)  # recall has too many settings for a figure each
    return [*parts, *paper, curves, figures.positions(mine, measured)]


def _cost(measured: Measured) -> Parts:
    parts: Parts = []
    for work, caption in costs.WORK.items():
        for number, (what, rows) in enumerate(costs.groups(measured, work)):
            title = caption.format(what)
            parts += [tables.cost(title, rows), figures.cost(title, rows, number)]
    parts.append(tables.shared(measured.shared))
    return parts + _paper("speed") if any(parts) else []


def _ablation(measured: Measured) -> Parts:
    parts: Parts = [table for e in measured.group("lm") if (table := tables.ablation(e))]
    return parts + _paper("study", "ablation") if parts else []


def _pictures(measured: Measured) -> dict[str, list[Picture]]:
    """Pictures that belong side by side, by heading."""
    together: dict[str, list[Picture]] = {}
    for row in sorted(measured.pictures, key=lambda row: measured.mixers.index(row.mixer)):
        title = f"After training: {measured.titles.get(row.subject, row.subject)}"
        together.setdefault(title, []).append(row)
    return together


def _picture_name(row: Picture) -> str:
    return f"{name(row.mixer)}, layer {row.layer}"


def _gallery(title: str, rows: list[Picture]) -> Part:
    images = [(_picture_name(row), heatmap.data_uri(row.matrix), _in_words(row.matrix)) for row in rows]
    text = "".join(rows[0].tokens)
    caption = f"{PICTURES} The tokens: “{text}”." if text else PICTURES
    return _part("gallery", title=title, caption=caption, images=images)


def _in_words(matrix: heatmap.Matrix) -> str:
    """What a matrix shows, by the weights' absolute values."""
    weights = [(i, j, x) for i, line in enumerate(matrix) for j, x in enumerate(line)]
    flat = [(abs(i - j), abs(x)) for i, j, x in weights if x is not None]
    total = sum(x for _, x in flat) or 1.0
    distance, near = sum(d * x for d, x in flat) / total, sum(x for d, x in flat if d <= 8) / total
    return f"mean distance {digits(distance)} tokens, {100 * near:.0f} % of the weight within 8"


def _subtitle(measured: Measured) -> str:
    parts = [f"{len(measured.mixers)} attention mechanisms with the same layers, width and heads"]
    parts.append(f"{len(measured.experiments)} tasks and settings")
    if measured.machines:
        days = sorted(machine.date for machine in measured.machines)
        processors = ", ".join(dict.fromkeys(machine.cpu for machine in measured.machines))
        parts.append(f"{processors}, {' to '.join(dict.fromkeys([days[0], days[-1]]))}")
    return " · ".join(parts)


def _origin(measured: Measured) -> Parts:
    parts: Parts = []
    for run in measured.runs:
        facts = {"started (UTC)": run.started[:16].replace("T", " "), "minutes": f"{run.minutes:g}"}
        parts.append(_part("listing", label="Command", lines=[run.command], facts=facts))
    for machine in measured.machines:
        known = {MACHINE.get(key, key): value for key, value in vars(machine).items() if value is not None}
        parts.append(_part("listing", label="Machine", lines=[], facts=known))
    if not measured.machines:
        unknown = "The results do not say on what machine they were measured."
        parts.append(_part("text", paragraphs=[unknown], kind="note"))
    if commands := list(dict.fromkeys(row.command for row in measured.quality)):
        listing = _part("listing", label="Commands", lines=commands, facts={})
        parts.append(_part("details", title=f"{len(commands)} training commands", parts=[listing]))
    return parts
