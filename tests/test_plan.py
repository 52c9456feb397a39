"""Plans: the second call of a kind equals the first, in results, gradients and errors."""

import math
from functools import partial

import pytest
import torch
from conftest import RUNNING
from judge import assert_close, inputs, judge, rates
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cosformer import State, cosformer_attention, cosformer_stream
from cosformer.ops import plan

pytestmark = pytest.mark.skipif("native" not in RUNNING, reason="only the native backend makes plans")


@pytest.fixture(autouse=True)
def empty():
    plan.clear()


def calls_planned() -> int:
    return len(plan._plans)


@pytest.mark.parametrize("decay", [None, "head", "position"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_second_call_is_judged_like_the_first(causal, decay, masked):
    mask = torch.rand(2, 70) > 0.3 if masked else None
    for _ in range(2):
        q, k, v = inputs(L=70, S=70)
        options = {"causal": causal, "decay": rates(decay, 2, 4, 70), "key_mask": mask, "horizon": 100}
        judge(cosformer_attention, q, k, v, **options)
        with torch.no_grad():
            judge_values = cosformer_attention(q, k, v, **options)
        assert_close(judge_values, cosformer_attention(q, k, v, backend="torch", **options))
    assert calls_planned() == 2  # one with a graph and one without


def test_a_call_like_the_last_is_known_without_its_key(monkeypatch):
    q, k, v = (x.requires_grad_() for x in inputs(L=9, S=9))
    dout = torch.randn(2, 4, 9, 5)
    kinds = [{}, {"decay": torch.rand(4)}, {"decay": torch.rand(2, 4, 9), "causal": True}]
    calls = [partial(cosformer_attention, q, k, v, horizon=20, **kind) for kind in kinds]
    wanted = [torch.autograd.grad(call(), (q, k, v), dout) for call in calls]
    monkeypatch.delattr(plan, "_alike")
    for call, grads in zip(calls, wanted):
        for got, want in zip(torch.autograd.grad(call(), (q, k, v), dout), grads):
            assert torch.equal(got, want)
    for another in (q[:1], q.detach(), q.double(), q.transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(NameError, match="_alike"):
            cosformer_attention(another, k, v, horizon=20)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode, pytest.raises(NameError, match="_alike"):
            calls[0]()
    with pytest.raises(NameError, match="_alike"):
        torch.func.vmap(lambda n: calls[0]() + n)(torch.randn(3))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        cosformer_attention(forward_ad.make_dual(q, q), k, v, horizon=20)


def test_without_guards_a_call_is_found_by_its_key(monkeypatch):
    monkeypatch.delattr(plan.guards, "TensorGuards")
    for _ in range(2):
        judge(cosformer_attention, *inputs(L=9, S=9), horizon=20)
    assert calls_planned() == 1 and backward_plans() == 1


def test_one_tensor_as_all_three():
    x = torch.randn(2, 4, 9, 6)
    for _ in range(2):
        out = cosformer_attention(x, x, x, horizon=20)
        assert_close(out, cosformer_attention(x, x, x, horizon=20, backend="torch"))


def test_a_stream_goes_on_by_its_plan():
    q, k, v = inputs(L=12, S=12)
    decay = torch.rand(2, 4, 12)
    whole = cosformer_attention(q, k, v, causal=True, horizon=20, decay=decay)
    state, parts = None, []
    for i in range(12):
        token = [x[:, :, i : i + 1].contiguous() for x in (q, k, v)]
        out, state = cosformer_stream(*token, state, horizon=20, decay=decay[:, :, i : i + 1].contiguous())
        parts.append(out)
    assert calls_planned() == 3  # the whole, the first token, every other
    assert_close(torch.cat(parts, 2), whole)
    assert (state.position, state.horizons) == (12, (20.0,))


def test_gradients_of_planned_calls():
    q, k, v = inputs(L=9, S=9)
    found = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, state = cosformer_stream(*leaves, horizon=20)
        out2, state = cosformer_stream(*leaves, state, horizon=20)
        found.append(torch.autograd.grad(out2.square().sum() + state.tensor.sum(), leaves))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    out = cosformer_attention(*leaves, horizon=20)
    out = cosformer_attention(*leaves, horizon=20)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


def backward_plans() -> int:
    return sum(len(it.backwards) for it in plan._plans.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("decay", [None, "position"])
def test_a_backward_is_planned_for_what_it_is_given(causal, decay, dtype):
    """Upstream gradients and saved tensors may have other strides than before."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).to(dtype) for x in inputs(L=9, S=9))
    rate = rates(decay, 2, 4, 9)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, rate) if x is not None]

    def out(backend=None):
        decay = leaves[3] if rate is not None else None
        return cosformer_attention(*leaves[:3], causal=causal, horizon=20, decay=decay, backend=backend)

    like = torch.randn_like(out())
    ups = [like, like.contiguous(), like[:, :, :, :1].expand_as(like), (-like)._neg_view(), like]
    for up in ups:
        wanted = torch.autograd.grad(out("torch"), leaves, up)
        elsewhere = out()
        node = elsewhere.grad_fn
        for tensor, saved in zip(node.saved_tensors, node._raw_saved_tensors, strict=True):
            if tensor is not None:
                saved.register_hooks(lambda t: t.detach().contiguous(), lambda t: t)
        for found in (torch.autograd.grad(out(), leaves, up), torch.autograd.grad(elsewhere, leaves, up)):
            for got, want in zip(found, wanted):
                assert_close(got, want)
    if decay is None or causal or dtype == torch.float32:
        assert backward_plans() == 6  # three layouts of the upstream gradient, times two of the saved tensors


def test_no_plan_where_a_transform_is_at_work():
    """Not even for tensors that it does not wrap; and nothing it makes is kept."""
    q, k, v = (x.requires_grad_() for x in inputs(L=9, S=9))
    more = torch.randn(3, *q.shape[:3], v.shape[3])
    for leaves in ((q, k, v), (q.detach(), k.detach(), v.detach())):
        for horizon in (20 + leaves[0].requires_grad, 20 + leaves[0].requires_grad):  # first, and again
            call = partial(cosformer_attention, *leaves, horizon=horizon)
            many = torch.func.vmap(lambda n: call() + n)(more)
            slope = torch.func.grad(lambda n: (call() * n).sum())(more[0])
            assert calls_planned() == 0
            assert_close(many[1], call(backend="torch") + more[1])
            assert_close(slope, call(backend="torch"))


@pytest.mark.parametrize("causal", [False, True])
def test_checkpointing_saves_alike_whoever_watches(causal):
    """Under a mode that watches the forward, but not its recomputation."""
    q, k, v = (x.requires_grad_() for x in inputs(L=9, S=9))

    def call(*x):
        return cosformer_attention(*x, horizon=20, causal=causal).square().sum()

    wanted = torch.autograd.grad(call(q, k, v), (q, k, v))
    with FlopCounterMode(display=False):
        watched = checkpoint(call, q, k, v, use_reentrant=False)
    for got, want in zip(torch.autograd.grad(watched, (q, k, v)), wanted):
        assert_close(got, want)


def test_gradients_of_many_at_once():
    q, k, v = (x.requires_grad_() for x in inputs(L=9, S=9))
    ups = torch.randn(3, *q.shape[:3], v.shape[3])
    out = cosformer_attention(q, k, v, horizon=20)
    many = torch.func.vmap(lambda up: torch.autograd.grad(out, (q, k, v), up, retain_graph=True))(ups)
    for i, up in enumerate(ups):
        for got, want in zip(many, torch.autograd.grad(out, (q, k, v), up, retain_graph=True)):
            assert_close(got[i], want)


@pytest.mark.parametrize("bad", [-0.5, math.inf, math.nan])
@pytest.mark.parametrize("shape", [(4,), (2, 4, 9)])
def test_rates_are_looked_at_in_every_call(shape, bad):
    q, k, v = inputs(L=9, S=9)
    decay = torch.rand(shape)
    cosformer_attention(q, k, v, causal=True, decay=decay)
    assert calls_planned() == 1
    decay.view(-1)[-1] = bad
    with pytest.raises(ValueError, match="decay rates must be finite and 0 or more; those given reach from"):
        cosformer_attention(q, k, v, causal=True, decay=decay)
    with pytest.raises(ValueError, match="decay rates must be finite"):
        cosformer_stream(q, k, v, horizon=20, decay=decay)


def test_mistakes_that_look_like_a_planned_call():
    q, k, v = (x[:, :, :1].contiguous() for x in inputs(L=9, S=9))
    for _ in range(2):
        cosformer_attention(q, k, v, horizon=3, q_offset=1)
    assert calls_planned() == 1
    with pytest.raises(TypeError, match="q_offset must be an int"):
        cosformer_attention(q, k, v, horizon=3, q_offset=True)
    with pytest.raises(TypeError, match="q_offset must be an int"):
        cosformer_attention(q, k, v, horizon=3, q_offset=1.0)
    with pytest.raises(ValueError, match="backend 'nativ' is unknown"):
        cosformer_attention(q, k, v, horizon=3, q_offset=1, backend="nativ")
    _, state = cosformer_stream(q, k, v, horizon=3)
    for _ in range(3):
        _, state = cosformer_stream(q, k, v, state, horizon=3)
    with pytest.raises(
        ValueError, match="horizon is 3, but positions can lie 4 apart here; start the stream"
    ):
        cosformer_stream(q, k, v, state, horizon=3)
    with pytest.raises(ValueError, match="horizon is 4, but the state was made with 3"):
        cosformer_stream(q, k, v, State(state.tensor, 1, (3.0,)), horizon=4)
    with pytest.raises(TypeError, match="state must be a State"):
        cosformer_stream(q, k, v, state.tensor, horizon=3)


def test_what_a_horizon_in_a_tensor_says_may_change():
    q, k, v = inputs(L=9, S=9)
    horizon = torch.tensor([20.0])
    before = cosformer_attention(q, k, v, horizon=horizon)
    horizon[0] = 400
    after = cosformer_attention(q, k, v, horizon=horizon)
    assert not torch.equal(before, after) and calls_planned() == 0


def test_values_that_are_not_in_memory():
    """A plan reads addresses, so it must not miss what torch keeps as a flag on a tensor."""
    q, k, v = inputs(L=9, S=9)
    cosformer_attention(q, k, v)
    assert_close(cosformer_attention((-q)._neg_view(), k, v), cosformer_attention(q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        assert cosformer_attention(q, k, v).dtype == torch.bfloat16
    mapped = torch.func.vmap(cosformer_attention)(*(x[None] for x in (q, k, v)))
    assert_close(mapped[0], cosformer_attention(q, k, v))


def test_plans_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(plan, "MOST", 3)
    for length in range(1, 9):
        q, k, v = inputs(L=length, S=length)
        cosformer_attention(q, k, v)
        assert calls_planned() <= 3


@pytest.mark.parametrize("causal", [True, False])
def test_a_checkpointed_call_has_no_plan(causal):
    """What it saves, and what its recomputation does, must be alike."""
    plan.clear()
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))

    def call(q, k, v):
        return cosformer_attention(2 * q, k, v, causal=causal, horizon=16).sin()

    torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False).sum().backward()
    found = [t.grad for t in (q, k, v)]
    assert not plan._plans
    for got, wanted in zip(found, torch.autograd.grad(call(q, k, v).sum(), (q, k, v))):
        torch.testing.assert_close(got, wanted)
