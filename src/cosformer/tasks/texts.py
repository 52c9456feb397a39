"""Texts with their vocabulary, kept as tables of tokens: what every task over text is made from."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .contract import Collate, Task
from .source import Row, Source
from .table import Table, stored
from .tokens import encoder

Columns = tuple[str | None, Sequence[str]]  # the one asked for, the usual names
BATCH = 1024  # texts tokenised at once, on as many cores as there are
HELD, LONGEST = 95, 1024  # percent of the training texts that a length not asked for holds whole; its limit


class Prepared:
    """Abstract: a source's texts, of which a subclass gives those to train a vocabulary on."""

    def __init__(self, source: Source, tokenizer: str, chosen: Mapping[str, Any] | None = None):
        self.source, self.key = source, {**source.key(), **(chosen or {})}  # all that the texts depend on
        self.encoder = encoder(tokenizer, texts=self.training, key=self.key, cache=source.cache)
        self.settings = {"tokenizer": tokenizer, **self.key}
        self.facts: dict[str, Any] = {}  # kept with the tables

    def training(self) -> Iterator[str]:
        raise NotImplementedError

    def stored(self, name: str, rows: Callable[[], Iterable[tuple]], **settings: Any) -> dict[str, Table]:
        """Tables of `rows()`; the facts say what is left out; see table.stored."""

        def noted() -> Iterator[tuple]:
            yield from rows()
            self.facts["left_out"] = self.source.bad.note()

        known = {"vocabulary": self.encoder.vocabulary(), "facts": self.facts, **self.key, **settings}
        return stored(name, noted, vocab_size=self.encoder.size, cache=self.source.cache, **known)

    def task(
        self,
        name: str,
        length: int,
        *,
        single: str,
        pair: str = "$A $B",
        packed: bool = False,
        settings: Mapping[str, Any],
        notes: Iterable[str] = (),
        **fields: Any,
    ) -> Task:
        """The task over these texts; its saved tokenizer writes them as `single` and `pair` say."""
        return Task(
            name=name,
            collate=Collate(self.encoder.special.pad, packed=packed),
            settings={"length": length, **settings, **self.settings},
            left_out=tuple(self.facts["left_out"]),
            notes=(*self.encoder.notes, *notes),
            **self.encoder.fields(self.key["content"], length, single=single, pair=pair),
            **fields,
        )


class Texts(Prepared):
    """A table's records with their texts by role; `roles` says in which column each text is."""

    def __init__(self, source: Source, *, roles: Mapping[str, Columns], tokenizer: str):
        self.roles = roles
        super().__init__(source, tokenizer, {role: asked for role, (asked, _) in roles.items()})

    def texts(self, row: Row) -> dict[str, str]:
        """A record's texts, by role."""
        return {role: row.text(asked, usual, argument=role) for role, (asked, usual) in self.roles.items()}

    def training(self) -> Iterator[str]:
        rows = self.source.each(self.texts)
        return (text for split, texts in rows if split == "train" for text in texts.values())

    def encoded(self, rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Rows with their texts as tokens, whole."""
        left = iter(rows)
        while batch := list(itertools.islice(left, BATCH)):
            ids = iter(self.encoder.encode([row[role] for _, row in batch for role in self.roles]))
            for split, row in batch:
                yield split, {**row, **{role: next(ids) for role in self.roles}}


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
