"""Small generated tables for when no data is given: short reviews to classify, dates to rewrite."""

import datetime
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .source import SPLITS, Row

SIZES = (8_000, 1_000, 1_000)
NOUNS = [
    "film",
    "plot",
    "acting",
    "score",
    "script",
    "pace",
    "ending",
    "cast",
    "camera",
    "dialogue",
    "humour",
    "story",
    "opening",
    "editing",
    "lighting",
]
ADVERBS = ["truly", "rather", "quite", "very", "simply", "oddly", "almost", "really"]
GOOD = [
    "good",
    "great",
    "fresh",
    "moving",
    "clever",
    "warm",
    "bright",
    "honest",
    "lively",
    "sharp",
    "tender",
    "graceful",
]
BAD = [
    "bad",
    "dull",
    "weak",
    "clumsy",
    "stale",
    "cold",
    "tired",
    "hollow",
    "noisy",
    "lazy",
    "shallow",
    "awkward",
]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


def reviews(*, seed: int) -> Iterator[tuple[str, Row]]:
    """Sentences of one to three clauses; the label is the sentiment of the clause that decides.

    "but" hands the decision to what follows, "although" to what precedes, and a negation turns its clause round, so counting
    words is not enough: as many clauses say good as bad under either label.
    """
    path, rng = Path("<generated reviews>"), np.random.default_rng((seed, 1))
    line = 0
    for split, size in zip(SPLITS, SIZES):
        for _ in range(size):
            line += 1
            label = int(rng.integers(2))
            clauses = [_clause(rng, label)]
            for _ in range(rng.integers(3)):
                other = _clause(rng, int(rng.integers(2)))
                clauses = [other, "but", *clauses] if rng.random() < 0.5 else [*clauses, "although", other]
            yield (
                split,
                Row(
                    path,
                    line,
                    {"text": " ".join(clauses) + " .", "label": "positive" if label else "negative"},
                ),
            )


def _clause(rng: np.random.Generator, good: int) -> str:
    negated = bool(rng.integers(2))
    words = GOOD if bool(good) != negated else BAD
    noun, adverb, word = (side[rng.integers(len(side))] for side in (NOUNS, ADVERBS, words))
    return f"the {noun} was {'never ' if negated else ''}{adverb} {word}"


def dates(*, seed: int) -> Iterator[tuple[str, Row]]:
    """Dates as people write them, to be rewritten as year-month-day."""
    path, rng = Path("<generated dates>"), np.random.default_rng((seed, 2))
    line = 0
    for split, size in zip(SPLITS, SIZES):
        for _ in range(size):
            line += 1
            day = datetime.date(1900, 1, 1) + datetime.timedelta(days=int(rng.integers(55_000)))
            yield split, Row(path, line, {"source": _written(rng, day), "target": day.isoformat()})


def _written(rng: np.random.Generator, day: datetime.date) -> str:
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
    return forms[rng.integers(len(forms))]
