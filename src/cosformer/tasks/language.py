"""Language modelling: `lm`, predict the next token; `mlm`, restore the hidden ones; and self-pretraining."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from .contract import SPLITS, Collate, Rows, Task
from .corpus import Corpus
from .metrics import TokenScores, language_metrics, scoring_fields
from .packing import Masked, Packed
from .table import Mapped, RowPiece
from .texts import Prepared


class Tokenised(Prepared):
    """A corpus as tables of tokens: every document as bos, text, eos, with the bytes of its text."""

    def __init__(self, corpus: Corpus, tokenizer: str):
        self.corpus = corpus
        super().__init__(corpus, tokenizer)
        self.tables = self.stored("corpus", self._rows)

    def training(self) -> Iterator[str]:
        return (text for split, text, _ in self.corpus if split == "train")

    def _rows(self) -> Iterator[RowPiece]:  # in pieces: a document need not fit in memory
        special, size = self.encoder.special, 0
        for split, text, end in self.corpus:
            if text and not size:
                yield RowPiece(split, {"tokens": [special.bos]}, ended=False)
            yield RowPiece(split, {"tokens": self.encoder.encode([text])[0]}, ended=False)
            size += len(text.encode())
            if end and size:
                yield RowPiece(split, {"tokens": [special.eos], "bytes": size})
                size = 0


def lm(
    *,
    data: Any = None,
    length: int = 512,
    stride: int | None = None,
    tokenizer: str = "bpe",
    isolate: bool = True,
    text: str | None = None,
    holdout: float = 0.05,
    **reading: Any,
) -> Task:
    """Autoregressive language modelling.

    Evaluation slides: windows begin every `stride` tokens (half the length if None) and score only new ones.
    `isolate=False` lets attention cross documents, as papers on WikiText do: it leaves out `position_ids`.
    """
    tokens = Tokenised(Corpus(data=data, text=text, holdout=holdout, **reading), tokenizer)
    stride = length // 2 if stride is None else stride
    strides = {"train": None, "validation": stride, "test": stride}
    sets = {s: Packed(tokens.tables[s], length=length, stride=strides[s], isolate=isolate) for s in SPLITS}
    lengths: Any = tokens.encoder.byte_lengths()
    if lengths is None:  # not byte-level: every token gets the training set's mean, an estimate
        known = tokens.sized_by(tokens.tables)
        lengths = known.values("bytes").sum() / len(known.values("tokens"))
    shrink = TokenScores(shift=True, byte_lengths=lengths)
    fields = scoring_fields(shrink, language_metrics, "perplexity", greater_is_better=False) | sets
    fields["settings"] = {"stride": stride, "isolate": isolate}
    tokens.encoder.tokenizer.padding_side = "left"  # prompts end where generation goes on
    return tokens.task("lm", length, kind="causal-lm", single="$A", packed=True, **fields)


def mlm(
    *,
    data: Any = None,
    length: int = 512,
    tokenizer: str = "bpe",
    isolate: bool = True,
    whole_word: bool = False,
    share: float = 0.15,
    copies: int = 10,
    text: str | None = None,
    holdout: float = 0.05,
    seed: int = 0,
    **reading: Any,
) -> Task:
    """Masked pre-training: a `share` of tokens hidden, by whole words if `whole_word` (packing.Masked)."""
    corpus = Corpus(data=data, text=text, holdout=holdout, seed=seed, **reading)
    tokens = Tokenised(corpus, tokenizer)
    encode = tokens.encoder
    joins = encode.joins() if whole_word else None
    hide = {"content": encode.content(), "mask": encode.special.mask, "seed": seed, "joins": joins}
    windows = {s: Packed(tokens.tables[s], length=length, isolate=isolate) for s in SPLITS}
    fields = _hidden(windows, copies=copies, share=share, **hide)
    settings = {"isolate": isolate, "whole_word": whole_word, "share": share, "copies": copies}
    fields |= {"kind": "masked-lm", "settings": settings}
    return tokens.task("mlm", length, single="bos $A eos", packed=True, **fields)


def pretraining(task: Task, *, share: float = 0.15, copies: int = 10, seed: int = 0) -> Task:
    """The masked-lm task over a classification task's own inputs, vocabulary and lengths."""
    if "classification" not in task.kind:
        raise ValueError(f"self-pretraining takes a classification task; {task.name!r} is {task.kind}")
    ids = task.special
    reserved = (ids.pad, ids.bos, ids.eos, ids.sep, ids.mask)
    if task.tokenizer is not None:
        reserved = task.tokenizer.all_special_ids
    content = np.setdiff1d(np.arange(task.vocab_size), reserved)
    sets: dict[str, Rows] = {split: getattr(task, split) for split in SPLITS}
    if task.kind == "pair-classification":
        sets = {split: Mapped(range(2 * len(rows)), partial(_single, rows)) for split, rows in sets.items()}
    return replace(
        task,
        name=f"{task.name}-pretraining",
        kind="masked-lm",
        collate=Collate(ids.pad),
        settings={**task.settings, "share": share, "copies": copies, "pretraining_seed": seed},
        labels=(),
        majority=None,
        **_hidden(sets, copies=copies, share=share, content=content, mask=ids.mask, seed=seed),
    )


def _single(pairs: Rows, index: int) -> dict[str, Tensor]:
    """Text number `index` when the texts of all pairs are laid end to end."""
    return {"input_ids": pairs[index // 2]["pair_input_ids" if index % 2 else "input_ids"]}


def _hidden(sets: Mapping[str, Rows], *, copies: int, **hide: Any) -> dict[str, Any]:
    """A masked-lm task's own fields: its scores, and its sets with tokens hidden (packing.Masked)."""
    shrink = TokenScores(shift=False)
    fields = scoring_fields(shrink, language_metrics, "perplexity", greater_is_better=False)
    for split, rows in sets.items():
        fields[split] = Masked(rows, copies=copies if split == "train" else 1, **hide)
    return fields
