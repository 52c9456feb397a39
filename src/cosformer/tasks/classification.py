"""Text to a class: `classify` for one's own table; Long-Range Arena's `text` (IMDB) and `retrieval` (AAN)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .contract import SPLITS, DataError, Special, Task, listed, shown
from .generated import reviews
from .metrics import class_choice, class_metrics, majority, scoring_fields
from .published import PUBLISHED
from .source import Row, Source
from .table import Mapped
from .texts import Texts, length_for

TEXT = ("text", "sentence", "sentence1", "text1", "question1", "premise", "review", "content", "source")
PAIR = ("sentence2", "text2", "question2", "hypothesis", "pair")
LABEL = ("label", "labels", "target", "class", "sentiment", "category")
IMDB = ("label", "rating", "id", "text")
AAN = ("label", "id1", "id2", "text1", "text2")
MANY = 100  # more labels than this, and than half the rows, are no classes


def label_of(row: Row, asked: str | None) -> str:
    """A record's label as a string; 1.0 becomes 1: AAN writes labels as floats."""
    name = row.column(asked, LABEL, argument="label")
    value = row.fields[name]
    text = str(int(value) if isinstance(value, bool) else value).strip()
    if not isinstance(value, (str, bool, int, float)) or not text:
        raise row.error(f"column {name!r} must hold a label; got {shown(value)}")
    whole = text.removesuffix(".0")
    return whole if whole.lstrip("-").isdigit() else text


def label_set(labels: Iterable[tuple[str, str]], *, split: str) -> list[str]:
    """The labels of a split's rows, sorted: numerically if all are whole numbers, else alphabetically."""
    count = Counter(label for of, label in labels if of == split)
    numeric = all(label.lstrip("-").isdigit() for label in count)
    names = sorted(count, key=int if numeric else None)
    rows = "training rows" if split == "train" else "rows"
    said = f"the {count.total():,} {rows} have {len(names):,} label(s) ({listed(names)})"
    if len(names) < 2:
        raise DataError(f"{said}; two or more are needed")
    if len(names) > max(MANY, count.total() / 2):
        raise DataError(f"{said}; classes are needed, not measurements or texts: --set task.label=COLUMN")
    return names


def assembled(row: dict[str, Any], *, length: int, special: Special, towers: bool) -> dict[str, Any]:
    """A row as model input: class token, then text. A pair becomes one sequence, or two if `towers`."""
    text, pair = row["text"], row.get("pair")
    start, sep, end = (torch.tensor([token]) for token in (special.bos, special.sep, special.eos))

    def alone(text: Tensor) -> Tensor:
        return torch.cat([start, text[: length - 1]])

    if pair is None:
        return {"input_ids": alone(text), "labels": row["labels"]}
    if towers:
        return {"input_ids": alone(text), "pair_input_ids": alone(pair), "labels": row["labels"]}
    room = length - 3  # start, separator, end; the longer text is cut first
    keep = min(len(text), max(room - len(pair), room // 2))
    ids = torch.cat([start, text[:keep], sep, pair[: room - keep], end])
    return {"input_ids": ids, "labels": row["labels"]}


def _task(
    name: str,
    texts: Texts,
    *,
    length: int | None,
    label: str | None = None,
    labels: Sequence[str] | None = None,
    towers: bool = False,
    published: Mapping[str, int] | None = None,
) -> Task:
    if length is not None and length < 8:
        raise ValueError(f"length must be at least 8; got {length}")

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        marks = texts.source.each(lambda row: label_of(row, label))
        split = texts.source.whole or "train"
        names = texts.facts["labels"] = list(labels or label_set(marks, split=split))

        def numbered(row: Row) -> dict[str, Any]:
            mark = label_of(row, label)
            if mark not in names:
                raise row.error(f"label {shown(mark)} is not one of {listed(names)}")
            return {**texts.texts(row), "labels": names.index(mark)}

        yield from texts.encoded(texts.source.each(numbered))

    # Without a holdout or validation file the test set validates, as published.
    needed = SPLITS if texts.source.holdout else ("train", "test")
    tables = texts.stored("classified", rows, label=label, labels=labels, needed=needed)
    lengths = [texts.sized_by(tables).lengths(role) for role in texts.roles]
    joined = len(lengths) == 2 and not towers
    length, notes = length_for(np.sum(lengths, 0) + 3 if joined else np.max(lengths, 0) + 1, length)
    cut = partial(assembled, length=length, special=texts.encoder.special, towers=towers)
    sets: dict[str, Any] = {split: Mapped(tables[split], cut) for split in SPLITS}
    if not sets["validation"]:
        sets["validation"] = sets["test"]
    return texts.task(
        name,
        length,
        single="bos $A",
        pair="bos $A sep $B eos",
        kind="pair-classification" if towers else "sequence-classification",
        **sets,
        **scoring_fields(class_choice, class_metrics, "accuracy", greater_is_better=True),
        labels=tuple(texts.facts["labels"]),
        published=published,
        settings={"label": label},
        majority=majority(tables["test"].values("labels")) if sets["test"] else None,
        notes=notes,
    )


def classify(
    *,
    data: Any = None,
    length: int | None = None,
    tokenizer: str = "bpe",
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    labels: Sequence[str] | None = None,
    holdout: float = 0.1,
    **reading: Any,
) -> Task:
    """Texts, or pairs if `pair` names the second column. `columns` names the fields of a headerless file."""
    roles = {"text": (text, TEXT), "pair": (pair, PAIR)} if pair else {"text": (text, TEXT)}
    source = Source(data=data, generated=reviews, holdout=holdout, **reading)
    texts = Texts(source, roles=roles, tokenizer=tokenizer)
    return _task("classify", texts, length=length, label=label, labels=labels)


def text(*, data: Any, length: int = 4096, columns: Sequence[str] | None = IMDB, **reading: Any) -> Task:
    """Long-Range Arena's Text: IMDB reviews as bytes; the class token counts within `length`.

    `data` holds train and test files with the columns label, rating, id, text and no header (or other
    `columns`; None reads them from a header). As published, the test set also validates; `holdout` takes a
    share of the training set instead.
    """
    source = Source(data=data, columns=columns, **reading)
    texts = Texts(source, roles={"text": (None, TEXT)}, tokenizer="bytes")
    return _task("text", texts, length=length, published=PUBLISHED["text"])


def retrieval(
    *,
    data: Any,
    length: int = 4000,
    columns: Sequence[str] | None = AAN,
    holdout: float = 0.1,
    **reading: Any,
) -> Task:
    """Long-Range Arena's Retrieval: does one paper cite the other? Bytes, each paper encoded on its own.

    `data` is the published folder (new_aan_pairs.train.tsv, .eval.tsv, .test.tsv), which has no headers.
    """
    roles = {"text": ("text1", TEXT), "pair": ("text2", PAIR)}
    source = Source(data=data, columns=columns, holdout=holdout, **reading)
    texts = Texts(source, roles=roles, tokenizer="bytes")
    published = PUBLISHED["retrieval"]
    return _task("retrieval", texts, length=length, labels=("0", "1"), towers=True, published=published)
