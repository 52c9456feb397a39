"""cosformer report: from rows of results to tables, charts and one HTML page; without torch."""

import argparse
from pathlib import Path

from ..results import read
from .heatmap import draw as matrices
from .page import plot, write_page
from .text import BEGIN, END, fill, numbers, terminal_speeds, terminal_summary

__all__ = ["main", "matrices", "numbers", "plot", "terminal_speeds", "terminal_summary", "write_page"]


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        prog="cosformer report",
        description="Write a page of results: HTML, or the tables of a Markdown page.",
    )
    add = p.add_argument
    # fmt: off
    add("results", nargs="+", type=Path, help="rows of `cosformer compare` or `cosformer bench --out`")
    add("--html", type=Path, help="write the results as one self-contained HTML file")
    add("--plots", type=Path, help="with --html: write the figures into this folder, too")
    add("--page", type=Path, default=Path("README.md"),
        help=f"else: the Markdown page with {BEGIN} and {END}")
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
    text = args.page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{args.page} has no place for tables; put {BEGIN} and {END} where they belong")
    args.page.write_text(fill(text, rows), encoding="utf-8")
