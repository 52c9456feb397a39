"""Language modelling: `lm`, predict the next token, and `mlm`, restore the hidden ones."""

from typing import Any

from .collate import Collate
from .contract import SPLITS, Task
from .corpus import Corpus
from .metrics import language_scores
from .packing import Masked, Packed
from .table import Table, Writer, stored
from .tokens import Encoder, encoder


def _tokenised(
    corpus: Corpus, tokenizer: str, cache: Any
) -> tuple[Encoder, dict[str, Table], dict[str, Any]]:
    """Every document as start, text, end, with the size of its text; and what all of it depends on."""
    key = corpus.key()
    texts = (text for split, text, _ in corpus if split == "train")
    encode = encoder(tokenizer, texts=texts, key=key, cache=cache)

    def fill(writer: Writer) -> None:  # a document need not fit in memory
        size = 0
        for split, text, end in corpus:
            if text and not size:
                writer.add(split, {"tokens": [encode.special.bos]}, end=False)
            writer.add(split, {"tokens": encode.encode(text)}, end=False)
            size += len(text.encode())
            if end and size:
                writer.add(split, {"tokens": [encode.special.eos], "bytes": size})
                size = 0

    vocabulary: dict[str, Any] = {"vocab_size": encode.size, "vocabulary": encode.vocabulary()}
    tables, _ = stored("corpus", fill, cache=cache, **vocabulary, **key)
    return encode, tables, {"tokenizer": tokenizer, **key}


def _task(name: str, kind: str, encode: Encoder, **fields: Any) -> Task:
    collate = Collate(encode.special.pad, packed=True)
    known = {"vocab_size": encode.size, "special": encode.special, "tokenizer": encode.tokenizer}
    return Task(name=name, kind=kind, collate=collate, **known, **fields)


def lm(
    *,
    data: Any = None,
    length: int = 512,
    stride: int | None = None,
    tokenizer: str = "bytes",
    isolate: bool = True,
    text: str | None = None,
    separator: str | None = None,
    holdout: float = 0.05,
    seed: int = 0,
    cache: Any = None,
) -> Task:
    """Autoregressive language modelling.

    Evaluation slides: windows begin every `stride` tokens (half the length if None) and score what is new.
    `isolate=False` lets attention cross documents, as papers on WikiText do: no `position_ids` then.
    """
    corpus = Corpus(data, text=text, separator=separator, holdout=holdout, seed=seed)
    encode, tables, key = _tokenised(corpus, tokenizer, cache)
    stride = length // 2 if stride is None else stride
    # Tokens that are not strings of bytes get the training set's mean: exact on the whole.
    known, train = encode.byte_lengths(), tables["train"]
    mean = train.values("bytes").sum() / len(train.values("tokens"))
    steps = {"train": None, "validation": stride, "test": stride}
    sets = {s: Packed(tables[s], length=length, stride=steps[s], isolate=isolate) for s in SPLITS}
    lengths = mean if known is None else known
    scores = language_scores(shift=True, metric="perplexity", byte_lengths=lengths)
    chosen = {"length": length, "stride": stride, "isolate": isolate}
    return _task("lm", "causal-lm", encode, **sets, **scores, max_length=length, settings=chosen | key)


def mlm(
    *,
    data: Any = None,
    length: int = 512,
    tokenizer: str = "bytes",
    isolate: bool = True,
    whole_word: bool = False,
    share: float = 0.15,
    copies: int = 10,
    text: str | None = None,
    separator: str | None = None,
    holdout: float = 0.05,
    seed: int = 0,
    cache: Any = None,
) -> Task:
    """Masked pre-training: a `share` of tokens hidden, by whole words if `whole_word` (packing.Masked)."""
    corpus = Corpus(data, text=text, separator=separator, holdout=holdout, seed=seed)
    encode, tables, key = _tokenised(corpus, tokenizer, cache)
    hide: dict[str, Any] = {
        "content": encode.content(),
        "mask": encode.special.mask,
        "seed": seed,
        "share": share,
    }
    hide["joins"] = encode.joins() if whole_word else None
    sets = {}
    for split in SPLITS:
        windows = Packed(tables[split], length=length, isolate=isolate)
        sets[split] = Masked(windows, copies=copies if split == "train" else 1, **hide)
    scores = language_scores(shift=False, metric="loss_per_token")
    chosen = {
        "length": length,
        "isolate": isolate,
        "whole_word": whole_word,
        "share": share,
        "copies": copies,
    }
    return _task("mlm", "masked-lm", encode, **sets, **scores, max_length=length, settings=chosen | key)
