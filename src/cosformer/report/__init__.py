"""cosformer report: from rows of results to tables, charts and one HTML page; without torch."""

import argparse
import textwrap
from collections.abc import Iterable
from pathlib import Path

from ..results import Row, read
from . import costs, tables
from .cells import Measured
from .heatmap import draw as matrices
from .page import plot, write_page
from .summary import paragraphs

__all__ = ["main", "matrices", "numbers", "plot", "terminal_speeds", "terminal_summary", "write_page"]

BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"


def numbers(rows: Iterable[Row]) -> str:
    """The tables of a Markdown page: the comparison if there is one, else the timings."""
    measured = Measured(rows)
    if (table := tables.verdicts(measured)) is not None:
        return table.markdown()
    said = [f"Measured on {costs.where(measured)}."] if measured.machines else []
    for table in tables.speeds(measured):
        said += [f"{table.caption}:", table.markdown(), table.note]
    return "\n\n".join(filter(None, said))


def terminal_summary(rows: Iterable[Row]) -> str:
    """The page's summary: its paragraphs, and a line for each task."""
    measured = Measured(rows)
    said = [textwrap.fill(text, 100) for text in paragraphs(measured)]
    table = tables.verdicts(measured)
    return "\n\n".join(said + ([table.text()] if table else []))


def terminal_speeds(rows: Iterable[Row]) -> str:
    """Tables of all timings."""
    found = tables.speeds(Measured(rows))
    return "\n\n".join("\n".join(filter(None, [t.caption, t.text(), t.note])) for t in found)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        prog="cosformer report",
        description="Show results: here, as one HTML page, or as tables of a Markdown page.",
    )
    add = p.add_argument
    # fmt: off
    add("results", nargs="+", type=Path, help="rows of `cosformer compare` or `cosformer bench --out`")
    add("--html", type=Path, help="write the results as one self-contained HTML file")
    add("--plots", type=Path, help="with --html: write the figures into this folder, too")
    add("--page", type=Path, help=f"write the tables into this Markdown page, between {BEGIN} and {END}")
    # fmt: on
    try:
        write(p.parse_args(argv))
    except (OSError, ValueError) as wrong:
        raise SystemExit(f"cosformer report: {wrong}") from None


def write(args: argparse.Namespace) -> None:
    if args.plots and not args.html:
        raise ValueError("--plots goes with --html")
    rows = read(*args.results)
    if not rows:
        raise ValueError(f"there are no results in {', '.join(map(str, args.results))}")
    if args.html:
        write_page(rows, args.html, args.plots)
        print(terminal_summary(rows))
        print(f"\n{args.html}" + (f", and figures in {args.plots}" if args.plots else ""))
        return
    if args.page is None:
        print(terminal_summary(rows))
        return
    before, begun, rest = args.page.read_text(encoding="utf-8").partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise ValueError(f"{args.page} has no place for tables; put {BEGIN} and {END} where they belong")
    args.page.write_text(f"{before}{BEGIN}\n{numbers(rows)}\n{END}{after}", encoding="utf-8")
