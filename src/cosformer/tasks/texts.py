"""A table of texts, tokenised whole and kept: what classification and sequence to sequence read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .source import Row, Source
from .table import Table, stored
from .tokens import encoder

Columns = tuple[str | None, Sequence[str]]  # the one asked for, the usual names
HELD, LONGEST = 95, 1024  # percent of the training texts that a length not asked for holds whole; its limit


class Texts:
    """A table's records with their texts by role, and tokens; `roles` says in which column each text is."""

    def __init__(self, source: Source, *, roles: Mapping[str, Columns], tokenizer: str):
        self.source, self.roles = source, roles
        self.key = {**source.key(), **{role: asked for role, (asked, _) in roles.items()}}
        self.encoder = encoder(tokenizer, texts=self._training, key=self.key, cache=source.cache)
        self.settings = {"tokenizer": tokenizer, **self.key}

    def tokens(self, row: Row) -> dict[str, np.ndarray]:
        """The ids of a record's texts, by role; nothing cut, nothing added."""
        return {role: self.encoder.encode(text) for role, text in self._texts(row).items()}

    def _texts(self, row: Row) -> dict[str, str]:
        return {role: row.text(asked, usual, argument=role) for role, (asked, usual) in self.roles.items()}

    def _training(self) -> Iterator[str]:
        return (text for s, texts in self.source.each(self._texts) if s == "train" for text in texts.values())

    def stored(
        self, name: str, rows: Callable[[], Iterable[tuple]], *, facts: dict[str, Any], **settings: Any
    ) -> dict[str, Table]:
        """Tables of `rows()`, which read the source; facts get notes for a user; see table.stored."""

        def noted() -> Iterator[tuple]:
            yield from rows()
            facts["notes"] = self.source.bad.note()

        known = {"vocabulary": self.encoder.vocabulary(), "facts": facts, **self.key, **settings}
        tables = stored(name, noted, vocab_size=self.encoder.size, cache=self.source.cache, **known)
        facts["notes"] += self.encoder.notes
        return tables


def length_for(needed: np.ndarray, asked: int | None, *, setting: str = "--length") -> tuple[int, list[str]]:
    """The length asked for, or one that holds most of the training texts; and what to tell a user of it."""
    held = max(8, -(-int(np.percentile(needed, HELD)) // 8) * 8)
    length = asked or min(held, LONGEST)
    notes = []
    if asked is None:
        why = f"which holds {HELD} % of the training texts" if held <= LONGEST else "the most taken unasked"
        notes.append(f"texts have up to {length:,} tokens, {why}; {setting} sets another length")
    if cut := int((needed > length).sum()):
        many = f"{cut:,} of {len(needed):,} training texts"
        notes.append(f"{many} are longer than {length:,} tokens and are cut; {setting} sets it")
    return length, notes
