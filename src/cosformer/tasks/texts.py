"""Texts with their vocabulary, kept as tables of tokens: what every task over text is made from."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .contract import Collate, Task
from .source import Row, Source, idle
from .table import Table, stored
from .tokens import encoder

Columns = tuple[str | None, Sequence[str]]  # (column asked for, usual names)
BATCH = 1024  # texts tokenised at once, on as many cores as there are
HELD, LONGEST = 95, 1024  # the default length holds this percentage of training texts whole; its limit


class Prepared:
    """Abstract: a source's texts and their vocabulary; a subclass gives the texts it is trained on."""

    def __init__(self, source: Source, tokenizer: str, chosen: Mapping[str, Any] | None = None):
        self.source, self.key = source, {**source.key(), **(chosen or {})}  # all that the texts depend on
        self.encoder = encoder(tokenizer, texts=self.training, key=self.key, cache=source.cache)
        self.settings = {"tokenizer": tokenizer, **self.key}
        self.facts: dict[str, Any] = {}  # stored with the tables

    def training(self) -> Iterator[str]:
        raise NotImplementedError

    def stored(self, name: str, rows: Callable[[], Iterable[tuple]], **settings: Any) -> dict[str, Table]:
        """Tables of `rows()` (see table.stored); `facts` also notes the rows left out."""

        def noted() -> Iterator[tuple]:
            yield from rows()
            self.facts["left_out"] = self.source.bad.note()

        known = {"vocabulary": self.encoder.vocabulary(), "facts": self.facts, **self.key, **settings}
        if self.source.whole:
            known["needed"] = (self.source.whole,)
        return stored(name, noted, vocab_size=self.encoder.size, cache=self.source.cache, **known)

    def sized_by(self, tables: Mapping[str, Table]) -> Table:
        """The rows that lengths are taken from: those for training, or the only ones there are."""
        return tables["train"] if len(tables["train"]) else tables[self.source.whole or "train"]

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
        """The task over these texts; `single` and `pair` are its tokenizer's templates (Encoder.fields)."""
        return Task(
            name=name,
            collate=Collate(self.encoder.special.pad, packed=packed),
            settings={"length": length, **settings, **self.settings},
            left_out=tuple(self.facts["left_out"]),
            notes=(*self.encoder.notes, *idle(self.source.data), *notes),
            **self.encoder.fields(self.key["content"], length, single=single, pair=pair),
            **fields,
        )


class Texts(Prepared):
    """A table's records with their texts by role; `roles` says which column holds each text."""

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
        """Rows with their texts as tokens, uncut."""
        left = iter(rows)
        while batch := list(itertools.islice(left, BATCH)):
            ids = iter(self.encoder.encode([row[role] for _, row in batch for role in self.roles]))
            for split, row in batch:
                yield split, {**row, **{role: next(ids) for role in self.roles}}


def length_for(
    needed: np.ndarray, asked: int | None, *, setting: str = "--length", texts: str = "texts"
) -> tuple[int, list[str]]:
    """The length asked for, or one that holds most training texts; and what to tell the user about it."""
    held = max(8, -(-int(np.percentile(needed, HELD)) // 8) * 8)
    length = asked or min(held, LONGEST)
    notes = []
    if asked is None:
        why = f"which holds {HELD} % of the training {texts}" if held <= LONGEST else "the most taken unasked"
        notes.append(f"{texts} have up to {length:,} tokens, {why}; {setting} sets another length")
    if cut := int((needed > length).sum()):
        many = f"{cut:,} of {len(needed):,} training {texts}"
        notes.append(f"{many} are longer than {length:,} tokens and are cut; {setting} sets it")
    return length, notes
