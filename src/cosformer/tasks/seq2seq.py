"""One sequence to another through cross attention: `seq2seq` for one's own pairs of texts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .collate import Collate
from .contract import SPLITS, Task
from .generated import dates
from .metrics import Seq2SeqMetrics, scores, token_choice
from .source import Source
from .table import Mapped
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
    table = Source(data=data, columns=columns, holdout=holdout, seed=seed, cache=cache)
    table.generated, table.skip_bad_rows = dates, skip_bad_rows
    texts = Texts(table, roles=roles, tokenizer=tokenizer)
    facts: dict[str, Any] = {}
    tables = texts.stored("pairs", lambda: table.each(texts.texts), facts=facts)
    encode, train = texts.encoder, tables["train"]
    length, notes = length_for(train.lengths("source") + 1, length)
    setting = "--set task.target_length=N"
    target_length, more = length_for(train.lengths("target") + 1, target_length, setting=setting)
    sizes: dict[str, Any] = {"length": length, "target_length": target_length}
    special, cut = encode.special, partial(ended, eos=encode.special.eos, **sizes)
    metrics = Seq2SeqMetrics(eos=special.eos, pad=special.pad, tokenizer=encode.tokenizer)
    sets: dict[str, Any] = {split: Mapped(tables[split], cut) for split in SPLITS}
    return Task(
        name="seq2seq",
        kind="seq2seq",
        **sets,
        **scores(token_choice, metrics, "sequence_accuracy"),
        **encode.fields(texts.key["content"], length, single="$A eos"),
        collate=Collate(special.pad),
        max_target_length=target_length,
        settings={**sizes, **texts.settings},
        left_out=tuple(facts["left_out"]),
        notes=(*encode.notes, *notes, *more),
    )
