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
    """Time of a step and its memory in a process against the length, a line for each number of processes."""
    rows = list(rows)
    shared = _ordered(rows)
    panels = []
    for name, title, value in (
        ("ms", "time of a step, seconds", lambda row: row.ms / 1e3),
        ("memory", "memory a step takes in a process, MiB", lambda row: row.memory_mib),
    ):
        lines = [
            Line(_count(n), [(row.length, value(row)) for row in shared if row.processes == n])
            for n in sorted({row.processes for row in shared})
        ]
        panels.append(Panel(f"shared-{name}", title, "tokens of the sequence", lines, log="xy"))
    where = "".join(f"; {machine.cpu}, one thread a process" for machine in of(rows, Machine)[-1:])
    write_svg(panels, path, f"Training one sequence over several processes{where}")


def table(rows: Iterable[Row]) -> str:
    """Markdown: a line for each length and number of processes, and what follows from them."""
    shared = _ordered(rows)
    heads = ["tokens", "processes", "memory of a process", "seconds a step", "without overlap", "waiting"]
    lines = [f"| {' | '.join([*heads, 'scan', 'states', 'work beside messages'])} |", "|---" * 9 + "|"]
    for row in shared:
        cells = [f"{row.length:,}", str(row.processes), f"{row.memory_mib:,.0f} MiB"]
        cells += [f"{row.ms / 1e3:.3f}{CONTENDED * row.contended}"]
        if row.ms_at_once is not None:
            cells += [f"{row.ms_at_once / 1e3:.3f}", f"{row.waiting:.1%}", f"{row.scan:.2%}"]
            cells += [f"{row.states:.1%}", f"{row.ms_beside:,.1f} ms"]
        lines.append(f"| {' | '.join(cells + [''] * (9 - len(cells)))} |")
    notes = [CONTENDED_NOTE] if any(row.contended for row in shared) else []
    return "\n\n".join(["\n".join(lines), *notes, *_conclusions(shared)])


def _conclusions(rows: list[Shared]) -> list[str]:
    together = [row for row in rows if row.ms_at_once is not None]
    if not together:
        return []
    sent = sorted({row.sent_bytes for row in together})
    found = f"A process sent {' to '.join(f'{n:,}' for n in sent[:: max(1, len(sent) - 1)])} bytes a step"
    found += ", whatever the length and the number of processes. " if len(sent) == 1 else ". "
    saved = [1 - row.ms / (row.ms_at_once or row.ms) for row in together]
    spread = max(((row.ms_high or row.ms) - (row.ms_low or row.ms)) / row.ms for row in together)
    found += f"The overlap took {min(saved):+.1%} to {max(saved):+.1%} off a step, "
    found += f"and the middle half of a case's steps lay up to {spread:.1%} apart: "
    shown = max(saved) > spread
    return [found + ("a benefit." if shown else "no benefit is shown here.")]


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
