"""Small generated tables for when no data is given: short reviews to classify, dates to rewrite."""

import datetime
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from .contract import SPLITS
from .source import Row

SIZES = (8_000, 1_000, 1_000)
# fmt: off
NOUNS = ["film", "plot", "acting", "score", "script", "pace", "ending", "cast", "camera", "dialogue",
         "humour", "story", "opening", "editing", "lighting"]
ADVERBS = ["truly", "rather", "quite", "very", "simply", "oddly", "almost", "really"]
GOOD = ["good", "great", "fresh", "moving", "clever", "warm", "bright", "honest", "lively", "sharp", "tender",
        "graceful"]
BAD = ["bad", "dull", "weak", "clumsy", "stale", "cold", "tired", "hollow", "noisy", "lazy",
       "shallow", "awkward"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December"]
# fmt: on


def reviews(*, seed: int) -> Iterator[tuple[str, Row]]:
    """Sentences of one to three clauses; the label is the sentiment of the clause that decides.

    "but" hands the decision to what follows, "although" to what precedes, and a negation inverts its clause,
    so counting words is not enough: good and bad words are equally likely under either label.
    """
    return _rows("<generated reviews>", _review, np.random.default_rng((seed, 1)))


def dates(*, seed: int) -> Iterator[tuple[str, Row]]:
    """Dates as people write them, to be rewritten as year-month-day."""
    return _rows("<generated dates>", _date, np.random.default_rng((seed, 2)))


def _rows(
    name: str, draw: Callable[[np.random.Generator], dict[str, str]], rng: np.random.Generator
) -> Iterator[tuple[str, Row]]:
    lines = itertools.count(1)
    for split, size in zip(SPLITS, SIZES):
        for line in itertools.islice(lines, size):
            yield split, Row(Path(name), line, draw(rng))


def _review(rng: np.random.Generator) -> dict[str, str]:
    label = int(rng.integers(2))
    clauses = [_clause(rng, label)]
    for _ in range(rng.integers(3)):
        other = _clause(rng, int(rng.integers(2)))
        clauses = [other, "but", *clauses] if rng.random() < 0.5 else [*clauses, "although", other]
    return {"text": " ".join(clauses) + " .", "label": "positive" if label else "negative"}


def _clause(rng: np.random.Generator, good: int) -> str:
    negated = bool(rng.integers(2))
    words = GOOD if bool(good) != negated else BAD
    noun, adverb, word = (side[rng.integers(len(side))] for side in (NOUNS, ADVERBS, words))
    return f"the {noun} was {'never ' if negated else ''}{adverb} {word}"


def _date(rng: np.random.Generator) -> dict[str, str]:
    day = datetime.date(1900, 1, 1) + datetime.timedelta(days=int(rng.integers(55_000)))
    d, month, year = day.day, MONTHS[day.month - 1], day.year
    ordinal = f"{d}{'th' if 11 <= d <= 13 else {1: 'st', 2: 'nd', 3: 'rd'}.get(d % 10, 'th')}"
    forms = (
        f"{d} {month} {year}",
        f"{month} {ordinal}, {year}",
        f"the {ordinal} of {month} {year}",
        f"{month[:3]} {d} {year}",
        f"{d}.{day.month}.{year}",
        f"{year}, {month[:3]} {ordinal}",
    )
    return {"source": forms[rng.integers(len(forms))], "target": day.isoformat()}
