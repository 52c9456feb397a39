"""ListOps against the published procedure: a recursive generator and a stack evaluator, both written here."""

import random
import statistics
from collections import Counter

import numpy as np
import pytest

from cosformer.tasks import DataError, build
from cosformer.tasks.listops import CLOSE, SYMBOLS, trees

PUBLISHED = {"least": 500, "most": 2000, "depth": 10, "args": 10}


def evaluate(tokens):
    """One pass with a stack, where the generator works level by level."""
    stack = [[]]
    for token in tokens:
        if token == "]":
            operator, *values = stack.pop()
            values.sort()
            n = len(values)
            value = {
                "[MIN": values[0],
                "[MAX": values[-1],
                "[MED": int((values[(n - 1) // 2] + values[n // 2]) / 2),
                "[SM": sum(values) % 10,
            }[operator]
            stack[-1].append(value)
        elif token.startswith("["):
            stack.append([token])
        else:
            stack[-1].append(int(token))
    assert len(stack) == 1 and len(stack[0]) == 1, "brackets do not match"
    return stack[0][0]


def published_tree(rng, depth=1):
    """The published procedure, node by node: a digit unless depth < 10 and a draw is at most 0.25."""
    if depth >= 10 or rng.random() > 0.25:
        return [str(rng.randrange(10))]
    inner = [token for _ in range(rng.randint(2, 10)) for token in published_tree(rng, depth + 1)]
    return [rng.choice(["[MIN", "[MAX", "[MED", "[SM"]), *inner, "]"]


def published_trees(count, seed):
    rng, kept = random.Random(seed), []
    while len(kept) < count:
        tree = published_tree(rng)
        if 500 < len(tree) < 2000:
            kept.append(tree)
    return kept


def shape(tokens):
    """(deepest node, mean depth of digits and operators, numbers of arguments); the root's depth is 1."""
    depth, depths, arity, counts = 1, [], [], [0]
    for token in tokens:
        if token == "]":
            arity.append(counts.pop())
            depth -= 1
            continue
        counts[-1] += 1
        depths.append(depth)
        if token.startswith("["):
            counts.append(0)
            depth += 1
    return max(depths), sum(depths) / len(depths), arity


@pytest.fixture(scope="module")
def drawn():
    source = trees(seed=0, **PUBLISHED)
    made = [next(source) for _ in range(4_000)]
    return [([SYMBOLS[t] for t in tree], value) for tree, value in made]


def test_an_independent_evaluator_agrees_on_every_label(drawn):
    assert [evaluate(tree) for tree, _ in drawn] == [value for _, value in drawn]


def test_every_tree_keeps_the_published_limits(drawn):
    assert len({tuple(tree) for tree, _ in drawn}) == len(drawn), "examples repeat"
    assert all(500 < len(tree) < 2000 for tree, _ in drawn)
    for tree, _ in drawn[:3_000]:
        deepest, _, arity = shape(tree)
        assert deepest <= 10
        assert min(arity) >= 2 and max(arity) <= 10


def chi_square(first: Counter, second: Counter) -> float:
    """Two-sample statistic over its degrees of freedom: about 1 when both come from one distribution."""
    a, b = sum(first.values()), sum(second.values())
    keys = [key for key in first | second if first[key] + second[key] >= 20]
    total = sum(
        (first[k] * (b / a) ** 0.5 - second[k] * (a / b) ** 0.5) ** 2 / (first[k] + second[k]) for k in keys
    )
    return total / (len(keys) - 1)


def assert_same_mean(first, second):
    error = (statistics.variance(first) / len(first) + statistics.variance(second) / len(second)) ** 0.5
    assert abs(statistics.mean(first) - statistics.mean(second)) < 4 * error


def test_statistics_equal_the_published_procedure(drawn):
    """Length limits distort the distributions of arguments and depths, so the procedure is the judge."""
    theirs = published_trees(1_000, seed=1)
    lengths, expected = [len(tree) for tree, _ in drawn], [len(tree) for tree in theirs]
    assert_same_mean(lengths, expected)
    assert chi_square(*(Counter(length // 250 for length in side) for side in (lengths, expected))) < 3.5
    ours_shape, theirs_shape = [shape(tree) for tree, _ in drawn[:3_000]], [shape(tree) for tree in theirs]
    # Depth, operators, arguments; then the arguments of the root.
    for measure in (lambda s: s[1], lambda s: len(s[2]), lambda s: sum(s[2]) / len(s[2])):
        assert_same_mean([measure(s) for s in ours_shape], [measure(s) for s in theirs_shape])
    assert chi_square(Counter(s[2][-1] for s in ours_shape), Counter(s[2][-1] for s in theirs_shape)) < 3
    assert chi_square(Counter(value for _, value in drawn), Counter(map(evaluate, theirs))) < 3


def test_operators_and_digits_are_uniform(drawn):
    counts = Counter(token for tree, _ in drawn for token in tree)
    for group in (SYMBOLS[:10], SYMBOLS[10:14]):
        share = np.array([counts[s] for s in group]) / sum(counts[s] for s in group)
        np.testing.assert_allclose(share, 1 / len(group), rtol=0.01)


def test_task_is_built_once_and_reads_back_its_own_published_form(tmp_path):
    small = {"length": 64, "depth": 4, "args": 4, "examples": (300, 40, 40)}
    task = build("listops", cache=tmp_path / "a", **small)
    again = build("listops", cache=tmp_path / "b", **small)
    other = build("listops", cache=tmp_path / "b", seed=1, **small)
    rows = [task.train[i]["input_ids"].tolist() for i in range(300)]
    assert rows == [again.train[i]["input_ids"].tolist() for i in range(300)]
    assert rows != [other.train[i]["input_ids"].tolist() for i in range(300)]
    assert max(map(len, rows)) <= 64 and min(map(len, rows)) > 16
    assert CLOSE + 5 in rows[0], "the brackets must stay in the input"
    everything = [
        tuple(s[i]["input_ids"].tolist())
        for s in (task.train, task.validation, task.test)
        for i in range(len(s))
    ]
    assert len(set(everything)) == 380, "an example is in two splits"

    folder = tmp_path / "tsv"
    folder.mkdir()
    for split, name in (("train", "basic_train"), ("validation", "basic_val"), ("test", "basic_test")):
        lines = ["Source\tTarget"]
        for row in getattr(task, split):
            words = " ".join(SYMBOLS[t - 5] for t in row["input_ids"].tolist()[1:])
            lines.append(f"( ( {words} ) )\t{row['labels']}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    read = build("listops", data=folder, length=64, cache=tmp_path / "a")
    assert [read.train[i]["input_ids"].tolist() for i in range(300)] == rows

    for bad, message in (
        ("( [MAXX 1 2 ] )\t2", r"basic_val.tsv:42: '\[MAXX'"),
        ("( [MAX 1 2 ] )\t12", "basic_val.tsv:42: Target"),
    ):
        text = (folder / "basic_val.tsv").read_text()
        (folder / "basic_val.tsv").write_text(text + bad + "\n")
        with pytest.raises(DataError, match=message):
            build("listops", data=folder, length=64, cache=tmp_path / "a")
        (folder / "basic_val.tsv").write_text(text)


def test_limits_are_exact_and_examples_unique_where_trees_are_few():
    source = trees(seed=0, least=4, most=8, depth=4, args=4)
    made = [tuple(next(source)[0].tolist()) for _ in range(20_000)]
    assert {len(tree) for tree in made} == {5, 6, 7}
    assert len(set(made)) == len(made), "examples repeat"


def test_impossible_limits_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no new tree of more than"):
        build("listops", length=10, least=4, depth=2, args=2, examples=(10_000, 1, 1), cache=tmp_path)
    with pytest.raises(ValueError, match="least=100"):
        build("listops", length=100, least=100, cache=tmp_path)
