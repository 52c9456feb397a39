"""ListOps, Long-Range Arena's nested MIN, MAX, MED and SM (sum modulo 10): generated, or read from its TSV.

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]  ->  5

A node is an operator with probability `OPERATOR_SHARE` while its depth is below the limit (the root's is 1),
otherwise a digit; an operator has 2 to `args` arguments. A tree is kept if it is new and its number of
tokens, closing brackets included, lies strictly between `least` and `most`. Whole batches of trees grow level
by level in numpy; only those of the right length are written out.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from .contract import SPLITS, Special, Task, listed
from .published import arena
from .source import Row, Source

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*map(str, range(10)), *OPERATORS, "]")  # a digit's index is its value
CLOSE = SYMBOLS.index("]")
OPERATOR_SHARE = 0.25
HOLDOUT = 0.05  # share of a TSV that names no splits


def _grow(rng: np.random.Generator, trees: int, *, depth: int, args: int) -> list[np.ndarray]:
    """The levels of a forest: each node's number of arguments, its children a level down; 0 for a digit.

    Every root is an operator: a lone digit has one token, and only `least=0` would keep it.
    """
    levels = [rng.integers(2, args + 1, trees)]
    for level in range(2, depth + 1):
        count = int(levels[-1].sum())
        operator = rng.random(count) < OPERATOR_SHARE if level < depth else np.zeros(count, bool)
        levels.append(np.where(operator, rng.integers(2, args + 1, count), 0))
    return levels


def _before(lengths: np.ndarray) -> np.ndarray:
    """The offset of each subtree when a level's subtrees lie end to end; last, their total length."""
    return np.r_[0, np.cumsum(lengths)]


def _lengths(levels: list[np.ndarray]) -> list[np.ndarray]:
    """Tokens in each node's subtree: 1 for a digit, else its arguments' plus operator and bracket."""
    lengths = [np.ones(len(levels[-1]), np.int64)]
    for arity in levels[-2::-1]:
        before, ends = _before(lengths[0]), np.cumsum(arity)
        lengths.insert(0, np.where(arity > 0, before[ends] - before[ends - arity] + 2, 1))
    return lengths


def _keep(levels: list[np.ndarray], chosen: np.ndarray) -> list[np.ndarray]:
    """The forest of the chosen trees (one bool per tree)."""
    kept = []
    for arity in levels:
        kept.append(arity[chosen])
        chosen = np.repeat(chosen, arity)
    return kept


def _write_out(
    rng: np.random.Generator, levels: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fills in operators and digits -> (tokens of all trees, where each tree ends, values of the roots)."""
    lengths = _lengths(levels)
    ends = np.cumsum(lengths[0])
    tokens = np.empty(int(ends[-1]), np.uint8)
    place, symbols = ends - lengths[0], []
    for arity, length, below in zip(levels, lengths, [*lengths[1:], np.empty(0, np.int64)]):
        operator = rng.integers(len(OPERATORS), size=len(arity)) + 10
        symbols.append(np.where(arity > 0, operator, rng.integers(10, size=len(arity))))
        tokens[place + length - 1] = CLOSE
        tokens[place] = symbols[-1]  # after CLOSE: a digit's only token is first and last
        # An argument follows its operator and the arguments before it.
        before = _before(below)
        place = np.repeat(place + 1 - before[np.cumsum(arity) - arity], arity) + before[:-1]
    values = symbols[-1]
    for arity, symbol in zip(levels[-2::-1], symbols[-2::-1]):
        inner = arity > 0
        symbol[inner] = _applied(symbol[inner], arity[inner], values)
        values = symbol
    return tokens, ends, values


def _applied(operator: np.ndarray, arity: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Each operator's value; its arguments are the next `arity` of `values`. Medians round down."""
    given, each = np.arange(arity.max(initial=1)) < arity[:, None], np.arange(len(arity))
    ranked = np.full(given.shape, 10)  # sorts after every digit
    ranked[given] = values
    ranked.sort(1)
    median = (ranked[each, (arity - 1) // 2] + ranked[each, arity // 2]) // 2
    total = ranked.sum(1, where=ranked < 10) % 10
    found = np.stack([ranked[:, 0], ranked[each, arity - 1], median, total])  # in the order of OPERATORS
    return found[operator - 10, each]


def trees(
    *, seed: int, least: int, most: int, depth: int, args: int, batch: int = 20_000
) -> Iterator[tuple[np.ndarray, int]]:
    """Distinct trees without end, as (symbol numbers, value), with `least < tokens < most`."""
    rng, seen, idle = np.random.default_rng((seed, 6)), set(), 0
    while True:
        levels = _grow(rng, batch, depth=depth, args=args)
        total = _lengths(levels)[0]
        kept = (total > least) & (total < most)
        idle += 1
        if kept.any():
            tokens, ends, values = _write_out(rng, _keep(levels, kept))
            for tree, value in zip(np.split(tokens, ends[:-1]), values):
                if (name := tree.tobytes()) not in seen:
                    seen.add(name)
                    idle = 0
                    yield tree, int(value)
        if idle == 50:
            wanted = f"no new tree of more than {least} and fewer than {most} tokens in {50 * batch:,} draws"
            found = f"with depth={depth}, args={args}; {len(seen):,} found before"
            raise ValueError(f"{wanted} {found}. Ask for fewer examples or longer trees")


def _generated(*, examples: Sequence[int], **limits: int) -> Iterator[tuple[str, dict[str, Any]]]:
    source = trees(**limits)
    for split, size in zip(SPLITS, examples, strict=True):
        for tree, value in itertools.islice(source, size):
            yield split, {"input_ids": np.r_[Special.bos, tree + Special.count], "labels": value}


def _tree(row: Row, *, length: int) -> dict[str, Any]:
    """A record of the published TSV: Source, whose round brackets are redundant, and Target."""
    if not {"Source", "Target"} <= row.fields.keys():
        raise row.error(f"expected the columns Source and Target, found {listed(row.fields)}")
    words = [word for word in row.text("Source").split() if word not in ("(", ")")]
    if unknown := [word for word in words if word not in SYMBOLS]:
        raise row.error(f"{unknown[0]!r} is not one of {' '.join(SYMBOLS)}")
    if row.fields["Target"] not in SYMBOLS[:10]:
        raise row.error(f"Target must be a digit; got {row.fields['Target']!r}")
    if len(words) >= length:
        raise row.error(f"{len(words)} tokens do not fit into length={length} with the class token")
    ids = [Special.bos, *(SYMBOLS.index(word) + Special.count for word in words)]
    return {"input_ids": ids, "labels": int(row.fields["Target"])}


def listops(
    *,
    data: Any = None,
    length: int = 2000,
    least: int | None = None,
    depth: int = 10,
    args: int = 10,
    examples: Sequence[int] = (96_000, 2_000, 2_000),
    seed: int = 0,
    cache: Any = None,
) -> Task:
    """ListOps with the published limits and splits; smaller `length`, `depth` or `args` make it easier.

    Trees have more than `least` tokens (a quarter of the length if None, as published) and fewer than
    `length`; the class token in front brings the longest to `length`.
    """
    least = length // 4 if least is None else least
    if not (2 <= args and 2 <= depth and 0 <= least < length - 4):
        given = f"args={args}, depth={depth}, least={least}, length={length}"
        raise ValueError(f"need args >= 2, depth >= 2 and 0 <= least < length - 4; got {given}")
    limits: dict[str, Any] = {"least": least, "most": length, "depth": depth, "args": args, "seed": seed}
    settings: dict[str, Any] = {**limits, "examples": list(examples)}
    rows: Callable[[], Iterable[tuple]] = partial(_generated, examples=examples, **limits)
    if data is not None:
        source = Source(data=data, holdout=HOLDOUT, seed=seed, cache=cache)
        settings = {"content": source.content(), "most": length, "seed": seed}
        rows = partial(source.each, partial(_tree, length=length))
    sizes: dict[str, Any] = {"values": len(SYMBOLS), "length": length, "labels": SYMBOLS[:10]}
    return arena("listops", rows, cache=cache, **sizes, **settings)
