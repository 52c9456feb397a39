"""Text to a class: `classify` for one's own table; Long-Range Arena's `text` (IMDB) and `retrieval` (AAN)."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .collate import Collate
from .contract import SPLITS, DataError, Published, Special, Task
from .generated import reviews
from .metrics import class_scores
from .published import PUBLISHED
from .source import Row
from .table import Mapped, Table, Writer
from .texts import Texts, cut_note

TEXT = ("text", "sentence", "sentence1", "text1", "question1", "premise", "review", "content", "source")
PAIR = ("sentence2", "text2", "question2", "hypothesis", "pair")
LABEL = ("label", "labels", "target", "class", "sentiment", "category")
IMDB = ("label", "rating", "id", "text")
AAN = ("label", "id1", "id2", "text1", "text2")


def label_of(row: Row, asked: str | None) -> str:
    """A record's label as a string; 1.0 is 1, as AAN writes labels."""
    name = row.column(asked, LABEL, argument="label")
    value = row.fields[name]
    text = str(int(value)) if isinstance(value, (bool, int)) else value
    if not isinstance(text, str) or not text.strip():
        raise row.error(f"column {name!r} must hold a label; got {value!r}")
    text = text.strip()
    whole = text.removesuffix(".0")
    return whole if whole.isdigit() else text


def label_set(rows: Iterable[tuple[str, Row]], asked: str | None) -> list[str]:
    """The labels of the training rows, in order: of number if all are whole numbers, else of the alphabet."""
    seen = {label_of(row, asked) for split, row in rows if split == "train"}
    if len(seen) < 2:
        raise DataError(f"the training rows have {len(seen)} label(s) {sorted(seen)}; two or more are needed")
    numeric = all(label.lstrip("-").isdigit() for label in seen)
    return sorted(seen, key=int if numeric else None)


def assembled(row: dict[str, Any], *, length: int, special: Special, towers: bool) -> dict[str, Any]:
    """A row as a model gets it: the class token, the text. A pair is one sequence, or two if `towers`."""
    text, pair = row["text"], row.get("pair")
    start, sep, end = (torch.tensor([token]) for token in (special.bos, special.sep, special.eos))

    def alone(text: Tensor) -> Tensor:
        return torch.cat([start, text[: length - 1]])

    if pair is None:
        return {"input_ids": alone(text), "labels": row["labels"]}
    if towers:
        return {"input_ids": alone(text), "pair_input_ids": alone(pair), "labels": row["labels"]}
    room = length - 3  # start, separator, end; the longer text gives way first
    keep = min(len(text), max(room - len(pair), room // 2))
    ids = torch.cat([start, text[:keep], sep, pair[: room - keep], end])
    return {"input_ids": ids, "labels": row["labels"]}


def tokens_needed(table: Table, roles: Iterable[str], *, towers: bool) -> np.ndarray:
    """How long each row would be if nothing were cut."""
    lengths = [table.lengths(role) for role in roles]
    if len(lengths) == 1 or towers:
        return np.max(lengths, 0) + 1
    return np.sum(lengths, 0) + 3


def _task(
    name: str,
    texts: Texts,
    *,
    length: int,
    label: str | None = None,
    labels: Sequence[str] | None = None,
    towers: bool = False,
    published: Published | None = None,
) -> Task:
    if length < 8:
        raise ValueError(f"length must be at least 8; got {length}")

    def fill(writer: Writer) -> None:
        names = [str(name) for name in labels or label_set(texts.rows(), label)]
        number = {name: index for index, name in enumerate(names)}
        writer.facts["labels"] = names
        for split, row in texts.rows():
            mark = label_of(row, label)
            if mark not in number:
                raise row.error(f"label {mark!r} is not one of {', '.join(names)}")
            writer.add(split, {**texts.tokens(row), "labels": number[mark]})

    needed = SPLITS if texts.holdout else ("train", "test")  # as published, the test set validates, too
    tables, facts = texts.stored("classified", fill, label=label, labels=labels, needed=needed)
    cut = partial(assembled, length=length, special=texts.encoder.special, towers=towers)
    sets: dict[str, Any] = {split: Mapped(tables[split], cut) for split in SPLITS if len(tables[split])}
    return Task(
        name=name,
        kind="pair-classification" if towers else "sequence-classification",
        **{"validation": sets["test"], **sets},
        **class_scores(),
        collate=Collate(texts.encoder.special.pad),
        special=texts.encoder.special,
        vocab_size=texts.encoder.size,
        max_length=length,
        labels=tuple(facts["labels"]),
        tokenizer=texts.encoder.tokenizer,
        published=published,
        settings={"length": length, "label": label, **texts.settings},
        notes=tuple(cut_note(tokens_needed(tables["train"], texts.roles, towers=towers), length)),
    )


def classify(
    *,
    data: Any = None,
    length: int = 256,
    tokenizer: str = "bytes",
    columns: Sequence[str] | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    labels: Sequence[str] | None = None,
    holdout: float = 0.1,
    seed: int = 0,
    cache: Any = None,
) -> Task:
    """Texts, or pairs if `pair` names the second column. `columns` names those of a file without a header."""
    roles = {"text": (text, TEXT), "pair": (pair, PAIR)} if pair else {"text": (text, TEXT)}
    reading: dict[str, Any] = {
        "columns": columns,
        "holdout": holdout,
        "seed": seed,
        "tokenizer": tokenizer,
        "cache": cache,
    }
    texts = Texts(data, roles=roles, generated=reviews, **reading)
    return _task("classify", texts, length=length, label=label, labels=labels)


def text(
    *,
    data: Any,
    length: int = 4096,
    columns: Sequence[str] | None = IMDB,
    holdout: float | None = None,
    seed: int = 0,
    cache: Any = None,
) -> Task:
    """Long-Range Arena's Text: IMDB reviews as bytes; the class token counts within `length`.

    `data` holds train and test, as label, rating, id, text without header (or other `columns`; None reads
    them from a header). As published, validation is the test set; `holdout` takes a share of the training
    set instead.
    """
    reading: dict[str, Any] = {
        "columns": columns,
        "holdout": holdout,
        "seed": seed,
        "tokenizer": "bytes",
        "cache": cache,
    }
    texts = Texts(data, roles={"text": (None, TEXT)}, **reading)
    return _task("text", texts, length=length, published=PUBLISHED["text"])


def retrieval(
    *, data: Any, length: int = 4000, columns: Sequence[str] | None = AAN, seed: int = 0, cache: Any = None
) -> Task:
    """Long-Range Arena's Retrieval: do two papers cite one another? Bytes, each paper encoded on its own.

    `data` is the published folder (new_aan_pairs.train.tsv, .eval.tsv, .test.tsv), without headers.
    """
    roles = {"text": ("text1", TEXT), "pair": ("text2", PAIR)}
    reading: dict[str, Any] = {
        "columns": columns,
        "holdout": 0.1,
        "seed": seed,
        "tokenizer": "bytes",
        "cache": cache,
    }
    texts = Texts(data, roles=roles, **reading)
    published = PUBLISHED["retrieval"]
    return _task("retrieval", texts, length=length, labels=("0", "1"), towers=True, published=published)
