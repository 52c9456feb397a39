"""Sparse and hashing mixers against masked softmax over the sets they claim, and every mixer's cost."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import qkv, toy_mixer
from judge import grid, masked_softmax, past
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cosformer import mixers

HEADS, DIM = 4, 8  # of conftest's toy mixer
both = pytest.mark.parametrize("causal", [False, True])


# sparse patterns


@both
@pytest.mark.parametrize("length", [1, 12, 37])
@pytest.mark.parametrize(("window", "leading"), [(3, 0), (0, 2), (5, 3), (1, 40), (64, 0)])
def test_local_is_masked_softmax(causal, length, window, leading):
    (q, k, v), (i, j) = qkv(length), grid(length)
    allowed = (((i - j).abs() <= window) | (i < leading) | (j < leading)) & past(length, causal)
    assert_close(
        toy_mixer("local", window=window, globals=leading)(q, k, v, causal=causal),
        masked_softmax(q, k, v, allowed),
    )


def sparse_pattern(pattern, length, stride, columns):
    """The paper's index sets (section 4.3), with i - j of either sign."""
    i, j = grid(length)
    if pattern == "strided":
        return ((i - j).abs() <= stride) | ((i - j) % stride == 0)
    return (i // stride == j // stride) | (j % stride >= stride - columns)


@both
@pytest.mark.parametrize("length", [1, 12, 37])
@pytest.mark.parametrize(
    ("pattern", "stride", "columns"), [("strided", 5, 0), ("fixed", 5, 2), ("fixed", 8, 8), ("strided", 1, 0)]
)
def test_sparse_is_masked_softmax_over_the_papers_sets(causal, length, pattern, stride, columns):
    q, k, v = qkv(length)
    mixer = toy_mixer("sparse", pattern=pattern, stride=stride, columns=columns)
    allowed = sparse_pattern(pattern, length, stride, columns) & past(length, causal)
    assert_close(mixer(q, k, v, causal=causal), masked_softmax(q, k, v, allowed))
    mask = mixers.weights(mixer, q, k, causal=causal) > 0
    assert torch.equal(mask, allowed.expand_as(mask))


def bigbird_blocks(mixer, blocks):
    """Which key blocks each head's query blocks see, from the pattern the mixer declares: (H, n, n) bool."""
    lead, seen = mixer.pattern(torch.ones(1, blocks, mixer.block, dtype=torch.bool))
    table = torch.zeros(HEADS, blocks, blocks + 1, dtype=torch.bool)
    table.scatter_(2, seen[0] % (blocks + 1), True)  # -1 goes to the extra column
    table = table[..., :blocks]
    table[:, lead[0][lead[0] >= 0]] = True
    return table


@pytest.mark.parametrize("length", [4, 29, 60])
@pytest.mark.parametrize(
    "options", [{"global_blocks": ()}, {"global_blocks": (0, 0)}, {"random": 2}, {"window": 5, "random": 0}]
)
def test_bigbird_is_masked_softmax_over_its_blocks(length, options):
    mixer, (q, k, v) = toy_mixer("bigbird", block=4, **options), qkv(length)
    table = bigbird_blocks(mixer, -(-length // 4))
    allowed = table.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :length, :length]
    assert_close(mixer(q, k, v), masked_softmax(q, k, v, allowed))


def test_bigbird_draws_the_blocks_it_says():
    n = 16
    for seed in range(5):
        table = bigbird_blocks(toy_mixer("bigbird", block=4, seed=seed), n)
        b, c = grid(n)
        window, leading = (b - c).abs() <= 1, (c == 0) | (c == n - 1)
        assert table[:, (window | leading)].all()
        drawn = table & ~(window | leading)
        inner = slice(1, n - 1)
        # Three others, all different, for all but the global blocks.
        assert (drawn[:, inner].sum(-1) == 3).all()
    counts = sum(bigbird_blocks(toy_mixer("bigbird", block=4, seed=s), n)[:, 8] for s in range(300)).sum(0)
    free = counts[[c for c in range(n) if c not in (0, 7, 8, 9, n - 1)]].double()
    assert (free / free.mean() - 1).abs().max() < 0.3  # uniform over what is left


def test_bigbird_with_a_window_over_everything_is_softmax():
    q, k, v = qkv(37)
    assert_close(toy_mixer("bigbird", block=4, window=21)(q, k, v), masked_softmax(q, k, v, past(37, False)))
    assert_close(toy_mixer("bigbird", block=64)(q, k, v), masked_softmax(q, k, v, past(37, False)))


# reformer


def shared_softmax(q, v, allowed):
    """Softmax over the queries' own directions; a token sees itself only if nothing else is allowed."""
    alone = torch.eye(q.shape[2], dtype=torch.bool)
    others = allowed & ~alone
    allowed = others | (alone & ~others.any(-1, keepdim=True))
    return (q @ F.normalize(q, dim=-1).mT).masked_fill(~allowed, -math.inf).softmax(-1) @ v


@both
@pytest.mark.parametrize("rounds", [1, 3])
def test_reformer_with_one_bucket_is_shared_softmax(causal, rounds):
    q, k, v = qkv(37)
    mixer = toy_mixer("reformer", buckets=1, chunk=40, rounds=rounds)
    assert_close(mixer(q, k, v, causal=causal), shared_softmax(q, v, past(37, causal)))
    # `k` is not read.
    assert_close(mixer(q, torch.randn_like(k), v, causal=causal), mixer(q, k, v, causal=causal))


def reformer_pairs(mixer, q):
    """Which pairs meet in some round: same bucket, at most `chunk` of the bucket's tokens apart."""
    bucket = mixer.hash(q)  # (B, H, R, N)
    same = bucket[..., :, None] == bucket[..., None, :]
    rank = same.tril().sum(-1)  # a token's number within its bucket
    return (same & ((rank[..., :, None] - rank[..., None, :]).abs() <= mixer.chunk)).any(2)


@both
@pytest.mark.parametrize(
    "options", [{"buckets": 4, "chunk": 5, "rounds": 3}, {"buckets": 8, "chunk": 3, "rounds": 1}]
)
def test_reformer_is_one_softmax_over_all_it_meets(causal, options):
    mixer, (q, k, v) = toy_mixer("reformer", **options), qkv(37)
    allowed = reformer_pairs(mixer, q) & past(37, causal)
    assert_close(mixer(q, k, v, causal=causal), shared_softmax(q, v, allowed))


def test_rounds_raise_recall():
    torch.manual_seed(0)
    q = torch.randn(1, HEADS, 256, DIM).double()
    full = (
        (q @ F.normalize(q, dim=-1).mT).masked_fill(torch.eye(256, dtype=torch.bool), -math.inf).softmax(-1)
    )
    recall = []
    for rounds in (1, 2, 4, 8):
        mixer = toy_mixer("reformer", max_length=256, rounds=rounds, buckets=16, chunk=32)
        found = mixers.weights(mixer, q, q) > 0
        recall.append((full * found).sum(-1).mean().item())  # softmax's weight on what was found
    assert recall == sorted(recall)
    assert recall[-1] > recall[0] + 0.3, recall


# cost


class Largest(TorchDispatchMode):
    """Remembers the largest tensor made, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(
                    self.elements, x.numel() if not x.is_floating_point() or 0 not in x.stride() else 0
                )
        return out


def growth(name, causal, lengths=(1024, 4096), **options):
    """Growth exponents of the arithmetic and of the largest tensor made, from mixers for two lengths."""
    flops, sizes = [], []
    for n in lengths:
        mixer = mixers.build(name, heads=1, head_dim=8, max_length=n, **options)
        x = torch.randn(1, 1, n, 8)
        with torch.no_grad(), FlopCounterMode(display=False) as counter, Largest() as largest:
            mixer(x, x, x, causal=causal)
        flops.append(counter.get_total_flops())
        sizes.append(largest.elements)
    ratio = math.log(lengths[1] / lengths[0])
    return math.log(flops[1] / flops[0]) / ratio, math.log(sizes[1] / sizes[0]) / ratio


@pytest.mark.parametrize(
    ("name", "causal", "options", "exponent"),
    [
        ("bigbird", False, {"block": 16}, 1.0),
        ("local", False, {"window": 16, "globals": 2}, 1.0),
        ("local", True, {"window": 16}, 1.0),
        ("sparse", False, {}, 1.5),
        ("sparse", True, {"pattern": "strided"}, 1.5),
        ("reformer", True, {"chunk": 16, "buckets": 16}, 1.0),
        ("nystrom", False, {"landmarks": 16, "conv": None}, 1.0),
        ("linformer", False, {"rank": 16}, 1.0),
    ],
)
def test_cost_grows_as_the_paper_says(name, causal, options, exponent):
    arithmetic, memory = growth(name, causal, **options)
    assert arithmetic == pytest.approx(exponent, abs=0.1)
    assert memory == pytest.approx(exponent, abs=0.1)


def test_the_cost_test_sees_a_dense_mask():
    assert growth("polynomial", False)[0] == pytest.approx(2, abs=0.05)
