"""What mixers claim to be, against their definitions written out: quadratic, or as a recurrence."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import moved, qkv, toy_mixer
from judge import grid, masked_softmax, past
from torch.testing import assert_close

from cosformer import mixers, reference
from cosformer.decay import ladder
from cosformer.mixers.positions import Rope, companion
from cosformer.mixers.random import orthogonal
from cosformer.ops import operator

HEADS, DIM = 4, 8  # of conftest's toy mixer
both = pytest.mark.parametrize("causal", [False, True])


# softmax and the kernels


@both
def test_softmax_is_torch(causal):
    q, k, v = qkv(33)
    assert_close(toy_mixer("softmax")(q, k, v, causal=causal), masked_softmax(q, k, v, past(33, causal)))


@both
@pytest.mark.parametrize("horizon", [64, math.inf])
@pytest.mark.parametrize("decay", [None, "ladder", [0.5, 0.3, 0.1, 0.0], "gated"])
def test_cosformer_is_the_definition(causal, decay, horizon):
    mixer, (q, k, v) = moved(toy_mixer("cosformer", decay=decay, horizon=horizon)), qkv(33)
    x = torch.randn(2, 33, HEADS * DIM, dtype=q.dtype)
    rates = torch.tensor(decay if isinstance(decay, list) else ladder(HEADS, 64))
    if decay == "gated":
        gate = mixer.decay.gate
        rates = (rates * torch.exp(x @ gate.weight.T + gate.bias)).transpose(1, 2)
    rates = None if decay is None else rates
    expected = reference.attention(q, k, v, horizon=horizon, causal=causal, decay=rates)
    close = {"rtol": 1e-6, "atol": 1e-6} if decay is not None else {}  # constants are kept in float32
    assert_close(mixer(q, k, v, x=x, causal=causal), expected, **close)
    mixer.horizon = (40,)
    assert not torch.allclose(mixer(q, k, v, x=x, causal=causal), expected, rtol=1e-4)


@both
def test_features_of_both_signs_are_twice_as_many(causal):
    q, k, v = qkv(33)
    wide = [torch.cat([t, -t], -1) for t in (q, k)]
    ours = toy_mixer("cosformer-paper", both_signs=True)
    assert_close(ours(q, k, v, causal=causal), reference.attention(*wide, v, horizon=64, causal=causal))
    _, state = ours.stream(q, k, v)
    assert state.tensor.shape[1:] == (HEADS, 4 * DIM, DIM + 1)


@both
def test_relu_is_cosformer_with_an_infinite_horizon(causal):
    q, k, v = qkv(33)
    relu = toy_mixer("relu")(q, k, v, causal=causal)
    flat = toy_mixer("cosformer-paper", horizon=math.inf)(q, k, v, causal=causal)
    assert torch.equal(relu, flat)
    assert not torch.allclose(relu, toy_mixer("cosformer-paper")(q, k, v, causal=causal))


FEATURES = {
    "relu": torch.relu,
    "identity": lambda x: x,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "elu": lambda x: torch.where(x > 0, x + 1, x.exp()),
}


@both
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("keys", [33, 20])
def test_kernel_mixers_are_their_quadratic_form(name, causal, keys):
    phi, (q, k, v) = FEATURES[name], qkv(33, keys)
    s = (phi(q) @ phi(k).mT) * past(33, causal)[:, :keys]
    wanted = (s @ v / s.sum(-1, keepdim=True)).nan_to_num(0)  # a row of zeros gives zeros
    assert_close(toy_mixer(name)(q, k, v, causal=causal), wanted)


def test_a_signed_normaliser_keeps_its_sign_and_its_distance_from_zero():
    q = torch.tensor([1.0, -1.0, 1e-9, -1e-9, 0.0]).view(1, 1, 5, 1)
    k, v = torch.tensor([[[[2.0]]]]), torch.tensor([[[[3.0]]]])
    mixer = mixers.build("identity", heads=1, head_dim=1, max_length=4)
    small = 3 * 2e-9 / 1e-6  # n / eps, with the sign of n / z
    assert_close(mixer(q, k, v).flatten(), torch.tensor([3.0, 3.0, small, small, 0.0]))


@pytest.mark.parametrize("name", ["cosformer", *FEATURES, "performer", "rfa"])
@both
def test_kernel_mixers_agree_on_every_backend(backend, name, causal, monkeypatch):
    """They share one core, so that their speeds can be compared."""
    mixer = mixers.build(name, heads=2, head_dim=8, max_length=150)
    tensors = [t.float() for t in qkv(150, heads=2)]
    x = {"x": torch.randn(2, 150, 16)} if mixer.reads_input else {}

    def run(only):
        monkeypatch.setattr(operator, "BACKENDS", (only,))
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = mixer(*leaves, **x, causal=causal)
        return out, torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).reshape(out.shape))

    (out, grads), (expected, expected_grads) = run(backend), run("torch")
    assert_close(out, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    for g, e in zip(grads, expected_grads):
        assert_close(g, e, rtol=1e-3, atol=1e-3 * e.abs().max().item())


# random features


def errors(name, target, features, draws, **options):
    """The mean error to `target` over draws, for each number of features."""
    q, k, v = qkv(24)
    q, k = 0.4 * q, 0.4 * k  # larger exponents make positive features' variance grow as exp(|q + k|^2)
    wanted = target(q, k) @ v / target(q, k).sum(-1, keepdim=True)

    def error(count, seed):
        return (toy_mixer(name, features=count, seed=seed, **options)(q, k, v) - wanted).norm().item()

    return [sum(error(n, seed) for seed in range(draws)) / draws for n in features]


def softmax_kernel(q, k):
    return (q @ k.mT / math.sqrt(DIM)).exp()


def direction_kernel(q, k):
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).exp()


@pytest.mark.parametrize(("name", "target"), [("performer", softmax_kernel), ("rfa", direction_kernel)])
def test_the_error_falls_with_the_square_root_of_the_features(name, target):
    features = [32, 128, 512, 2048]
    e = errors(name, target, features, draws=6)
    x, y = torch.tensor(features).double().log(), torch.tensor(e).double().log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert -0.65 < slope < -0.4, (slope, e)


@pytest.mark.parametrize("name", ["performer", "rfa"])
def test_random_features_are_unbiased_over_draws(name):
    q, k, _ = qkv(5)
    q, k = (x / 2 for x in (q, k))
    draws = []
    for seed in range(400):
        mixer = toy_mixer(name, features=64, seed=seed)
        if name == "performer":
            draws.append(mixer.exponents(q).exp() @ mixer.exponents(k).exp().mT / 64)
        else:
            draws.append((mixer.phi(q) @ mixer.phi(k).mT).detach())
    draws = torch.stack(draws)
    distance = F.normalize(q, dim=-1)[..., :, None, :] - F.normalize(k, dim=-1)[..., None, :, :]
    wanted = softmax_kernel(q, k) if name == "performer" else (-distance.square().sum(-1) / 2).exp()
    z = (draws.mean(0) - wanted) / (draws.std(0) / math.sqrt(len(draws)))
    assert z.abs().mean() < 1.5, z.abs().mean()  # 0.8 is expected; the pairs share their draws
    assert (draws.mean(0) / wanted).log().abs().max() < 0.1


def test_orthogonal_features_beat_independent_ones_and_point_everywhere():
    torch.manual_seed(0)
    w = orthogonal(8, 8).double()
    assert_close(
        (F.normalize(w, dim=-1) @ F.normalize(w, dim=-1).mT), torch.eye(8).double(), rtol=0, atol=1e-6
    )
    many = torch.cat([orthogonal(8, 8) for _ in range(2000)])
    assert many.mean(0).abs().max() < 4 / math.sqrt(len(many))  # no preferred direction, unlike a bare QR
    assert (many.square().mean() - 1).abs() < 0.02


def test_performer_survives_large_keys_and_their_order():
    """The running maximum: a huge key, early or late, must not make other rows overflow or vanish."""
    q, k, v = qkv(40)
    late = k.clone()
    late[:, :, 30] *= 60
    mixer = toy_mixer("performer")
    for keys in (late, late.flip(2), 60 * k):
        e = mixer.exponents(q)[..., :, None, :] + mixer.exponents(keys)[..., None, :, :]
        for causal in (False, True):
            s = torch.logsumexp(e, -1).masked_fill(~past(40, causal), -math.inf)
            assert_close(mixer(q, keys, v, causal=causal), s.softmax(-1) @ v)


def test_the_gate_is_its_recurrence():
    mixer, (q, k, v) = toy_mixer("rfa", gate=True), qkv(20)
    with torch.no_grad():
        mixer.gate_weight.normal_()
    g = torch.sigmoid((k * mixer.gate_weight).sum(-1) + mixer.gate_bias)
    phi_q, phi_k = mixer.phi(q), mixer.phi(k)
    S, z, outs = torch.zeros(2, HEADS, 128, DIM).double(), torch.zeros(2, HEADS, 128).double(), []
    for t in range(20):
        gate = g[:, :, t, None]
        z = gate * z + (1 - gate) * phi_k[:, :, t]
        S = gate[..., None] * S + (1 - gate)[..., None] * phi_k[:, :, t, :, None] * v[:, :, t, None, :]
        outs.append((phi_q[:, :, t, None] @ S).squeeze(2) / (phi_q[:, :, t] * z).sum(-1, keepdim=True))
    assert_close(mixer(q, k, v, causal=True), torch.stack(outs, 2))
    with pytest.raises(ValueError, match="recurrence over the past"):
        mixer(q, k, v)


# low rank


def test_linformer_at_full_rank_is_softmax():
    mixer, (q, k, v) = toy_mixer("linformer", max_length=20, rank=20), qkv(13, 20)
    with torch.no_grad():
        mixer.E.copy_(torch.eye(20))
        mixer.F.copy_(torch.eye(20))
    assert_close(mixer(q, k, v), masked_softmax(q, k, v, torch.ones(13, 20, dtype=torch.bool)))
    with pytest.raises(ValueError, match="max_length = 20 keys; got k of length 21"):
        mixer(*qkv(13, 21))


@pytest.mark.parametrize("landmarks", [20, 64])
def test_nystrom_with_a_landmark_for_every_token_is_softmax(landmarks):
    mixer, (q, k, v) = toy_mixer("nystrom", landmarks=landmarks, iterations=30, conv=None), qkv(20)
    assert_close(mixer(q, k, v), masked_softmax(q, k, v, past(20, False)), rtol=1e-5, atol=1e-5)


def test_nystrom_is_its_definition_and_its_convolution():
    mixer, (q, k, v) = toy_mixer("nystrom", landmarks=5, iterations=40, conv=3), qkv(20)
    Q, K = (x.unflatten(2, (5, 4)).mean(3) for x in (q, k))
    left, middle, right = ((x @ y.mT / math.sqrt(DIM)).softmax(-1) for x, y in ((q, K), (Q, K), (Q, k)))
    w = mixer.conv.weight[:, 0, :, 0]
    near = F.pad(v, (0, 0, 1, 1))
    conv = sum(w[:, t, None, None] * near[:, :, t : t + 20] for t in range(3))
    assert_close(mixer(q, k, v), left @ torch.linalg.pinv(middle) @ (right @ v) + conv, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [46, 62, 256])
def test_gradients_of_nystroms_convolution_in_float32(length):
    """oneDNN's are wrong at these lengths along the last axis but one."""
    exact, given = toy_mixer("nystrom"), qkv(length)
    mixer = copy.deepcopy(exact).float()
    up = torch.randn_like(given[0])
    (wanted,) = torch.autograd.grad(exact(*given), exact.conv.weight, up)
    (found,) = torch.autograd.grad(mixer(*(t.float() for t in given)), mixer.conv.weight, up.float())
    assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


# forgetting


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_forgetting_is_softmax_with_decay(causal, dtype):
    """With sums of rates in the thousands, which half precision would round to multiples of ten."""
    mixer = moved(toy_mixer("forgetting", width=12), by=0.3)
    (q, k, v), x = qkv(33), torch.randn(2, 33, 12).double()
    mixer.decay.gate.bias.data += 5
    given = [t.to(dtype) for t in (q, k, v)]
    sums = mixer.decay.rates(x).cumsum(-1)
    assert sums.max() > 1000
    q, k, v = (t.double() for t in given)
    scores = q @ k.mT / math.sqrt(DIM) - (sums[..., :, None] - sums[..., None, :]).abs()
    wanted = scores.where(past(33, causal) > 0, -math.inf).softmax(-1) @ v
    out = mixer(*given, x=x, causal=causal)
    assert out.dtype == dtype
    close = {} if dtype == torch.float64 else {"rtol": 2**-7, "atol": 1e-3}
    assert_close(out.double(), wanted, **close)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(mixer(*given, x=x, causal=causal).double(), wanted, **close)


# polynomial


@both
@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize(("length", "keys"), [(33, 33), (300, 40)])
def test_polynomial_is_its_quadratic_form(causal, degree, length, keys):
    q, k, v = qkv(length, keys)
    i, j = torch.arange(length)[:, None], torch.arange(keys)
    allowed = (j <= i) if causal else torch.ones(length, keys, dtype=torch.bool)
    s = (q @ k.mT / math.sqrt(DIM)) ** degree * allowed / allowed.sum(-1, keepdim=True).sqrt()
    assert_close(toy_mixer("polynomial", degree=degree)(q, k, v, causal=causal), s @ v)


# positions


def test_rope_depends_on_the_distance_alone_and_turns_as_defined():
    rope, (q, k, _) = Rope(HEADS, DIM, 64), qkv(12)
    pair = torch.view_as_complex(torch.stack(q.chunk(2, -1), -1))
    speed = 10000.0 ** (-2 * torch.arange(DIM // 2).double() / DIM)
    turned = pair * torch.polar(torch.ones(12, 4).double(), torch.arange(12.0).double()[:, None] * speed)
    assert_close(rope.turn(q), torch.cat([turned.real, turned.imag], -1))
    (a, b), (c, d) = rope(q, k), rope(q, k, offset=1000, key_offset=1000)
    assert_close(a @ b.mT, c @ d.mT)
    assert not torch.allclose(a @ b.mT, q @ k.mT)


def test_rope_with_softmax_is_rotated_softmax():
    q, k, v = qkv(12)
    a, b = Rope(HEADS, DIM, 64)(q, k)
    assert_close(toy_mixer("softmax+rope")(q, k, v), masked_softmax(a, b, v, past(12, False)))


def sine_template(spe, distance):
    """P_d(t) = sum_s a_ds^2 cos(2 pi f_ds t + b_ds): (H, D, *distance.shape)."""
    a, f, b = (t[..., None, None] for t in (spe.gain, spe.frequency, spe.offset))
    return (a.square() * torch.cos(2 * math.pi * f * distance + b)).sum(2)


def conv_template(spe, distance):
    """P_d(t) = sum_p x_d(p) y_d(p - t)."""
    p = torch.arange(spe.taps)
    other = p - distance[..., None]
    inside = (other >= 0) & (other < spe.taps)
    y = spe.key_filter[:, :, other.clamp(0, spe.taps - 1)]
    return (spe.query_filter[:, :, p.expand_as(other)] * y * inside).sum(-1)


@pytest.mark.parametrize("name, template", [("sine_spe", sine_template), ("conv_spe", conv_template)])
def test_spe_has_its_template_in_the_mean(name, template):
    torch.manual_seed(0)
    spe = companion(name)(HEADS, DIM, 16).double()
    with torch.no_grad():
        for p in spe.parameters():
            p.add_(0.3 * torch.randn_like(p))
    q, k, _ = qkv(10)
    i, j = grid(10)
    wanted = torch.einsum("bhmd,bhnd,hdmn->bhmn", q, k, template(spe, i - j))
    draws = []
    for seed in range(300):
        spe.redraw(seed)
        a, b = spe(q, k)
        draws.append((a @ b.mT).detach())
    draws = torch.stack(draws)
    z = (draws.mean(0) - wanted) / (draws.std(0) / math.sqrt(len(draws)))
    assert z.abs().mean() < 1.1, z.abs().mean()  # 0.8 for an unbiased estimate
    assert z.abs().max() < 5.5
    spe.redraw(3)
    whole, _ = spe(q, k)
    part, _ = spe(q[:, :, 4:], k[:, :, 4:], offset=4)
    assert_close(part, whole[:, :, 4:])


def test_spe_gives_a_linear_mixer_positions():
    q, k, v = qkv(12)
    # Equal tokens: without positions all queries get the same.
    q, k = (
        q[:, :, :1].expand_as(q),
        k[:, :, :1].expand_as(k),
    )
    assert toy_mixer("relu")(q, k, v).std(2).max() < 1e-12
    for positions in ("sine_spe", "conv_spe"):
        assert toy_mixer(f"relu+{positions}")(q, k, v).std(2).min() > 1e-3
