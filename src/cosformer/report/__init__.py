"""cosformer report: from rows of results to tables, charts and one HTML page; without torch."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from ..results import ResultsError, Row, read
from .heatmap import draw as matrices
from .readme import BEGIN, END, fill, numbers

__all__ = ["BEGIN", "END", "main", "matrices", "numbers", "plot", "terminal_summary", "write_page"]


def write_page(rows: Iterable[Row], path: str | Path, plots: str | Path | None = None) -> None:
    """Write rows as one self-contained HTML page, and its figures as files into the folder `plots`.

    >>> write_page(rows, "report.html", plots="plots")
    """
    from . import cells, page

    page.write(cells.Measured(rows), Path(path), Path(plots) if plots else None)


def plot(rows: Iterable[Row], path: str | Path) -> None:
    """Draw time and memory of training against length, as `cosformer bench` measured them, to an SVG."""
    from . import page

    page.plot(rows, Path(path))


def terminal_summary(rows: Iterable[Row]) -> str:
    """The summary of the page as plain text: its paragraphs, and a line for each task."""
    from . import cells, summary

    return summary.plain(cells.Measured(rows))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="cosformer report",
        description="Write a page of results: HTML, or the tables of a Markdown page.",
    )
    p.add_argument(
        "results", nargs="+", type=Path, help="rows of `cosformer compare` or `cosformer bench --out`"
    )
    p.add_argument("--html", type=Path, help="write the results as one self-contained HTML file")
    p.add_argument("--plots", type=Path, help="with --html: write the figures into this folder, too")
    p.add_argument(
        "--page", type=Path, default=Path("README.md"), help=f"else: the Markdown page with {BEGIN} and {END}"
    )
    return p


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    try:
        _write(args)
    except (OSError, ResultsError) as wrong:
        raise SystemExit(f"cosformer report: {wrong}") from None


def _write(args: argparse.Namespace) -> None:
    if args.plots and not args.html:
        raise SystemExit("cosformer report: --plots goes with --html")
    rows = read(*args.results)
    if not rows:
        raise SystemExit(f"cosformer report: there are no results in {', '.join(map(str, args.results))}")
    if args.html:
        write_page(rows, args.html, args.plots)
        print(terminal_summary(rows))
        print(f"\n{args.html}" + (f", and figures in {args.plots}" if args.plots else ""))
        return
    text = args.page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(
            f"cosformer report: {args.page} has no place for tables; put {BEGIN} and {END} where they belong"
        )
    args.page.write_text(fill(text, rows), encoding="utf-8")
