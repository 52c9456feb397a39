"""cosformer report: from results files to tables, pictures and one HTML page; imports nothing else of the package."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .plots import matrices, plot
from .readme import BEGIN, END, fill, numbers, read

__all__ = ["BEGIN", "END", "main", "matrices", "numbers", "plot", "read", "terminal_summary", "write_page"]


def write_page(rows: Iterable[Any], path: str | Path, plots: str | Path | None = None) -> None:
    """Write rows of results.jsonl as one self-contained HTML page, and its figures as PNG and SVG into the folder `plots`.

    >>> write_page(rows, "report.html", plots="plots")
    """
    from . import page, results

    page.write(results.check(rows), Path(path), Path(plots) if plots else None)


def terminal_summary(rows: Iterable[Any]) -> str:
    """The summary of the page as plain text: its sentences, and a line for each task."""
    from . import results, summary

    return summary.plain(results.check(rows))


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        prog="cosformer report",
        description="Write a page of results: HTML, or the tables of a Markdown page.",
    )
    p.add_argument(
        "results",
        nargs="+",
        type=Path,
        help="JSON lines written by `cosformer compare`, or by `cosformer bench --out`",
    )
    p.add_argument(
        "--html", type=Path, help="write the results of `cosformer compare` as one self-contained HTML file"
    )
    p.add_argument(
        "--plots", type=Path, help="with --html: write the figures as PNG and SVG files into this folder, too"
    )
    p.add_argument(
        "--page", type=Path, default=Path("README.md"), help=f"else: the Markdown page with {BEGIN} and {END}"
    )
    args = p.parse_args(argv)
    if missing := [path for path in args.results if not path.is_file()]:
        raise SystemExit(f"cosformer report: {missing[0]} is not a file")
    if args.html:
        return _html(args)
    if args.plots:
        raise SystemExit("cosformer report: --plots goes with --html")
    text = args.page.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(
            f"cosformer report: {args.page} has no place for tables; put {BEGIN} and {END} where they belong"
        )
    args.page.write_text(fill(text, read(args.results)))


def _html(args: argparse.Namespace) -> None:
    from . import page, results, summary

    found = results.read(args.results)
    for line in found.skipped:
        print(f"skipped {line}", file=sys.stderr)
    if not (found.quality or found.cost or found.exactness or found.pictures):
        raise SystemExit(f"cosformer report: there are no results in {', '.join(map(str, args.results))}")
    page.write(found, args.html, args.plots)
    print(summary.plain(found))
    print(f"\n{args.html}" + (f", and figures in {args.plots}" if args.plots else ""))
