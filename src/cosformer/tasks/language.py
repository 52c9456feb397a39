"""Language modelling: `lm`, predict the next token, and `mlm`, restore the hidden ones."""

from collections.abc import Iterator
from typing import Any

from .collate import Collate
from .contract import SPLITS, Task
from .corpus import Corpus
from .metrics import TokenScores, language_metrics, scores
from .packing import Masked, Packed
from .source import Source
from .table import stored
from .tokens import encoder


class Tokenised:
    """A corpus as tables of tokens: every document as start, text, end, with the size of its text."""

    def __init__(self, corpus: Corpus, tokenizer: str):
        self.corpus, self.settings, cache = (
            corpus,
            {"tokenizer": tokenizer, **corpus.key},
            corpus.source.cache,
        )
        self.encoder = encoder(tokenizer, texts=self._training, key=corpus.key, cache=cache)
        self.facts: dict[str, Any] = {}
        known = {"vocabulary": self.encoder.vocabulary(), "facts": self.facts, **corpus.key}
        self.tables = stored("corpus", self._rows, vocab_size=self.encoder.size, cache=cache, **known)

    def _training(self) -> Iterator[str]:
        return (text for split, text, _ in self.corpus if split == "train")

    def _rows(self) -> Iterator[tuple]:  # a document need not fit in memory
        special, size = self.encoder.special, 0
        for split, text, end in self.corpus:
            if text and not size:
                yield split, {"tokens": [special.bos]}, False
            yield split, {"tokens": self.encoder.encode([text])[0]}, False
            size += len(text.encode())
            if end and size:
                yield split, {"tokens": [special.eos], "bytes": size}
                size = 0
        self.facts["left_out"] = self.corpus.source.bad.note()

    def task(self, name: str, length: int, *, template: str, settings: dict[str, Any], **fields: Any) -> Task:
        """The task over windows of these tables; the saved tokenizer writes texts by `template`."""
        content = self.corpus.key["content"]
        return Task(
            name=name,
            collate=Collate(self.encoder.special.pad, packed=True),
            settings={"length": length, **settings, **self.settings},
            left_out=tuple(self.facts["left_out"]),
            notes=self.encoder.notes,
            **self.encoder.fields(content, length, single=template),
            **fields,
        )


def lm(
    *,
    data: Any = None,
    length: int = 512,
    stride: int | None = None,
    tokenizer: str = "bpe",
    isolate: bool = True,
    text: str | None = None,
    separator: str | None = None,
    holdout: float = 0.05,
    skip_bad_rows: int = 0,
    seed: int = 0,
    cache: Any = None,
) -> Task:
    """Autoregressive language modelling.

    Evaluation slides: windows begin every `stride` tokens (half the length if None) and score what is new.
    `isolate=False` lets attention cross documents, as papers on WikiText do: no `position_ids` then.
    """
    source = Source(data=data, holdout=holdout, skip_bad_rows=skip_bad_rows, seed=seed, cache=cache)
    tokens = Tokenised(Corpus(source, text=text, separator=separator), tokenizer)
    stride = length // 2 if stride is None else stride
    strides = {"train": None, "validation": stride, "test": stride}
    sets = {s: Packed(tokens.tables[s], length=length, stride=strides[s], isolate=isolate) for s in SPLITS}
    lengths: Any = tokens.encoder.byte_lengths()
    if lengths is None:  # tokens that are not strings of bytes get the mean: exact on the whole
        train = tokens.tables["train"]
        lengths = train.values("bytes").sum() / len(train.values("tokens"))
    chosen = {"stride": stride, "isolate": isolate}
    fields = scores(TokenScores(shift=True, byte_lengths=lengths), language_metrics, "perplexity") | sets
    return tokens.task("lm", length, kind="causal-lm", template="$A", settings=chosen, **fields)


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
    separator: str | None = None,
    holdout: float = 0.05,
    skip_bad_rows: int = 0,
    seed: int = 0,
    cache: Any = None,
) -> Task:
    """Masked pre-training: a `share` of tokens hidden, by whole words if `whole_word` (packing.Masked)."""
    source = Source(data=data, holdout=holdout, skip_bad_rows=skip_bad_rows, seed=seed, cache=cache)
    tokens = Tokenised(Corpus(source, text=text, separator=separator), tokenizer)
    encode = tokens.encoder
    hide: dict[str, Any] = {"content": encode.content(), "mask": encode.special.mask, "seed": seed}
    hide |= {"share": share, "joins": encode.joins() if whole_word else None}
    fields = scores(TokenScores(shift=False), language_metrics, "loss_per_token")
    for split in SPLITS:
        windows = Packed(tokens.tables[split], length=length, isolate=isolate)
        fields[split] = Masked(windows, copies=copies if split == "train" else 1, **hide)
    chosen = {"isolate": isolate, "whole_word": whole_word, "share": share, "copies": copies}
    return tokens.task("mlm", length, kind="masked-lm", template="bos $A eos", settings=chosen, **fields)
