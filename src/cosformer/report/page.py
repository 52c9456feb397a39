"""One self-contained HTML page of results, and its charts as files; the same results give the same bytes."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ..results import Row
from . import chart, costs, figures, heatmap, sections
from .cells import Measured
from .figures import Figure
from .style import PALETTE, ident, looks


def _raised(text: str) -> Markup:
    """Escaped, with exponents raised: n^1.02."""
    return Markup(re.sub(r"\bn\^(-?[\d.]*\d)", r"n<sup>\1</sup>", str(escape(text))))


@functools.cache  # templates are compiled once
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("cosformer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["raised"] = _raised
    made.globals.update(chart=chart, described=figures.described, values=figures.values, palette=PALETTE)
    return made


def _write(path: Path, template: str, **content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _environment().get_template(template).render(content)
    path.write_text(text, encoding="utf-8", newline="\n")


def write(measured: Measured, path: Path, plots: Path | None = None) -> None:
    """Write the page, and its figures as files if a folder is given: charts as SVG, matrices as PNG."""
    made = sections.sections(measured)
    shown = looks(measured.mixers)
    _write(path, "page.html", sections=made, subtitle=sections.subtitle(measured), shown=shown)
    if plots:
        for figure in (part for section in made for part in section.parts if isinstance(part, Figure)):
            for panel in figure.panels:
                write_svg([panel], plots / f"{panel.id}.svg")
        for title, rows in sections.pictures(measured):
            panels = {sections.picture_name(row): heatmap.numbers(row.matrix) for row in rows}
            heatmap.draw(panels, plots / f"attention-{ident(title)}.png", title=title)


def write_svg(panels: list[chart.Panel], path: Path, title: str = "") -> None:
    """Panels side by side with their legend, as a file that needs no page."""
    shown = looks(line.mixer for panel in panels for line in panel.lines)
    drawings = [chart.Drawing(panel, shown) for panel in panels]
    _write(path, "chart.svg", drawings=drawings, shown=shown, title=title)


def plot(rows: Iterable[Row], path: Path) -> None:
    """Time and memory of training against length, as `cosformer bench` measured them."""
    if path.suffix != ".svg":
        raise ValueError(f"a chart is drawn to a file whose name ends in .svg; got {path}")
    measured = Measured(rows)
    for what, mine in costs.groups(measured, "training"):
        if panels := figures.cost_panels(mine, "cost"):
            where = "".join(
                f"; {machine.cpu}, {machine.threads} threads" for machine in measured.machines[-1:]
            )
            return write_svg(panels, path, f"Training {what}{where}")
    raise ValueError("there is no training at two lengths among the results, so there is nothing to draw")
