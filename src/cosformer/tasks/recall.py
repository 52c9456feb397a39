"""Remembering exactly: `recall`, many associations, hard for linear attention; toys `copy`, `reverse`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .cache import hashed
from .contract import IGNORE, SPLITS, Collate, Special, Task
from .metrics import Seq2SeqMetrics, TokenScores, language_metrics, scoring_fields, token_choice
from .table import Arrays


def _task(name: str, draw: Callable[..., Arrays], salt: int, settings: dict[str, Any], **fields: Any) -> Task:
    """The task over `draw(rng, size)` for each split, each with its own seed."""
    sets: dict[str, Any] = {}
    for n, (split, size) in enumerate(zip(SPLITS, settings["examples"], strict=True)):
        sets[split] = draw(np.random.default_rng((settings["seed"], salt, n)), size)
    if "kind" not in fields:
        shrink = TokenScores(shift=True)
        fields |= scoring_fields(shrink, language_metrics, "accuracy", greater_is_better=True)
        fields |= {"kind": "causal-lm", "collate": Collate(Special.pad, packed=True)}
    known = {"max_length": settings["length"], "fingerprint": hashed(name, settings)}
    return Task(name=name, settings=settings, **known, **sets, **fields)


def _distinct(rng: np.random.Generator, low: int, high: int, shape: tuple[int, int]) -> np.ndarray:
    """Rows of distinct numbers in [low, high); rows with a repetition are redrawn."""
    drawn = rng.integers(low, high, shape)
    while len(bad := np.flatnonzero((np.diff(np.sort(drawn, 1), axis=1) == 0).any(1))):
        if shape[1] > (high - low) // 8:  # many of few: shuffle, as redrawing would take for ever
            drawn[bad] = low + rng.random((len(bad), high - low)).argsort(1)[:, : shape[1]]
        else:
            drawn[bad] = rng.integers(low, high, (len(bad), shape[1]))
    return drawn


def associations(
    rng: np.random.Generator,
    size: int,
    *,
    length: int,
    pairs: int,
    vocabulary: int,
    power: float,
    blank: bool,
) -> Arrays:
    """`size` rows: keys and values alternate, then every key comes once more, its value to be predicted.

        key value key value ...   .  .  key  .  .  .  key  .        labels only where a value is due

    Distances to the second mention follow a power law, as for bigrams in text. The rest is random, or zeros
    if `blank`.
    """
    keys = _distinct(rng, 1, vocabulary // 2, (size, pairs))
    values = _distinct(rng, vocabulary // 2, vocabulary, (size, pairs))
    context = 2 * pairs
    room = (length - context) // 2  # places for a key and the value after it
    weight = np.arange(1, room + 1) ** (power - 1.0)
    # The top `pairs` of log-weight + Gumbel noise: weighted sampling without replacement.
    place = np.argsort(-(np.log(weight) + rng.gumbel(size=(size, room))), 1)[:, :pairs]
    query = context + 2 * place
    inputs = np.zeros((size, length), np.int64) if blank else rng.integers(0, vocabulary, (size, length))
    inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
    labels = np.full((size, length), IGNORE)
    np.put_along_axis(inputs, query, keys, 1)
    np.put_along_axis(labels, query + 1, values, 1)
    return Arrays(input_ids=inputs.astype(np.int32), labels=labels.astype(np.int32))


def recall(
    *,
    length: int = 128,
    pairs: int | None = None,
    vocabulary: int = 8192,
    power: float = 0.01,
    blank: bool = False,
    examples: Sequence[int] = (100_000, 3_000, 3_000),
    seed: int = 0,
) -> Task:
    """Multi-query associative recall (Arora et al. 2023, Zoology); by default `pairs` is `length // 8`."""
    pairs = length // 8 if pairs is None else pairs
    if length % 2 or pairs < 1 or 4 * pairs > length:
        raise ValueError(f"length must be even and at least 4 * pairs; got length={length}, pairs={pairs}")
    if vocabulary // 2 - 1 < pairs:
        raise ValueError(f"vocabulary={vocabulary} has fewer than pairs={pairs} keys")
    shape: dict[str, Any] = {"length": length, "pairs": pairs, "vocabulary": vocabulary}
    shape |= {"power": power, "blank": blank}
    settings = {**shape, "examples": list(examples), "seed": seed}
    return _task("recall", partial(associations, **shape), 4, settings, vocab_size=vocabulary)


def copy(
    *, length: int = 32, symbols: int = 16, examples: Sequence[int] = (20_000, 500, 500), seed: int = 0
) -> Task:
    """Toy: random symbols, a separator, then the same symbols to be predicted. `length` counts all."""
    if length < 4 or length % 2:
        raise ValueError(f"length must be even and at least 4; got {length}")
    half, size = length // 2 - 1, Special.count + symbols

    def draw(rng: np.random.Generator, count: int) -> Arrays:
        said = rng.integers(Special.count, size, (count, half))
        inputs = np.c_[np.full(count, Special.bos), said, np.full(count, Special.sep), said]
        return Arrays(input_ids=inputs, labels=np.where(np.arange(length) > half + 1, inputs, IGNORE))

    settings = {"length": length, "symbols": symbols, "examples": list(examples), "seed": seed}
    return _task("copy", draw, 5, settings, vocab_size=size)


def reverse(
    *, length: int = 16, symbols: int = 16, examples: Sequence[int] = (20_000, 500, 500), seed: int = 0
) -> Task:
    """Toy: `length` random symbols, to be written in reverse; cross attention must carry them."""
    size = Special.count + symbols

    def draw(rng: np.random.Generator, count: int) -> Arrays:
        given = rng.integers(Special.count, size, (count, length))
        return Arrays(input_ids=given, labels=np.c_[given[:, ::-1], np.full(count, Special.eos)])

    settings = {"length": length, "symbols": symbols, "examples": list(examples), "seed": seed}
    metrics = Seq2SeqMetrics(eos=Special.eos, pad=Special.pad)
    fields = scoring_fields(token_choice, metrics, "sequence_accuracy", greater_is_better=True)
    fields |= {"kind": "seq2seq", "collate": Collate(Special.pad), "max_target_length": length + 1}
    return _task("reverse", draw, 3, settings, vocab_size=size, **fields)
