"""Language modelling: `lm`, predict the next token, and `mlm`, restore the hidden ones."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .cache import prepared
from .contract import Task
from .corpus import Corpus
from .metrics import LanguageMetrics, TokenScores
from .packing import Masked, Packed, WindowCollate
from .source import SPLITS, DataError
from .table import Table, Writer
from .tokens import Encoder, encoder


def _tokenise(corpus: Corpus, encode: Encoder, folder: Path) -> None:
    """Writes every document of the corpus to its split's table, as start, text, end; a document need not fit in memory."""
    special, size = encode.special, dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        writers = {
            s: stack.enter_context(Writer(folder / s, arrays={"tokens": encode.dtype})) for s in SPLITS
        }
        begun = dict.fromkeys(SPLITS, False)
        for split, text, end in corpus:
            writer = writers[split]
            if text:
                if not begun[split]:
                    writer.extend("tokens", [special.bos])
                    begun[split] = True
                writer.extend("tokens", encode.encode(text))
                size[split] += len(text.encode())
            if end and begun[split]:
                writer.extend("tokens", [special.eos])
                writer.end()
                begun[split] = False
    for split in SPLITS:
        if not size[split]:
            few = "too few documents to hold some out. Give more, or files named train, validation and test"
            raise DataError(f"the {split} split is empty: {few}", path=corpus.data)
    (folder / "bytes.json").write_text(json.dumps(size))


def _tables(
    corpus: Corpus, tokenizer: str, cache: Any
) -> tuple[Encoder, dict[str, Table], dict[str, int], dict[str, Any]]:
    key = corpus.key()
    texts = (text for split, text, _ in corpus if split == "train")
    encode = encoder(tokenizer, texts=texts, key=key, cache=cache)
    vocabulary = encode.tokenizer.backend_tokenizer.to_str()
    folder = prepared(
        "corpus", lambda draft: _tokenise(corpus, encode, draft), cache=cache, vocabulary=vocabulary, **key
    )
    tables = {split: Table(folder / split) for split in SPLITS}
    return encode, tables, json.loads((folder / "bytes.json").read_text()), key


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

    Evaluation slides: windows begin every `stride` tokens (half the length if None) and score only what is new.
    `isolate=False` lets attention cross documents, as papers on WikiText do: the batch then has no `position_ids`.
    """
    encode, tables, size, key = _tables(
        Corpus(data, text=text, separator=separator, holdout=holdout, seed=seed), tokenizer, cache
    )
    stride = length // 2 if stride is None else stride
    # Tokens that are not strings of bytes get the training set's mean; exact on the whole, not token by token.
    known = encode.byte_lengths()
    lengths = size["train"] / len(tables["train"].flat("tokens")) if known is None else known
    return Task(
        name="lm",
        kind="causal-lm",
        train=Packed(tables["train"], length=length, isolate=isolate),
        validation=Packed(tables["validation"], length=length, stride=stride, isolate=isolate),
        test=Packed(tables["test"], length=length, stride=stride, isolate=isolate),
        collate=WindowCollate(encode.special.pad),
        preprocess_logits_for_metrics=TokenScores(shift=True, byte_lengths=lengths),
        compute_metrics=LanguageMetrics(bits_per_byte=True),
        metric="perplexity",
        greater_is_better=False,
        vocab_size=encode.size,
        max_length=length,
        special=encode.special,
        tokenizer=encode.tokenizer,
        settings={"length": length, "stride": stride, "tokenizer": tokenizer, "isolate": isolate, **key},
    )


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
    """Masked pre-training: `share` of the tokens hidden, whole words at a time if `whole_word`; see packing.Masked."""
    encode, tables, _, key = _tables(
        Corpus(data, text=text, separator=separator, holdout=holdout, seed=seed), tokenizer, cache
    )
    joins = encode.joins() if whole_word else None

    def masked(split: str, copies: int) -> Masked:
        windows = Packed(tables[split], length=length, isolate=isolate)
        return Masked(
            windows,
            content=encode.content(),
            mask=encode.special.mask,
            seed=seed,
            copies=copies,
            share=share,
            joins=joins,
        )

    return Task(
        name="mlm",
        kind="masked-lm",
        train=masked("train", copies),
        validation=masked("validation", 1),
        test=masked("test", 1),
        collate=WindowCollate(encode.special.pad),
        preprocess_logits_for_metrics=TokenScores(shift=False),
        compute_metrics=LanguageMetrics(bits_per_byte=False),
        metric="loss_per_token",
        greater_is_better=False,
        vocab_size=encode.size,
        max_length=length,
        special=encode.special,
        tokenizer=encode.tokenizer,
        settings={
            "length": length,
            "tokenizer": tokenizer,
            "isolate": isolate,
            "whole_word": whole_word,
            "share": share,
            "copies": copies,
            **key,
        },
    )
