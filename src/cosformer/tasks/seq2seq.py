"""One sequence to another through cross attention: `seq2seq` for one's own pairs, `reverse` as the toy to be solved."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cache import prepared
from .contract import IGNORE, Special, Task
from .generated import dates
from .metrics import Seq2SeqMetrics, token_choice
from .packing import pad
from .source import SPLITS, DataError, Row, column, fingerprint, split_rows, tables
from .table import Arrays, Table, Writer
from .tokens import Encoder, encoder

SOURCE = ("source", "src", "input")
TARGET = ("target", "tgt", "output")


class Collate:
    """Rows of (input_ids, labels) to a batch: inputs padded and masked, labels filled up with what carries no loss."""

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        rows = [item["input_ids"] for item in items]
        return {
            "input_ids": pad(rows, self.pad_id),
            "attention_mask": pad([torch.ones_like(row) for row in rows], 0),
            "labels": pad([item["labels"] for item in items], IGNORE),
        }


def _task(
    name: str,
    sets: dict[str, Any],
    *,
    special: Special,
    vocab_size: int,
    length: int,
    target_length: int,
    settings: dict[str, Any],
    tokenizer: Any = None,
) -> Task:
    return Task(
        name=name,
        kind="seq2seq",
        collate=Collate(special.pad),
        preprocess_logits_for_metrics=token_choice,
        compute_metrics=Seq2SeqMetrics(eos=special.eos, pad=special.pad, tokenizer=tokenizer),
        metric="sequence_accuracy",
        greater_is_better=True,
        vocab_size=vocab_size,
        max_length=length,
        max_target_length=target_length,
        special=special,
        tokenizer=tokenizer,
        settings={"length": length, "target_length": target_length, **settings},
        **sets,
    )


def _write(
    rows: Iterable[tuple[str, Row]],
    encode: Encoder,
    folder: Path,
    *,
    source: str | None,
    target: str | None,
    length: int,
    target_length: int,
) -> None:
    count, eos = dict.fromkeys(SPLITS, 0), encode.special.eos
    arrays = {"input_ids": encode.dtype, "labels": encode.dtype}
    with ExitStack() as stack:
        writers = {split: stack.enter_context(Writer(folder / split, arrays=arrays)) for split in SPLITS}
        for split, row in rows:
            given = encode.encode(row.text(column(row, source, SOURCE, argument="source")))
            wanted = encode.encode(row.text(column(row, target, TARGET, argument="target")))
            writers[split].add(
                input_ids=np.r_[given[: length - 1], eos], labels=np.r_[wanted[: target_length - 1], eos]
            )
            count[split] += 1
    for split in SPLITS:
        if not count[split]:
            raise DataError(
                f"the {split} split has no rows. Give more rows, or files named train, validation and test"
            )


def _read(
    data: Any, *, columns: Sequence[str] | None, holdout: float, seed: int
) -> Iterable[tuple[str, Row]]:
    return split_rows(tables(data, columns=columns), holdout=holdout, seed=seed)


def _texts(rows: Iterable[tuple[str, Row]], source: str | None, target: str | None) -> Iterable[str]:
    for split, row in rows:
        if split == "train":
            yield row.text(column(row, source, SOURCE, argument="source"))
            yield row.text(column(row, target, TARGET, argument="target"))


def seq2seq(
    *,
    data: Any = None,
    length: int = 256,
    target_length: int | None = None,
    tokenizer: str = "bytes",
    columns: Sequence[str] | None = None,
    source: str | None = None,
    target: str | None = None,
    holdout: float = 0.05,
    seed: int = 0,
    cache: Any = None,
) -> Task:
    """Pairs of texts from a table; without data, dates to rewrite. Longer texts are cut; both sides end in `special.eos`."""
    target_length = target_length or length
    if min(length, target_length) < 2:
        raise ValueError(f"length and target_length must be at least 2; got {length} and {target_length}")
    if data is None:
        key: dict[str, Any] = {"content": "dates", "seed": seed}
        read: Callable[[], Iterable[tuple[str, Row]]] = partial(dates, seed=seed)
    else:
        key = {"content": fingerprint(data), "columns": columns, "holdout": holdout, "seed": seed}
        read = partial(_read, data, columns=columns, holdout=holdout, seed=seed)
    key |= {"source": source, "target": target}
    encode = encoder(tokenizer, texts=_texts(read(), source, target), key=key, cache=cache)

    def make(draft: Path) -> None:
        _write(
            read(), encode, draft, source=source, target=target, length=length, target_length=target_length
        )

    sizes = {"length": length, "target_length": target_length}
    folder = prepared(
        "pairs", make, cache=cache, vocabulary=encode.tokenizer.backend_tokenizer.to_str(), **sizes, **key
    )
    return _task(
        "seq2seq",
        {split: Table(folder / split) for split in SPLITS},
        special=encode.special,
        vocab_size=encode.size,
        length=length,
        target_length=target_length,
        tokenizer=encode.tokenizer,
        settings={"tokenizer": tokenizer, **key},
    )


def reverse(
    *, length: int = 16, symbols: int = 16, examples: Sequence[int] = (20_000, 500, 500), seed: int = 0
) -> Task:
    """Toy: `length` random symbols, to be written in reverse. Only the encoder sees them: cross attention must carry them."""
    special, sets = Special(), {}
    for number, (split, size) in enumerate(zip(SPLITS, examples, strict=True)):
        rng = np.random.default_rng((seed, 3, number))
        given = rng.integers(special.count, special.count + symbols, (size, length))
        sets[split] = Arrays(input_ids=given, labels=np.c_[given[:, ::-1], np.full(size, special.eos)])
    settings = {"symbols": symbols, "examples": list(examples), "seed": seed}
    return _task(
        "reverse",
        sets,
        special=special,
        vocab_size=special.count + symbols,
        length=length,
        target_length=length + 1,
        settings=settings,
    )
