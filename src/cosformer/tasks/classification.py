"""Text to a class: `classify` for one's own table, and Long-Range Arena's `text` (IMDB) and `retrieval` (AAN), as bytes."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cache import prepared
from .contract import Special, Task
from .generated import reviews
from .metrics import class_choice, classification
from .packing import pad
from .published import PUBLISHED
from .source import SPLITS, DataError, Row, column, fingerprint, split_rows, tables
from .table import Table, Writer
from .tokens import Encoder, encoder

TEXT = ("text", "sentence", "sentence1", "text1", "question1", "premise", "review", "content", "source")
PAIR = ("sentence2", "text2", "question2", "hypothesis", "pair")
LABEL = ("label", "labels", "target", "class", "sentiment", "category")
BYTES = Special()
IMDB = ("label", "rating", "id", "text")
MORE = "Give more rows to hold some out, or files named train, validation and test"
AAN = ("label", "id1", "id2", "text1", "text2")


class Collate:
    """Rows of (input_ids, labels) to a batch, padded to its longest; `pair` names the second text of a pair."""

    def __init__(self, pad_id: int, *, pair: bool = False):
        self.pad_id, self.pair = pad_id, pair

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = {"labels": torch.tensor([int(item["labels"]) for item in items])}
        for prefix in ("", "pair_") if self.pair else ("",):
            rows = [item[prefix + "input_ids"] for item in items]
            batch[prefix + "input_ids"] = pad(rows, self.pad_id)
            batch[prefix + "attention_mask"] = pad([torch.ones_like(row) for row in rows], 0)
        return batch


def task(
    *,
    name: str,
    sets: dict[str, Any],
    vocab_size: int,
    length: int,
    labels: Sequence[str],
    settings: dict[str, Any],
    special: Special = BYTES,
    pair: bool = False,
    tokenizer: Any = None,
    published: Any = None,
) -> Task:
    """A classification task over prepared sets: what `classify` and all of Long-Range Arena share."""
    return Task(
        name=name,
        kind="pair-classification" if pair else "sequence-classification",
        collate=Collate(special.pad, pair=pair),
        preprocess_logits_for_metrics=class_choice,
        compute_metrics=classification,
        metric="accuracy",
        greater_is_better=True,
        vocab_size=vocab_size,
        max_length=length,
        num_labels=len(labels),
        labels=tuple(labels),
        special=special,
        tokenizer=tokenizer,
        published=published,
        settings={"length": length, **settings},
        **sets,
    )


def label_set(rows: Iterable[tuple[str, Row]], name: str | None) -> tuple[str, ...]:
    """The labels of the training rows, in order: of number if all are whole numbers, else of the alphabet."""
    seen: set[str] = set()
    for split, row in rows:
        if split == "train":
            seen.add(_label(row, column(row, name, LABEL, argument="label")))
    if len(seen) < 2:
        raise DataError(f"the training rows have {len(seen)} label(s) {sorted(seen)}; two or more are needed")
    numeric = all(label.lstrip("-").isdigit() for label in seen)
    return tuple(sorted(seen, key=int if numeric else None))


def _label(row: Row, name: str) -> str:
    value = row.fields[name]
    value = str(int(value)) if isinstance(value, (bool, int)) else value
    if isinstance(value, str) and value.strip():
        value = value.strip()
        return (
            value.removesuffix(".0") if value.removesuffix(".0").isdigit() else value
        )  # AAN writes labels as 0.0 and 1.0
    raise row.error(f"column {name!r} must hold a label; got {value!r}")


def _write(
    rows: Iterable[tuple[str, Row]],
    encode: Encoder,
    folder: Path,
    *,
    length: int,
    labels: Sequence[str],
    towers: bool,
    text: str | None,
    pair: str | None,
    label: str | None,
    needed: Sequence[str],
) -> None:
    """Encodes every row into its split's table. A pair is one sequence with a separator, or two if `towers`."""
    number, special = {name: index for index, name in enumerate(labels)}, encode.special
    arrays = dict.fromkeys(("input_ids", "pair_input_ids") if towers else ("input_ids",), encode.dtype)
    count = dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        writers = {
            s: stack.enter_context(Writer(folder / s, arrays=arrays, numbers={"labels": "int64"}))
            for s in SPLITS
        }
        for split, row in rows:
            mark = _label(row, column(row, label, LABEL, argument="label"))
            if mark not in number:
                raise row.error(f"label {mark!r} is not one of {', '.join(labels)}")
            first = encode.encode(row.text(column(row, text, TEXT, argument="text")))
            second = (
                encode.encode(row.text(column(row, pair, PAIR, argument="pair"))) if pair or towers else None
            )
            fields = {"input_ids": np.r_[special.bos, first[: length - 1]], "labels": number[mark]}
            if towers and second is not None:
                fields["pair_input_ids"] = np.r_[special.bos, second[: length - 1]]
            elif second is not None:
                room = length - 3  # start, separator, end; the longer text gives way first
                keep = min(len(first), max(room - len(second), room // 2))
                fields["input_ids"] = np.r_[
                    special.bos, first[:keep], special.sep, second[: room - keep], special.eos
                ]
            writers[split].add(**fields)
            count[split] += 1
    for split in needed:
        if not count[split]:
            raise DataError(f"the {split} split has no rows. {MORE}")
    (folder / "labels.json").write_text(json.dumps(list(labels)))


def _from_table(
    name: str,
    *,
    data: Any,
    columns: Sequence[str] | None,
    length: int,
    tokenizer: str,
    text: str | None,
    pair: str | None,
    label: str | None,
    labels: Sequence[str] | None,
    holdout: float | None,
    seed: int,
    cache: Any,
    towers: bool = False,
    published: Any = None,
) -> Task:
    if length < 8:
        raise ValueError(f"length must be at least 8; got {length}")
    if data is None:
        key: dict[str, Any] = {"content": "reviews", "seed": seed}
        read: Callable[[], Iterable[tuple[str, Row]]] = partial(reviews, seed=seed)
    else:
        key = {"content": fingerprint(data), "columns": columns, "holdout": holdout, "seed": seed}
        read = partial(_read, data, columns=columns, holdout=holdout, seed=seed)
    key |= {"text": text, "pair": pair, "label": label}
    texts = (row.text(column(row, text, TEXT, argument="text")) for split, row in read() if split == "train")
    encode = encoder(tokenizer, texts=texts, key=key, cache=cache)

    def make(draft: Path) -> None:
        names = tuple(map(str, labels)) if labels else label_set(read(), label)
        needed = SPLITS if holdout else ("train", "test")
        _write(
            read(),
            encode,
            draft,
            length=length,
            labels=names,
            towers=towers,
            text=text,
            pair=pair,
            label=label,
            needed=needed,
        )

    vocabulary = encode.tokenizer.backend_tokenizer.to_str()
    folder = prepared(
        "classified",
        make,
        cache=cache,
        vocabulary=vocabulary,
        length=length,
        towers=towers,
        labels=labels,
        **key,
    )
    sets = {split: Table(folder / split) for split in SPLITS}
    if not len(sets["validation"]):
        sets["validation"] = sets["test"]
    return task(
        name=name,
        sets=sets,
        vocab_size=encode.size,
        length=length,
        labels=json.loads((folder / "labels.json").read_text()),
        special=encode.special,
        pair=towers,
        tokenizer=encode.tokenizer,
        published=published,
        settings={"tokenizer": tokenizer, **key},
    )


def _read(
    data: Any, *, columns: Sequence[str] | None, holdout: float | None, seed: int
) -> Iterable[tuple[str, Row]]:
    return split_rows(tables(data, columns=columns), holdout=holdout, seed=seed)


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
    """Classification of texts, or of pairs if `pair` names the second column. `columns` names those of a headerless file."""
    return _from_table(
        "classify",
        data=data,
        columns=columns,
        length=length,
        tokenizer=tokenizer,
        text=text,
        pair=pair,
        label=label,
        labels=labels,
        holdout=holdout,
        seed=seed,
        cache=cache,
    )


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

    `data` holds train and test, as label, rating, id, text without header (or other `columns`; None reads them from a header).
    As published, validation is the test set; `holdout=0.1` takes a tenth of the training set instead.
    """
    return _from_table(
        "text",
        data=data,
        columns=columns,
        length=length,
        tokenizer="bytes",
        text=None,
        pair=None,
        label=None,
        labels=None,
        holdout=holdout,
        seed=seed,
        cache=cache,
        published=PUBLISHED["text"],
    )


def retrieval(
    *, data: Any, length: int = 4000, columns: Sequence[str] | None = AAN, seed: int = 0, cache: Any = None
) -> Task:
    """Long-Range Arena's Retrieval: do two papers cite one another, both as bytes, each through the encoder on its own.

    `data` is the published folder (new_aan_pairs.train.tsv, .eval.tsv, .test.tsv): label, id1, id2, text1, text2, no header.
    """
    return _from_table(
        "retrieval",
        data=data,
        columns=columns,
        length=length,
        tokenizer="bytes",
        text="text1",
        pair="text2",
        label=None,
        labels=("0", "1"),
        holdout=0.1,
        seed=seed,
        cache=cache,
        towers=True,
        published=PUBLISHED["retrieval"],
    )
