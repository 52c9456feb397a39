"""Results as text: the numbers of a Markdown page, and what a terminal shows."""

import textwrap
from collections.abc import Iterable

from ..results import Row
from . import tables
from .cells import Measured
from .costs import where
from .summary import paragraphs

BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"


def numbers(rows: Iterable[Row]) -> str:
    """What a Markdown page says of the rows: the comparison, or else what was timed."""
    measured = Measured(rows)
    if (table := tables.verdicts(measured)) is not None:
        return "\n\n".join([*paragraphs(measured), table.markdown()])
    said = [f"Measured on {where(measured)}."] if measured.machines else []
    for table in tables.speeds(measured):
        said += [f"{table.caption}:", table.markdown(), table.note]
    return "\n\n".join(filter(None, said))


def fill(text: str, rows: Iterable[Row]) -> str:
    """The page with the numbers of these rows between BEGIN and END."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{numbers(rows)}\n{END}{after}"


def terminal_summary(rows: Iterable[Row]) -> str:
    """The summary of the page: its paragraphs, and a line for each task."""
    measured = Measured(rows)
    said = [textwrap.fill(text, 100) for text in paragraphs(measured)]
    table = tables.verdicts(measured)
    return "\n\n".join(said + ([table.text()] if table else []))


def terminal_speeds(rows: Iterable[Row]) -> str:
    """All that was timed."""
    found = tables.speeds(Measured(rows))
    return "\n\n".join("\n".join(filter(None, [t.caption, t.text(), t.note])) for t in found)
