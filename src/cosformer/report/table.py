"""A table as data, and its three forms: HTML by its template, Markdown, plain text for a terminal."""

import itertools
import textwrap
from dataclasses import dataclass, field
from typing import ClassVar

from .style import NOTHING


@dataclass(frozen=True)
class Entry:
    text: str = NOTHING
    value: float | None = None  # decides the best of a column
    more: str = ""  # in small print after the text
    badge: str = ""  # CSS class of an outcome


@dataclass(frozen=True)
class Column:
    head: str
    group: str = ""  # columns of one group share a heading
    best: str = ""  # "least" or "most" wins; empty: nothing to win
    words: bool = False  # text, not numbers


Lines = list[tuple[str, list[Entry]]]


@dataclass(frozen=True)
class Table:
    template: ClassVar[str] = "table.html"
    caption: str
    corner: str  # the heading of the first column
    columns: list[Column]
    rows: dict[str, Lines] = field(default_factory=dict)  # by heading of a group of rows, or ""
    note: str = ""
    about: str = ""  # a less important part of the caption

    def groups(self) -> list[tuple[int, str, int]]:
        """(first column, heading, how many) of each group of columns."""
        together = itertools.groupby(enumerate(self.columns), key=lambda pair: pair[1].group)
        places = [(group, [i for i, _ in mine]) for group, mine in together]
        return [(mine[0], group, len(mine)) for group, mine in places]

    def winners(self, group: str) -> set[tuple[int, int]]:
        """(row, column) of the best of two or more values within a group of rows; equal texts all win."""
        found = set()
        for j, column in enumerate(self.columns):
            entries = [(i, line[j]) for i, (_, line) in enumerate(self.rows[group])]
            values = {i: entry.value for i, entry in entries if entry.value is not None}
            if column.best and len(values) > 1:
                best = (min if column.best == "least" else max)(values, key=lambda i: values[i])
                found |= {(i, j) for i, entry in entries if entry.text == entries[best][1].text}
        return found

    def _lines(self) -> list[list[str]]:
        """The headings and all rows."""
        lines = [[self.corner, *(column.head for column in self.columns)]]
        for title, entries in itertools.chain(*self.rows.values()):
            lines.append([title, *(f"{entry.text} {entry.more}".strip() for entry in entries)])
        return lines

    def markdown(self) -> str:
        lines = [f"| {' | '.join(line)} |" for line in self._lines()]
        return "\n".join([lines[0], "|---" * (len(self.columns) + 1) + "|", *lines[1:]])

    def text(self) -> str:
        cut = [[textwrap.shorten(text, 40, placeholder="…") for text in line] for line in self._lines()]
        widths = [max(map(len, column)) for column in zip(*cut)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cut)
