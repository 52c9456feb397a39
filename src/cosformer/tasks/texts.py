"""A table of texts, tokenised whole and kept: what classification and sequence to sequence read."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .source import Row, Source
from .table import Table, stored
from .tokens import encoder

Columns = tuple[str | None, Sequence[str]]  # the one asked for, the usual names
BATCH = 1024  # texts tokenised at once, on as many cores as there are
HELD, LONGEST = 95, 1024  # percent of the training texts that a length not asked for holds whole; its limit


class Texts:
    """A table's records with their texts by role, and tokens; `roles` says in which column each text is."""

    def __init__(self, source: Source, *, roles: Mapping[str, Columns], tokenizer: str):
        self.source, self.roles = source, roles
        self.key = {**source.key(), **{role: asked for role, (asked, _) in roles.items()}}
        self.encoder = encoder(tokenizer, texts=self._training, key=self.key, cache=source.cache)
        self.settings = {"tokenizer": tokenizer, **self.key}

    def texts(self, row: Row) -> dict[str, str]:
        """A record's texts, by role."""
        return {role: row.text(asked, usual, argument=role) for role, (asked, usual) in self.roles.items()}

    def _training(self) -> Iterator[str]:
        rows = self.source.each(self.texts)
        return (text for split, texts in rows if split == "train" for text in texts.values())

    def stored(
        self, name: str, rows: Callable[[], Iterable[tuple]], *, facts: dict[str, Any], **settings: Any
    ) -> dict[str, Table]:
        """Tables of `rows()`, their texts as tokens, whole; facts say what is left out; see table.stored."""

        def encoded() -> Iterator[tuple]:
            left = iter(rows())
            while batch := list(itertools.islice(left, BATCH)):
                ids = iter(self.encoder.encode([row[role] for _, row in batch for role in self.roles]))
                for split, row in batch:
                    yield split, {**row, **{role: next(ids) for role in self.roles}}
            facts["left_out"] = self.source.bad.note()

        known = {"vocabulary": self.encoder.vocabulary(), "facts": facts, **self.key, **settings}
        return stored(name, encoded, vocab_size=self.encoder.size, cache=self.source.cache, **known)


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
