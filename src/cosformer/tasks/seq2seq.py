"""One sequence to another through cross attention: `seq2seq` for one's own pairs, the toy `reverse`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from .cache import hashed
from .collate import Collate
from .contract import SPLITS, Special, Task
from .generated import dates
from .metrics import seq2seq_scores
from .source import Source
from .table import Arrays, Mapped
from .texts import Texts, length_for

SOURCE = ("source", "src", "input")
TARGET = ("target", "tgt", "output")


def ended(row: dict[str, Any], *, length: int, target_length: int, eos: int) -> dict[str, Any]:
    """A row as a model gets it: both sides cut, with the end token."""
    end = torch.tensor([eos])
    source, target = row["source"][: length - 1], row["target"][: target_length - 1]
    return {"input_ids": torch.cat([source, end]), "labels": torch.cat([target, end])}


def seq2seq(
    *,
    data: Any = None,
    length: int | None = None,
    target_length: int | None = None,
    tokenizer: str = "bpe",
    columns: Sequence[str] | None = None,
    source: str | None = None,
    target: str | None = None,
    holdout: float = 0.05,
    skip_bad_rows: int = 0,
    seed: int = 0,
    cache: Any = None,
) -> Task:
    """Pairs of texts from a table; without data, dates to rewrite. Longer texts are cut."""
    target_length = target_length or length
    if any(asked is not None and asked < 2 for asked in (length, target_length)):
        raise ValueError(f"length and target_length must be at least 2; got {length} and {target_length}")
    roles = {"source": (source, SOURCE), "target": (target, TARGET)}
    source_ = Source(data=data, columns=columns, holdout=holdout, seed=seed, cache=cache, generated=dates)
    source_.skip_bad_rows = skip_bad_rows
    texts = Texts(source_, roles=roles, tokenizer=tokenizer)

    facts: dict[str, Any] = {}
    tables = texts.stored("pairs", lambda: texts.source.each(texts.tokens), facts=facts)
    encode, train = texts.encoder, tables["train"]
    length, notes = length_for(train.lengths("source") + 1, length)
    setting = "--set task.target_length=N"
    target_length, more = length_for(train.lengths("target") + 1, target_length, setting=setting)
    sizes: dict[str, Any] = {"length": length, "target_length": target_length}
    cut = partial(ended, eos=encode.special.eos, **sizes)
    sets: dict[str, Any] = {split: Mapped(tables[split], cut) for split in SPLITS}
    return Task(
        name="seq2seq",
        kind="seq2seq",
        **sets,
        **seq2seq_scores(encode.special, encode.tokenizer),
        collate=Collate(encode.special.pad),
        special=encode.special,
        tokenizer=encode.fit(length, single="$A eos"),
        vocab_size=encode.size,
        max_length=length,
        max_target_length=target_length,
        settings={**sizes, **texts.settings},
        fingerprint=encode.fingerprint(texts.key["content"]),
        notes=(*facts["notes"], *notes, *more),
    )


def reverse(
    *, length: int = 16, symbols: int = 16, examples: Sequence[int] = (20_000, 500, 500), seed: int = 0
) -> Task:
    """Toy: `length` random symbols, to be written in reverse: cross attention must carry them."""
    sets: dict[str, Any] = {}
    size = Special.count + symbols
    for number, (split, count) in enumerate(zip(SPLITS, examples, strict=True)):
        given = np.random.default_rng((seed, 3, number)).integers(Special.count, size, (count, length))
        sets[split] = Arrays(input_ids=given, labels=np.c_[given[:, ::-1], np.full(count, Special.eos)])
    settings = {"length": length, "symbols": symbols, "examples": list(examples), "seed": seed}
    return Task(
        name="reverse",
        kind="seq2seq",
        **sets,
        **seq2seq_scores(Special()),
        collate=Collate(Special.pad),
        vocab_size=size,
        max_length=length,
        max_target_length=length + 1,
        settings=settings,
        fingerprint=hashed("reverse", settings),
    )
