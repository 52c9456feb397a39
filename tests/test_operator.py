"""cosformer_attention against the definition: every mode, dtype and backend, outputs and gradients."""

import math

import pytest
import torch
from conftest import examples, widest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge import assert_close, compare, inputs, judge, on, rates, value_and_grads

from cosformer import cosformer_attention, cosformer_stream

LENGTHS = [
    (1, 1, 0),
    (65, 65, 0),
    (300, 300, 0),
    (20, 150, 0),
    (150, 20, 0),
    (40, 200, 60),
    (260, 200, 150),
    (9, 20, 40),
]


@pytest.mark.parametrize("decay", [None, "head", "position"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("L", "S", "q_offset"), LENGTHS)
def test_definition(backend, dtype, L, S, q_offset, causal, masked, decay):
    if decay == "position" and L != S:
        pytest.skip("rates per position are for self-attention")
    q, k, v = inputs(L=L, S=S, dtype=dtype)
    mask = torch.rand(2, S) > 0.3 if masked else None
    if masked and S > 1:
        mask[0, :2], mask[1, -2:] = False, False
    lam = rates(decay, 2, 4, S)
    judge(
        on(backend),
        q,
        k,
        v,
        causal=causal,
        key_mask=mask,
        q_offset=q_offset,
        decay=lam,
        horizon=[450, 500, 550.5, 1000],
    )


@pytest.mark.parametrize("horizon", [400.0, 200.0, math.inf, [200, 250.5, math.inf, 1e9]])
def test_horizons(backend, horizon):
    dtype = widest(backend)
    for causal in (False, True):
        judge(on(backend), *inputs(L=200, S=200, dtype=dtype), causal=causal, horizon=horizon)


def test_default_horizon_is_the_longer_length(backend):
    q, k, v = inputs(L=30, S=50)
    assert torch.equal(on(backend)(q, k, v), on(backend)(q, k, v, horizon=50))


@pytest.mark.parametrize("decay", [None, "head", "position"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal, decay):
    q, k, v = inputs(B=1, H=2, Hk=1, L=9, S=9, D=3, E=2, dtype=torch.float64)
    lam = rates(decay, 1, 2, 9)
    lam = None if lam is None else (lam.double() + 0.01).clamp_max(2)
    leaves = [t.requires_grad_() for t in (q, k, v, lam) if t is not None]

    def f(q, k, v, decay=None):
        return cosformer_attention(q, k, v, causal=causal, decay=decay, horizon=20)

    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize("rate", [1e-6, 1e-3, 0.1, 2.0, 20.0])
@pytest.mark.parametrize("per_position", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_decay_of_any_strength_at_length(backend, rate, per_position, causal):
    """Exact and finite where exp(+A) would overflow (A reaches 40,000) and where it would round to 1."""
    L = 700
    q, k, v = inputs(B=1, H=1, Hk=1, L=L, S=L, D=4, E=3)
    lam = torch.full((1, 1, L), rate) if per_position else torch.tensor([rate])
    judge(on(backend), q, k, v, causal=causal, decay=lam, horizon=math.inf)


def test_rates_as_numbers(backend):
    q, k, v = inputs(L=30, S=30)
    for numbers, same in ((0.25, [0.25] * 4), ((0.5, 0.25, 1, 0), [0.5, 0.25, 1, 0])):
        expected = on(backend)(q, k, v, causal=True, horizon=40, decay=torch.tensor(same))
        assert torch.equal(on(backend)(q, k, v, causal=True, horizon=40, decay=numbers), expected)
        start = cosformer_stream(
            q[:, :, :9], k[:, :, :9], v[:, :, :9], horizon=40, decay=numbers, backend=backend
        )[1].snapshot()
        out, state = cosformer_stream(
            q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], start, horizon=40, decay=numbers, backend=backend
        )
        assert_close(out, expected[:, :, 9:])
        assert_close(state.rollback(21).tensor, start.tensor)


def test_zero_decay_is_no_decay(backend):
    q, k, v = inputs(L=150, S=150)
    for causal in (False, True):
        plain = on(backend)(q, k, v, causal=causal, horizon=200)
        assert_close(on(backend)(q, k, v, causal=causal, horizon=200, decay=torch.zeros(4)), plain)
        assert_close(on(backend)(q, k, v, causal=causal, horizon=200, decay=torch.zeros(2, 4, 150)), plain)


def test_prefix_of_output_is_output_of_prefix(backend):
    q, k, v = inputs(L=200, S=200)
    whole = on(backend)(q, k, v, causal=True, horizon=300)
    for n in (1, 31, 128, 150):
        assert_close(
            on(backend)(q[:, :, :n], k[:, :, :n], v[:, :, :n], causal=True, horizon=300), whole[:, :, :n]
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("decay", [None, "head", "position"])
def test_padded_is_unpadded(backend, causal, decay):
    q, k, v = inputs(B=1, L=90, S=90)
    lam = rates(decay, 1, 4, 90)
    alone = on(backend)(q, k, v, causal=causal, horizon=200, decay=lam)
    for left, right in ((0, 40), (40, 0), (13, 29)):
        pad = lambda x: torch.nn.functional.pad(x, (0, 0, left, right), value=float("nan"))
        mask = torch.zeros(1, 90 + left + right, dtype=torch.bool)
        mask[:, left : left + 90] = True
        padded_rates = torch.nn.functional.pad(lam, (left, right), value=0.5) if decay == "position" else lam
        q_ = torch.nn.functional.pad(q, (0, 0, left, right))
        out = on(backend)(q_, pad(k), pad(v), causal=causal, horizon=200, decay=padded_rates, key_mask=mask)
        assert_close(out[:, :, left : left + 90], alone)


def test_padding_gets_no_gradient_and_gives_none(backend):
    q, k, v = inputs(L=50, S=50)
    mask = torch.rand(2, 50) > 0.4
    poisoned_k, poisoned_v = (x.masked_fill(~mask[:, None, :, None], float("nan")) for x in (k, v))
    for causal in (False, True):
        out, grads = value_and_grads(
            lambda *x: on(backend)(*x, causal=causal, key_mask=mask, horizon=90), (q, poisoned_k, poisoned_v)
        )
        assert torch.isfinite(out).all()
        assert all(torch.isfinite(g).all() for g in grads)
        for g in grads[1:]:
            assert (g.masked_select(~mask[:, None, :, None]) == 0).all()


@pytest.mark.parametrize("decay", [None, "head", "position"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[5, 1, 0, 130, 64, 3, 200], [0], [70], [1] * 9])
def test_packed_is_looped(backend, lengths, causal, decay):
    total = sum(lengths)
    q, k, v = inputs(B=1, L=total, S=total)
    mask = torch.rand(1, total) > 0.2
    lam = rates(decay, 1, 4, total)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    kwargs = {"causal": causal, "horizon": [200, 220, 240, 300]}

    def packed(q, k, v, decay):
        return on(backend)(q, k, v, cu_seqlens=cu, decay=decay, key_mask=mask, **kwargs)

    def looped(attend):
        def loop(q, k, v, decay):
            parts = []
            for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
                one = decay[..., a:b] if decay is not None and decay.ndim == 3 else decay
                parts.append(
                    attend(
                        q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], decay=one, key_mask=mask[:, a:b], **kwargs
                    )
                )
            return torch.cat(parts, 2)

        return loop

    compare(packed, looped, (q, k, v, lam), (1, 4, total, 5))


def test_packed_sequences_do_not_leak(backend):
    q, k, v = inputs(B=1, L=100, S=100)
    cu = torch.tensor([0, 40, 100], dtype=torch.int32)
    out = on(backend)(q, k, v, cu_seqlens=cu, horizon=100)
    k[:, :, :40], v[:, :, :40] = float("nan"), float("inf")
    assert torch.equal(on(backend)(q, k, v, cu_seqlens=cu, horizon=100)[:, :, 40:], out[:, :, 40:])


@pytest.mark.parametrize("causal", [False, True])
def test_rows_with_nothing_to_attend_to(backend, dtype, causal):
    q, k, v = inputs(L=70, S=70, dtype=dtype)
    q[0, 0, 3] = -1.0  # relu(q) is all zero
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[1] = False  # nothing to see at all
    mask[0, :2] = False  # causal: the first two rows see nothing
    lam = torch.rand(2, 4, 70)
    for decay in (None, lam):
        out, (dq, dk, dv, *_) = value_and_grads(
            lambda q, k, v, d: on(backend)(q, k, v, causal=causal, key_mask=mask, horizon=90, decay=d),
            (q, k, v, decay),
        )
        assert (out[0, 0, 3] == 0).all() and (out[1] == 0).all()
        assert (dq[0, 0, 3] == 0).all() and (dq[1] == 0).all() and (dk[1] == 0).all() and (dv[1] == 0).all()
        assert not causal or ((out[0, :, :2] == 0).all() and (dq[0, :, :2] == 0).all())
        assert all(torch.isfinite(x).all() for x in (out, dq, dk, dv))


@pytest.mark.parametrize("L,S", [(0, 0), (0, 5), (5, 0), (1, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("decay", [None, "head"])
def test_tiny_lengths(backend, L, S, causal, decay):
    q, k, v = inputs(L=L, S=S)
    out, grads = value_and_grads(
        lambda q, k, v, d: on(backend)(q, k, v, causal=causal, decay=d), (q, k, v, rates(decay, 2, 4, S))
    )
    assert out.shape == (2, 4, L, 5) and [g.shape for g in grads[:3]] == [q.shape, k.shape, v.shape]
    if S == 0:
        assert (out == 0).all()
    assert all(torch.isfinite(g).all() for g in grads)
    empty = on(backend)(q[:0], k[:0], v[:0], causal=causal)
    assert empty.shape == (0, 4, L, 5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_stays_in_its_batch_row_and_head(backend, causal, poison):
    q, k, v = inputs(B=3, H=2, Hk=2, L=70, S=70)
    clean, clean_grads = value_and_grads(lambda *x: on(backend)(*x, causal=causal, horizon=90), (q, k, v))
    for x in (q, k, v):
        x[1, 1, 20] = poison
    out, grads = value_and_grads(lambda *x: on(backend)(*x, causal=causal, horizon=90), (q, k, v))
    touched = torch.zeros(3, 2, 1, 1, dtype=torch.bool)
    touched[1, 1] = True
    assert not torch.isfinite(out[1, 1]).all()
    for a, b in zip((out, *grads), (clean, *clean_grads), strict=True):
        torch.testing.assert_close(a.masked_fill(touched, 0), b.masked_fill(touched, 0), rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_batch_order_and_size_change_nothing(backend, causal):
    q, k, v = inputs(B=5, L=130, S=130)
    whole = on(backend)(q, k, v, causal=causal, horizon=200)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert_close(on(backend)(q[order], k[order], v[order], causal=causal, horizon=200), whole[order])
    assert_close(on(backend)(q[2:3], k[2:3], v[2:3], causal=causal, horizon=200), whole[2:3])


def strided(kind, B, H, Hk, L, D, E, dtype):
    """q, k, v of one length as views: of a fused projection, transposed, expanded over the batch, stepped."""
    if kind == "fused":
        fused = torch.randn(B, L, H * D + Hk * D + Hk * E).to(dtype)
        q, k, v = fused.split([H * D, Hk * D, Hk * E], -1)
        return tuple(x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in ((q, H), (k, Hk), (v, Hk)))
    if kind == "transposed":
        return tuple(torch.randn(B, n, d, L).to(dtype).mT for n, d in ((H, D), (Hk, D), (Hk, E)))
    if kind == "expanded":
        return tuple(
            torch.randn(1, n, L, d).to(dtype).expand(B, -1, -1, -1) for n, d in ((H, D), (Hk, D), (Hk, E))
        )
    if kind == "stepped":
        return tuple(
            torch.randn(B, n, 2 * L, 3 * d).to(dtype)[:, :, ::2, ::3] for n, d in ((H, D), (Hk, D), (Hk, E))
        )
    return tuple(torch.randn(B, n, L, d).to(dtype) for n, d in ((H, D), (Hk, D), (Hk, E)))


@settings(max_examples=examples(40))
@given(data=st.data())
def test_shapes_strides_masks_offsets_horizons(backend, dtype, data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**16)))
    B, Hk, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    H, L = Hk * group, draw(st.integers(1, 150))
    D, E = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    q, k, v = strided(
        draw(st.sampled_from(["plain", "fused", "transposed", "expanded", "stepped"])),
        B,
        H,
        Hk,
        L,
        D,
        E,
        dtype,
    )
    causal, kind, q_offset = draw(st.booleans()), draw(st.sampled_from([None, "head", "position"])), 0
    if kind != "position":  # cross attention: cut queries and keys differently
        q, q_offset = q[:, :, : draw(st.integers(1, L))], draw(st.integers(0, L))
        n = draw(st.integers(1, L))
        k, v = k[:, :, :n], v[:, :, :n]
    S = k.shape[2]
    lam = rates(kind, B, H, S)
    mask = (
        (torch.rand(B, 2 * S) > draw(st.sampled_from([0.0, 0.3, 0.9])))[:, ::2]
        if draw(st.booleans())
        else None
    )
    least = q_offset + q.shape[2] + S
    horizon = draw(st.sampled_from([least, math.inf, [least + 7.5 * h for h in range(H)]]))
    judge(on(backend), q, k, v, causal=causal, decay=lam, key_mask=mask, q_offset=q_offset, horizon=horizon)


@pytest.mark.parametrize("D", [1, 8, 20, 33, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("E", [1, 33, 64, 200, 256])
def test_sizes(backend, D, E):
    for causal in (False, True):
        judge(on(backend), *inputs(B=1, H=2, Hk=1, L=70, S=70, D=D, E=E), causal=causal, horizon=100)
