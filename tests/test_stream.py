"""The central promise: whole == chunked == token by token == resumed from a saved state, with gradients."""

import io
import math
import pickle

import pytest
import torch
from conftest import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from judge import assert_close, inputs, judge, rates, value_and_grads

from cosformer import State, cosformer_attention, cosformer_stream, reference
from cosformer.ops import linear_read, linear_state


def streamed(q, k, v, cuts, *, decay=None, key_mask=None, state=None, **kwargs):
    outs = []
    for a, b in zip([0, *cuts], [*cuts, q.shape[2]], strict=True):
        lam = decay[:, :, a:b] if decay is not None and decay.ndim == 3 else decay
        mask = None if key_mask is None else key_mask[:, a:b]
        out, state = cosformer_stream(
            q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], state, decay=lam, key_mask=mask, **kwargs
        )
        outs.append(out)
    return torch.cat(outs, 2), state


@pytest.mark.parametrize("decay", [None, "head", "position"])
@pytest.mark.parametrize("horizon", [400, math.inf, [300, 310, math.inf, 400]])
@settings(max_examples=examples(5))
@given(cuts=st.sets(st.integers(0, 300), max_size=6).map(sorted))
@example(cuts=[1, 40, 170])
def test_any_split(backend, dtype, horizon, decay, cuts):
    def split(q, k, v, *, causal, **kwargs):
        return streamed(q, k, v, cuts, backend=backend, **kwargs)[0]

    q, k, v = inputs(L=300, S=300, dtype=dtype)
    mask = torch.rand(2, 300) > 0.2
    judge(split, q, k, v, causal=True, horizon=horizon, key_mask=mask, decay=rates(decay, 2, 4, 300))


@pytest.mark.parametrize("decay", [None, "head", "position"])
def test_token_by_token(backend, decay):
    q, k, v = inputs(L=80, S=80)
    lam = rates(decay, 2, 4, 80)
    out, state = streamed(q, k, v, list(range(1, 80)), decay=lam, horizon=100, backend=backend)
    assert_close(out, cosformer_attention(q, k, v, causal=True, decay=lam, horizon=100))
    assert state.position == 80
    assert_close(state.tensor, streamed(q, k, v, [], decay=lam, horizon=100, backend=backend)[1].tensor)


def test_state_is_part_of_the_graph(backend):
    """Gradients flow in and out through states, also where only the state is used."""
    q, k, v = inputs(B=1, L=40, S=40)
    lam = torch.rand(1, 4, 40)

    def through_state(q, k, v, lam, dtype=None, name=backend):
        _, state = cosformer_stream(
            q[:, :, :25], k[:, :, :25], v[:, :, :25], horizon=90, decay=lam[:, :, :25], backend=name
        )
        out, state = cosformer_stream(
            q[:, :, 25:], k[:, :, 25:], v[:, :, 25:], state, horizon=90, decay=lam[:, :, 25:], backend=name
        )
        return (
            out.sum()
            + (state.tensor * torch.linspace(-1, 1, state.tensor.numel()).reshape(state.tensor.shape)).sum()
        )

    # an independent way to the same number: the definition's state, written as a sum over keys
    def by_definition(q, k, v, lam):
        out = reference.attention(q, k, v, horizon=90, causal=True, decay=lam)[:, :, 25:]
        A = lam.cumsum(-1)
        left = torch.exp(A - A[..., -1:])[..., None]
        angle = (torch.arange(40) * (math.pi / 2 / 90))[:, None].to(q)
        y = k.relu().repeat_interleave(2, 1) * left
        phi = torch.cat([y * angle.cos(), y * angle.sin()], -1)
        state = phi.mT @ torch.nn.functional.pad(v.repeat_interleave(2, 1), (0, 1), value=1.0)
        return out.sum() + (state * torch.linspace(-1, 1, state.numel()).reshape(state.shape).to(q)).sum()

    value, grads = value_and_grads(through_state, (q, k, v, lam))
    expected, expected_grads = value_and_grads(by_definition, [x.double() for x in (q, k, v, lam)])
    assert_close(value, expected)
    for g, e in zip(grads, expected_grads, strict=True):
        assert_close(g, e)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_saved_and_loaded(backend):
    q, k, v = inputs(L=60, S=60)
    whole = cosformer_attention(q, k, v, causal=True, horizon=100, backend=backend)
    _, state = streamed(q[:, :, :35], k[:, :, :35], v[:, :, :35], [], horizon=100, backend=backend)
    loaded = saved_and_loaded(state)
    assert loaded.position == 35
    out, _ = streamed(
        q[:, :, 35:], k[:, :, 35:], v[:, :, 35:], [], state=loaded, horizon=100, backend=backend
    )
    assert_close(out, whole[:, :, 35:])


def test_loaded_with_torchs_safe_default(backend):
    """The state itself, and what it keeps for a rollback: nothing in it is code."""
    q, k, v = inputs(L=9, S=9)
    options = {"horizon": 30, "key_mask": torch.rand(2, 9) > 0.2, "decay": torch.rand(4), "backend": backend}
    _, state = cosformer_stream(q, k, v, **options)
    _, state = cosformer_stream(q, k, v, state.snapshot(), **options)
    loaded = saved_and_loaded(state)
    assert (loaded.position, loaded.horizons) == (18, (30.0,))
    assert torch.equal(loaded.tensor, state.tensor)
    assert torch.equal(loaded.rollback(4).tensor, state.rollback(4).tensor)


def test_beams_are_reordered(backend):
    q, k, v = inputs(B=3, L=30, S=30)
    order = torch.tensor([2, 2, 0])
    _, state = streamed(q[:, :, :20], k[:, :, :20], v[:, :, :20], [], horizon=50, backend=backend)
    out, _ = streamed(
        q[order, :, 20:],
        k[order, :, 20:],
        v[order, :, 20:],
        [],
        state=state.index_select(order),
        horizon=50,
        backend=backend,
    )
    whole = cosformer_attention(q[order], k[order], v[order], causal=True, horizon=50)
    assert_close(out, whole[:, :, 20:])


@pytest.mark.parametrize("decay", [None, "head", "position"])
@pytest.mark.parametrize("back", [0, 1, 7, 12, 30])
def test_rollback_is_exact(backend, back, decay):
    """Even under decay so strong that subtracting the tokens again would divide by exp(-600)."""
    q, k, v = inputs(B=3, L=60, S=60)
    lam = (
        None if decay is None else torch.full((4,), 20.0) if decay == "head" else torch.full((3, 4, 60), 20.0)
    )
    part = lambda a, b: (q[:, :, a:b], k[:, :, a:b], v[:, :, a:b])
    rate = lambda a, b: lam[:, :, a:b] if decay == "position" else lam
    mask, options = torch.rand(3, 60) > 0.2, {"horizon": 100, "backend": backend}
    _, state = cosformer_stream(*part(0, 30), decay=rate(0, 30), key_mask=mask[:, :30], **options)
    state = state.snapshot()
    _, far = cosformer_stream(*part(30, 48), state, decay=rate(30, 48), key_mask=mask[:, 30:48], **options)
    _, far = cosformer_stream(*part(48, 60), far, decay=rate(48, 60), key_mask=mask[:, 48:], **options)
    order = torch.tensor([2, 0, 1])
    n = 60 - back
    _, expected = cosformer_stream(*part(0, n), decay=rate(0, n), key_mask=mask[:, :n], **options)
    returned = far.rollback(back)
    assert returned.position == n
    assert_close(returned.tensor, expected.tensor)
    assert_close(far.index_select(order).rollback(back).tensor, expected.tensor[order])
    assert_close(returned.rollback(n - 30).tensor, state.tensor)


def test_rollback_refuses_what_it_cannot_do():
    q, k, v = inputs(L=5, S=5)
    _, state = cosformer_stream(q, k, v, horizon=9)
    with pytest.raises(ValueError, match=r"no snapshot"):
        state.rollback(1)
    _, later = cosformer_stream(q[:, :, :2], k[:, :, :2], v[:, :, :2], state.snapshot(), horizon=9)
    with pytest.raises(ValueError, match=r"tokens is 3; 0 to 2"):
        later.rollback(3)


def test_rollback_survives_reused_buffers_and_autocast(backend):
    q, k, v = inputs(L=6, S=6)
    _, expected = cosformer_stream(q[:, :, :4], k[:, :, :4], v[:, :, :4], horizon=9, backend=backend)
    _, state = cosformer_stream(
        q, k, v, State(torch.zeros(2, 4, 12, 6)).snapshot(), horizon=9, backend=backend
    )
    k.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(state.rollback(2).tensor, expected.tensor)


def test_a_state_is_never_changed(backend):
    q, k, v = inputs(L=5, S=5)
    _, state = cosformer_stream(q, k, v, horizon=9, backend=backend)
    before = state.tensor.clone()
    for n in (0, 1, 4):
        cosformer_stream(q[:, :, :n], k[:, :, :n], v[:, :, :n], state, horizon=9, backend=backend)
    assert torch.equal(state.tensor, before)


def test_moves(backend):
    q, k, v = inputs(L=5, S=5)
    decay = torch.rand(4, requires_grad=True)
    start = State(torch.zeros(2, 4, 12, 6)).snapshot()
    _, state = cosformer_stream(q, k, v, start, horizon=9, decay=decay, backend=backend)
    assert state.to("meta").rollback(2).tensor.is_meta
    assert state.rollback(2).tensor.requires_grad
    assert not state.detach().rollback(2).tensor.requires_grad
    assert state.to("meta").tensor.is_meta and state.to("meta").position == 5
    assert not state.detach().tensor.requires_grad


def test_memory_of_cross_attention(backend):
    """linear_state, then linear_read, is bidirectional attention, with gradients, at any query offset."""
    q, k, v = inputs(L=40, S=90)
    mask = torch.rand(2, 90) > 0.3

    def read(q, k, v):
        state = linear_state(k, v, heads=4, horizon=100, relu=True, key_mask=mask, backend=backend)
        return linear_read(q, state, horizon=100, relu=True, q_offset=11, backend=backend)

    def direct(q, k, v):
        return cosformer_attention(q, k, v, horizon=100, key_mask=mask, q_offset=11)

    (a, grads), (b, expected) = value_and_grads(read, (q, k, v)), value_and_grads(direct, (q, k, v))
    assert_close(a, b)
    for g, e in zip(grads, expected, strict=True):
        assert_close(g, e)


MADE = [250.0, [250, 260, 270, math.inf]]


def known(state):
    """The state as each way of keeping, moving or changing it returns it."""
    q, k, v = inputs(L=3, S=3)
    horizon = list(state.horizons)
    _, ahead = cosformer_stream(q, k, v, state.snapshot(), horizon=horizon)
    yield "itself", state
    yield "saved", saved_and_loaded(state)
    yield "pickled", pickle.loads(pickle.dumps(state))
    yield "moved", state.to("cpu")
    yield "reordered", state.index_select(torch.tensor([1, 0]))
    yield "detached", state.detach()
    yield "snapshot", state.snapshot()
    yield "the snapshot of a moved one", ahead.to("cpu").origin
    yield "rolled back", ahead.rollback(1)
    yield "continued", ahead
    yield "flattened", torch.utils._pytree.tree_map(lambda x: x, state)


@pytest.mark.parametrize("horizon", MADE)
def test_a_state_keeps_to_its_horizon(horizon):
    q, k, v = inputs(L=20, S=20)
    _, state = cosformer_stream(q, k, v, horizon=horizon)
    for how, kept in known(state):
        with pytest.raises(
            ValueError,
            match=r"horizon is 500, but the state was made with \[?250.* start again, without a state",
        ):
            pytest.fail(f"{how}: accepted {cosformer_stream(q, k, v, kept, horizon=500)[1].position}")
        cosformer_stream(q, k, v, kept, horizon=horizon)


def test_one_horizon_for_all_heads_is_one_per_head():
    q, k, v = inputs(L=20, S=20)
    _, state = cosformer_stream(q, k, v, horizon=torch.tensor(50))
    out, _ = cosformer_stream(q, k, v, state, horizon=[50] * 4)
    assert torch.equal(cosformer_stream(q, k, v, state, horizon=50.0)[0], out)
    with pytest.raises(ValueError, match=r"horizon is \[50, 50, 50, 60\], but the state was made with 50 "):
        cosformer_stream(q, k, v, state, horizon=[50, 50, 50, 60])


def test_a_memory_keeps_to_its_horizon():
    q, k, v = inputs(L=20, S=20)
    memory = linear_state(k, v, heads=4, horizon=50, relu=True)
    with pytest.raises(ValueError, match="horizon is 60, but the state was made with 50"):
        linear_read(q, memory, horizon=60, relu=True)


def test_a_state_made_by_hand_takes_the_next_calls_horizon():
    q, k, v = inputs(L=20, S=20)
    _, state = cosformer_stream(q, k, v, horizon=50)
    old = State(state.tensor, 20)
    out, after = cosformer_stream(q, k, v, old, horizon=50)
    assert torch.equal(out, cosformer_stream(q, k, v, state, horizon=50)[0])
    assert after.horizons == (50.0,)  # known from here on


def test_a_stream_at_its_horizon_says_what_to_do():
    q, k, v = inputs(L=20, S=20)
    _, state = cosformer_stream(q, k, v, horizon=30)
    with pytest.raises(
        ValueError, match="horizon is 30, .* start the stream again with a horizon of more than 39"
    ):
        cosformer_stream(q, k, v, state, horizon=30)


@pytest.mark.parametrize(
    "order", [(None, "head", "position"), ("position", None, "head"), ("head", "position", None)]
)
def test_rates_begin_end_and_change_in_a_stream(backend, dtype, order):
    """Rates belong to tokens, and None means a rate of 0, so the state need not know them."""
    q, k, v = inputs(L=60, S=60, dtype=dtype)
    parts = {
        None: torch.zeros(2, 4, 20),
        "head": torch.rand(4)[:, None].expand(2, 4, 20),
        "position": torch.rand(2, 4, 20),
    }

    def pieces(q, k, v, *, decay, **kwargs):
        outs, state = [], None
        for at, kind in enumerate(order):
            cut = slice(20 * at, 20 * at + 20)
            rate = {None: None, "head": decay[0, :, 20 * at], "position": decay[:, :, cut]}[kind]
            out, state = cosformer_stream(
                q[:, :, cut], k[:, :, cut], v[:, :, cut], state, decay=rate, backend=backend, **kwargs
            )
            outs.append(out)
        return torch.cat(outs, 2)

    lam = torch.cat([parts[kind] for kind in order], 2).to(torch.promote_types(dtype, torch.float32))
    expected = reference.attention(
        q.double(), k.double(), v.double(), horizon=100, causal=True, decay=lam.double()
    )
    rounded = reference.attention(q, k, v, horizon=100, causal=True, decay=lam)
    assert_close(pieces(q, k, v, decay=lam, horizon=100), expected, rounded=rounded)


def segment(k, v, decay, mask, a, b, **options):
    """The state of the tokens from a to b alone."""
    rates = decay[:, :, a:b] if decay is not None and decay.ndim == 3 else decay
    given = {"heads": 4, "relu": True, "position": a, "key_mask": mask[:, a:b], "decay": rates}
    return linear_state(k[:, :, a:b], v[:, :, a:b], **given, **options)


@pytest.mark.parametrize("decay", [None, "head", "position"])
@pytest.mark.parametrize("horizon", [200, math.inf, [110, 120, math.inf, 400]])
@settings(max_examples=examples(5))
@given(cuts=st.lists(st.integers(0, 100), min_size=2, max_size=2).map(sorted))
@example(cuts=[0, 41])
def test_segments_join_in_any_grouping(backend, dtype, horizon, decay, cuts):
    """Cut anywhere, the states of the parts join into the stream's, with the stream's gradients."""
    if dtype not in (torch.float32, torch.float64):
        return  # a state is float32 there, of rounded inputs
    _, k, v = inputs(L=100, S=100, dtype=dtype)
    lam = rates(decay, 2, 4, 100)
    lam = None if lam is None else lam.to(dtype)
    mask, q = torch.rand(2, 100) > 0.2, torch.zeros(2, 4, 100, 6, dtype=dtype)
    edges = list(zip([0, *cuts], [*cuts, 100], strict=True))

    def parts(k, v, lam):
        return [segment(k, v, lam, mask, a, b, horizon=horizon, backend=backend) for a, b in edges]

    def whole(k, v, lam):
        return streamed(q, k, v, [], decay=lam, key_mask=mask, horizon=horizon, backend=backend)[1].tensor

    def joined(k, v, lam):
        a, b, c = parts(k, v, lam)
        left, right = a.then(b).then(c), a.then(b.then(c))
        assert_close(left.tensor, right.tensor)
        assert (left.position, left.start) == (right.position, right.start) == (100, 0)
        assert (left.fade is None) == (decay is None)
        if left.fade is not None:
            assert_close(left.fade, right.fade)
        return left.tensor

    expected, grads = value_and_grads(whole, (k, v, lam))
    found, found_grads = value_and_grads(joined, (k, v, lam))
    assert_close(found, expected)
    for actual, wanted in zip(found_grads, grads, strict=True):
        assert_close(actual, wanted, scale=wanted)


def test_a_segment_goes_on_as_a_stream(backend):
    """Tokens added to a segment also fade what came before it; saving and loading keep that."""
    q, k, v = inputs(L=60, S=60)
    lam, mask = torch.rand(2, 4, 60) / 10, torch.ones(2, 60, dtype=torch.bool)
    options = {"horizon": 90, "backend": backend}
    first, later = (segment(k, v, lam, mask, *edges, **options) for edges in ((0, 20), (20, 45)))
    later = saved_and_loaded(later).index_select(torch.tensor([0, 1]))
    _, later = cosformer_stream(
        q[:, :, 45:], k[:, :, 45:], v[:, :, 45:], later, decay=lam[:, :, 45:], **options
    )
    assert_close(first.then(later).tensor, streamed(q, k, v, [], decay=lam, **options)[1].tensor)


def test_only_what_follows_can_be_joined():
    _, k, v = inputs(L=30, S=30)
    mask = torch.ones(2, 30, dtype=torch.bool)
    first, second = (segment(k, v, None, mask, *edges, horizon=90) for edges in ((0, 10), (20, 30)))
    with pytest.raises(ValueError, match="this state ends at position 10, and the other begins at 20"):
        first.then(second)
    with pytest.raises(ValueError, match="horizon is 80, but the state was made with 90"):
        first.then(segment(k, v, None, mask, 10, 20, horizon=80))
