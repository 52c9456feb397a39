"""One sequence to another through cross attention: `seq2seq` for one's own pairs of texts."""

from functools import partial
from typing import Any

import torch

from .contract import SPLITS, Task
from .generated import dates
from .metrics import Seq2SeqMetrics, scoring_fields, token_choice
from .source import Source
from .table import Mapped
from .texts import Texts, length_for

SOURCE = ("source", "src", "input")
TARGET = ("target", "tgt", "output")


def ended(row: dict[str, Any], *, length: int, target_length: int, eos: int) -> dict[str, Any]:
    """A row as model input: both sides cut, with the end token."""
    end = torch.tensor([eos])
    source, target = row["source"][: length - 1], row["target"][: target_length - 1]
    return {"input_ids": torch.cat([source, end]), "labels": torch.cat([target, end])}


def seq2seq(
    *,
    data: Any = None,
    length: int | None = None,
    target_length: int | None = None,
    tokenizer: str = "bpe",
    source: str | None = None,
    target: str | None = None,
    holdout: float = 0.05,
    **reading: Any,
) -> Task:
    """Pairs of texts from a table; without data, dates to rewrite. Longer texts are cut."""
    target_length = target_length or length
    if any(asked is not None and asked < 2 for asked in (length, target_length)):
        raise ValueError(f"length and target_length must be at least 2; got {length} and {target_length}")
    roles = {"source": (source, SOURCE), "target": (target, TARGET)}
    table = Source(data=data, generated=dates, holdout=holdout, **reading)
    texts = Texts(table, roles=roles, tokenizer=tokenizer)
    tables = texts.stored("pairs", lambda: texts.encoded(table.each(texts.texts)))
    encode, known = texts.encoder, texts.sized_by(tables)
    length, notes = length_for(known.lengths("source") + 1, length, texts="sources")
    said = {"setting": "--set task.target_length=N", "texts": "targets"}
    target_length, more = length_for(known.lengths("target") + 1, target_length, **said)
    sizes: dict[str, Any] = {"length": length, "target_length": target_length}
    special, cut = encode.special, partial(ended, eos=encode.special.eos, **sizes)
    metrics = Seq2SeqMetrics(eos=special.eos, pad=special.pad, tokenizer=encode.tokenizer)
    sets: dict[str, Any] = {split: Mapped(tables[split], cut) for split in SPLITS}
    return texts.task(
        "seq2seq",
        length,
        single="$A eos",
        kind="seq2seq",
        **sets,
        **scoring_fields(token_choice, metrics, "sequence_accuracy", greater_is_better=True),
        max_target_length=target_length,
        settings=sizes,
        notes=[*notes, *more],
    )
