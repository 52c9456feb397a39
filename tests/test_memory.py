"""Memory for large results: reused once they are gone, never before, and never without bound."""

import copy
import gc
import math

import pytest
import torch
from conftest import RUNNING
from judge import assert_close, inputs

from cosformer import cosformer_attention, reference
from cosformer.ops import memory
from cosformer.ops.convolution import short_convolution
from cosformer.ops.norm import rms_norm

pytestmark = pytest.mark.skipif("native" not in RUNNING, reason="the native kernel is not built")
SIZES = {"B": 1, "H": 8, "Hk": 8, "L": 2048, "S": 2048, "D": 64, "E": 64}  # each tensor has 4 MiB


@pytest.fixture(autouse=True)
def nothing_kept():
    gc.collect()
    memory.clear()
    yield
    memory.clear()


@pytest.fixture
def given() -> list[torch.Tensor]:
    return list(inputs(**SIZES))


def attend(q, k, v):
    return cosformer_attention(q, k, v, causal=True, horizon=math.inf, backend="native")


@torch.no_grad()
def test_memory_is_reused_once_a_result_is_gone(given):
    first = attend(*given)
    at, want = first.data_ptr(), first.clone()
    second = attend(*given)
    assert second.data_ptr() != at and memory.held() == 0
    first.fill_(math.nan)
    del first
    assert memory.held() == want.nbytes
    third = attend(*given)
    assert third.data_ptr() == at and memory.held() == 0
    assert torch.equal(third, want) and torch.equal(second, want)
    short = [t[:, :, :100] for t in given]
    assert_close(
        attend(*short), reference.attention(*(t.double() for t in short), causal=True, horizon=math.inf)
    )


@torch.no_grad()
@pytest.mark.parametrize(
    "part",
    [lambda out: out[:, :, :5], torch.Tensor.numpy, torch.Tensor.untyped_storage],
    ids=["view", "numpy", "storage"],
)
def test_what_refers_to_a_result_keeps_its_memory(given, part):
    kept = part(attend(*given))
    assert memory.held() == 0
    del kept
    assert memory.held() == 1 << 22


def test_gradients_use_it_and_are_right(given):
    leaves = [t.requires_grad_() for t in given]
    dout = torch.randn_like(leaves[0])
    with torch.no_grad():
        attend(*given).fill_(math.nan)  # what is reused holds NaN
    out = attend(*leaves)
    found = torch.autograd.grad(out, leaves, dout)
    exact = [t.detach().double().requires_grad_() for t in given]
    wanted = reference.attention(*exact, causal=True, horizon=math.inf)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
        assert_close(ours, theirs)
    del out, ours, found
    assert memory.held() == 4 * dout.nbytes  # the output and three gradients


@torch.no_grad()
def test_no_more_is_kept_than_the_limit(given, monkeypatch):
    monkeypatch.setattr(memory, "MOST", 8 << 20)
    several = [attend(*given) for _ in range(3)]
    several.clear()
    assert memory.held() == 2 << 22
    long = [torch.cat([t, t[:, :, :400]], 2) for t in given]  # another size, more than an eighth longer
    kept = attend(*long)
    size = kept.nbytes
    del kept
    assert memory.held() == size  # the older ones gave way
    attend(*(t[:, :, :2300] for t in long))
    assert memory.held() == size  # a little shorter: the same memory serves
    monkeypatch.setattr(memory, "MOST", size)
    attend(*(torch.cat([t, t], 2) for t in given))
    assert memory.held() == size  # larger than the limit by itself: not kept, and nothing gives way to it
    memory.clear()
    assert memory.held() == 0


@torch.no_grad()
def test_the_garbage_collector_may_free_results_at_any_time(given):
    """Results in cycles are freed where the collector runs, even while memory is looked for."""
    x, weight = torch.randn(4096, 256), torch.ones(256)
    several = [rms_norm(x, weight, 1e-6) for _ in range(30)]
    several.clear()
    littered = []
    for step in range(300):
        cycle: list = [rms_norm(x, weight, 1e-6)]
        cycle.append(cycle)
        del cycle
        littered.append([(i, i) for i in range(step % 37 + 10)])
        attend(*given)


@torch.no_grad()
def test_a_result_is_a_tensor_like_any_other(given):
    out = attend(*given)
    assert out.transpose(1, 2).is_contiguous() and out.data_ptr() % 64 == 0
    assert torch.equal(copy.deepcopy(out), out)
    with torch.enable_grad():  # in place, which a view made without a graph refuses
        changed = attend(*given)
        changed += torch.ones(64, requires_grad=True)
    assert torch.equal(changed, out + 1)
    with torch.device("meta"):  # the default device is for new tensors, not for results
        assert attend(*given).is_cpu
    shared = attend(*given).share_memory_()
    assert shared.is_shared() and torch.equal(shared, out)


@torch.no_grad()
def test_convolution_and_norm_use_it(given):
    x = given[0][0].transpose(0, 1).flatten(1)[None].contiguous()  # (1, 2048, 512)
    for run in (
        lambda: short_convolution(x, torch.ones(512, 4), ahead=0),
        lambda: rms_norm(x.unflatten(-1, (8, 64)), torch.ones(64), 1e-6),
    ):
        want = run().clone()
        assert memory.held() == x.nbytes
        assert torch.equal(run(), want)


@torch.no_grad()
def test_small_results_are_left_to_malloc(given):
    attend(*(t[:, :, :1000] for t in given))
    assert memory.held() == 0
