"""The page's elements as HTML: tables that scroll by themselves, figures with their values, text that is escaped."""

import html
import re
from collections.abc import Iterable

from . import figures, plots, tables
from .figures import Figure, Panel
from .style import Look, digits, looks
from .tables import PAPER, Column, Entry, Table


def esc(text: object) -> str:
    return html.escape(str(text))


def rich(text: str) -> str:
    """Escaped, with exponents raised: n^1.02."""
    return re.sub(r"\bn\^(-?[\d.]*\d)", r"n<sup>\1</sup>", esc(text))


def details(title: str, content: str) -> str:
    return f"<details><summary>{esc(title)}</summary>\n{content}\n</details>"


_OUTCOME = {"better", "worse", "tie", "not compared"}


def table_html(table: Table, kind: str = "") -> str:
    """A table in a region that scrolls by itself; the paper's columns are set apart."""
    grouped = any(c.group for c in table.columns)
    corner = f'<th scope="col"{" rowspan=2" if grouped else ""}>{esc(table.corner)}</th>'
    heads = "".join(
        f'<th scope="col"{_class(table.columns, i)}>{esc(c.head)}</th>' for i, c in enumerate(table.columns)
    )
    if grouped:
        groups = "".join(
            f'<th scope="colgroup" colspan="{size}"{_class(table.columns, first, group=True)}>{esc(name)}</th>'
            for name, first, size in _groups(table.columns)
        )
        head = f"<tr>{corner}{groups}</tr>\n<tr>{heads}</tr>"
    else:
        head = f"<tr>{corner}{heads}</tr>"
    bodies = []
    for group, rows in table.rows.items():
        winners = table.winners(group)
        lines = (
            [
                f'<tr><th scope="rowgroup" class="group" colspan="{len(table.columns) + 1}"><span>{esc(group)}</span></th></tr>'
            ]
            if group
            else []
        )
        for i, (name, entries) in enumerate(rows):
            cells = "".join(
                f"<td{_class(table.columns, j)}>{_entry(e, (i, j) in winners, kind)}</td>"
                for j, e in enumerate(entries)
            )
            lines.append(f'<tr><th scope="row">{esc(name)}</th>{cells}</tr>')
        bodies.append("<tbody>\n" + "\n".join(lines) + "\n</tbody>")
    note = f'\n<p class="note">{rich(table.note)}</p>' if table.note else ""
    about = f" <small>{rich(table.about)}</small>" if table.about else ""
    return (
        f'<div class="scroll {kind}" role="group" aria-label="{esc(table.caption)}" tabindex="0">'
        f'<p class="hint" aria-hidden="true">scroll sideways for more →</p>\n'
        f"<table>\n<caption><span>{rich(table.caption)}{about}</span></caption>\n<thead>\n{head}\n</thead>\n"
        + "\n".join(bodies)
        + f"\n</table>\n</div>{note}"
    )


def _groups(columns: list[Column]) -> Iterable[tuple[str, int, int]]:
    """(heading, first column, how many) of columns that stand together."""
    start = 0
    for i in range(1, len(columns) + 1):
        if i == len(columns) or columns[i].group != columns[start].group:
            yield columns[start].group, start, i - start
            start = i


def _class(columns: list[Column], index: int, group: bool = False) -> str:
    column = columns[index]
    names = []
    if column.words and not group:
        names.append("words")
    if PAPER in column.group:
        names.append("paper")
    if index and column.group != columns[index - 1].group:
        names.append("first")
    return f' class="{" ".join(names)}"' if names else ""


def _entry(entry: Entry, best: bool, kind: str) -> str:
    text = rich(entry.text)
    if kind == "verdicts" and entry.text in _OUTCOME:
        return f'<span class="outcome {entry.text.split()[0]}">{text}</span>'
    if best:
        return f"<strong>{text}</strong>"
    return f'<span class="why" title="{esc(entry.why)}">{text}</span>' if entry.why else text


def figure_html(figure: Figure, shown: dict[str, Look]) -> str:
    """Legend, panels, what to see, and the values."""
    mixers = [m for m in shown if any(line.mixer == m for p in figure.panels for line in p.lines)]
    scatter = all(p.scatter for p in figure.panels)
    legend = "".join(
        f"<li>{plots.swatch(shown[m], line=not scatter)}{esc(shown[m].label)}</li>" for m in mixers
    )
    drawn = "\n".join(plots.inline(p, shown, esc(_alt(p, shown))) for p in figure.panels)
    values = "\n".join(table_html(_values(p)) for p in figure.panels)
    heading = f"<h3>{esc(figure.title)}</h3>\n" if figure.title else ""
    return (
        f'<figure class="group" id="figure-{figure.id}">{heading}<ul class="legend">{legend}</ul>\n'
        f'<div class="panels">\n{drawn}\n</div>\n<figcaption>{rich(figure.caption)}</figcaption>\n'
        f"{details('The values', values)}</figure>"
    )


def _alt(panel: Panel, shown: dict[str, Look]) -> str:
    ends = "; ".join(
        f"{shown[line.mixer].short} {digits(line.points[-1][1])}"
        + ("" if panel.scatter else f" at {_place(line.points[-1][0])}")
        for line in panel.lines
    )
    kind = "Points" if panel.scatter else "Lines on logarithmic axes" if panel.log else "Lines"
    title = panel.title.replace("\n", ", ")
    return f"{kind}: {title} against {panel.x}. {'Values' if panel.scatter else 'Ends'}: {ends}."


def _place(x: float) -> str:
    return f"{x:,.0f}" if x == round(x) else digits(x)


def _values(panel: Panel) -> Table:
    """What a panel shows, in numbers."""

    def named(line: figures.Line) -> str:
        text = looks([line.mixer])[line.mixer].label
        return f"{text}, {line.variant}" if line.variant else text

    title = panel.title.replace("\n", ", ")
    caption = f"{title[:1].upper()}{title[1:]} against {panel.x}"
    if panel.scatter:
        rows = [
            (named(line), [Entry(digits(line.points[0][0])), Entry(digits(line.points[0][1]))])
            for line in panel.lines
        ]
        return Table(caption, "mixer", [Column(panel.x), Column("value")], {"": rows})
    places = sorted({x for line in panel.lines for x, _ in line.points})
    if all([x for x, _ in line.points] == places for line in panel.lines) or panel.log:
        at = [dict(line.points) for line in panel.lines]
        rows = [
            (_place(x), [Entry(digits(p[x])) if x in p else Entry(tables.NOTHING) for p in at])
            for x in places
        ]
        return Table(caption, panel.x, [Column(named(line)) for line in panel.lines], {"": rows})
    groups = {named(line): [(_place(x), [Entry(digits(y))]) for x, y in line.points] for line in panel.lines}
    return Table(caption, panel.x, [Column(title)], groups)
