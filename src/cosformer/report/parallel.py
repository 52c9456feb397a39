"""One sequence over several processes: its picture and its table, from rows of `cosformer bench --parallel`.

python -m cosformer.report.parallel benchmarks/parallel.jsonl docs/parallel.svg docs/parallel.md
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from ..results import Machine, Row, Shared, latest, of, read
from .chart import Line, Panel
from .costs import CONTENDED, CONTENDED_NOTE
from .page import write_svg

BEGIN, END = "<!-- measured -->", "<!-- /measured -->"


def _ordered(rows: Iterable[Row]) -> list[Shared]:
    found = of(latest(rows), Shared)
    if not found:
        raise ValueError("there are no rows of `cosformer bench --parallel` among the results")
    return sorted(found, key=lambda row: (row.length, row.processes))


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def plot(rows: Iterable[Row], path: Path) -> None:
    """Time of a step and peak memory of a process against the length, a line for each number of processes."""
    rows = list(rows)
    shared = _ordered(rows)
    panels = []
    for name, title, value in (
        ("ms", "time of a step, seconds", lambda row: row.ms / 1e3),
        ("memory", "peak memory of a process, MiB", lambda row: row.memory_mib),
    ):
        lines = [
            Line(_count(n), [(row.length, value(row)) for row in shared if row.processes == n])
            for n in sorted({row.processes for row in shared})
        ]
        panels.append(Panel(f"shared-{name}", title, "tokens of the sequence", lines, log="xy"))
    where = "".join(f"; {machine.cpu}, one thread a process" for machine in of(rows, Machine)[-1:])
    write_svg(panels, path, f"Training one sequence over several processes{where}")


def table(rows: Iterable[Row]) -> str:
    """Markdown: a line for each length and number of processes."""
    shared = _ordered(rows)
    heads = ["tokens", "processes", "seconds a step", "waiting", "messages hidden", "scan", "states"]
    lines = [f"| {' | '.join(heads)} | peak memory |", "|---" * 8 + "|"]
    for row in shared:
        cells = [f"{row.length:,}", str(row.processes), f"{row.ms / 1e3:.2f}{CONTENDED * row.contended}"]
        cells += [f"{row.waiting:.1%}", _hidden(row), f"{row.scan:.2%}", f"{row.states:.1%}"]
        if row.processes == 1:
            cells[3:] = [""] * 4
        lines.append(f"| {' | '.join(cells)} | {row.memory_mib:,.0f} MiB |")
    note = f"\n\n{CONTENDED_NOTE}" if any(row.contended for row in shared) else ""
    return "\n".join(lines) + note


def _hidden(row: Shared) -> str:
    """The share of the messages' time in which a process had other work."""
    return f"{max(0.0, 1 - row.waiting / row.messages):.0%}" if row.messages else ""


def fill(text: str, rows: Iterable[Row]) -> str:
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no place for the table; put {BEGIN} and {END} where it belongs")
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"


def main(argv: list[str]) -> None:
    results, picture, page = map(Path, argv)
    rows = read(results)
    plot(rows, picture)
    page.write_text(fill(page.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
