"""A table of texts, tokenised whole and kept: what classification and sequence to sequence read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .source import Row, fingerprint, split_rows
from .table import Table, Writer, stored
from .tokens import encoder

Columns = tuple[str | None, Sequence[str]]  # the one asked for, the usual names


class Texts:
    """The rows of a user's table, or generated ones: in splits, with texts by their role, and their tokens.

    `columns` names those of a file without a header; `roles` says in which column each text is.
    """

    def __init__(
        self,
        data: Any,
        *,
        roles: Mapping[str, Columns],
        columns: Sequence[str] | None,
        holdout: float | None,
        seed: int,
        tokenizer: str,
        cache: Any,
        generated: Callable[..., Iterator[tuple[str, Row]]] | None = None,
    ):
        self.data, self.roles, self.columns, self.holdout, self.seed = data, roles, columns, holdout, seed
        self.generated, self.cache = generated, cache
        self.key: dict[str, Any] = {"seed": seed, **{role: asked for role, (asked, _) in roles.items()}}
        if generated is not None and data is None:
            self.key["content"] = generated.__name__
        else:
            self.key |= {"content": fingerprint(data), "columns": columns, "holdout": holdout}
        texts = (text for split, row in self.rows() if split == "train" for text in self.texts(row).values())
        self.encoder = encoder(tokenizer, texts=texts, key=self.key, cache=cache)
        self.settings = {"tokenizer": tokenizer, **self.key}

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Every record with its split, read anew."""
        if self.generated is not None and self.data is None:
            return self.generated(seed=self.seed)
        return split_rows(self.data, columns=self.columns, holdout=self.holdout, seed=self.seed)

    def texts(self, row: Row) -> dict[str, str]:
        """A record's texts, by role."""
        return {role: row.text(asked, usual, argument=role) for role, (asked, usual) in self.roles.items()}

    def tokens(self, row: Row) -> dict[str, np.ndarray]:
        """The ids of a record's texts, by role; nothing cut, nothing added."""
        return {role: self.encoder.encode(text) for role, text in self.texts(row).items()}

    def stored(
        self, name: str, fill: Callable[[Writer], None], **settings: Any
    ) -> tuple[dict[str, Table], dict[str, Any]]:
        """What `fill` wrote of these texts; see table.stored."""
        vocabulary: dict[str, Any] = {
            "vocab_size": self.encoder.size,
            "vocabulary": self.encoder.vocabulary(),
        }
        return stored(name, fill, cache=self.cache, **vocabulary, **self.key, **settings)


def cut_note(needed: np.ndarray, length: int, *, setting: str = "--length") -> list[str]:
    """What to tell a user whose training texts need more than `length` tokens."""
    count = int((needed > length).sum())
    many = f"{count:,} of {len(needed):,} training texts are longer than {length:,} tokens and are cut"
    return [f"{many}; {setting} sets it"] if count else []
