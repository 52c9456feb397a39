"""What each mixer claims to be, against its definition written out: quadratic, masked, or as a recurrence."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cosformer import mixers, reference

HEADS, DIM = 2, 8
both = pytest.mark.parametrize("causal", [False, True])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Calls this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name, max_length=64, **options):
    return mixers.build(name, heads=HEADS, head_dim=DIM, max_length=max_length, **options).double()


def qkv(length, keys=None, *, seed=0, scale=1.0):
    torch.manual_seed(seed)
    shape = (2, HEADS, length if keys is None else keys, DIM)
    return (
        scale * torch.randn(2, HEADS, length, DIM).double(),
        scale * torch.randn(shape).double(),
        torch.randn(shape).double(),
    )


def masked_softmax(q, k, v, allowed):
    """The judge of the sparse mixers: the full score matrix, masked."""
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
    return scores.softmax(-1) @ v


def past(length, causal):
    every = torch.ones(length, length, dtype=torch.bool)
    return every.tril() if causal else every


def grid(length):
    return torch.arange(length)[:, None], torch.arange(length)[None, :]


# softmax and the kernels


@both
def test_softmax_is_torch(causal):
    q, k, v = qkv(33)
    assert_close(build("softmax")(q, k, v, causal=causal), masked_softmax(q, k, v, past(33, causal)))


@both
@pytest.mark.parametrize("decay", [None, "ladder", [0.3, 0.01]])
def test_cosformer_is_the_definition(causal, decay):
    mixer, (q, k, v) = build("cosformer", decay=decay), qkv(33)
    rates = {None: None, "ladder": torch.tensor([1 / 4, 1 / 64])}.get(
        decay if not isinstance(decay, list) else 0, torch.tensor([0.3, 0.01])
    )
    expected = reference.attention(q, k, v, horizon=64, causal=causal, decay=rates)
    assert_close(mixer(q, k, v, causal=causal), expected, rtol=1e-6, atol=1e-6)  # rates are kept in float32
    far = build("cosformer", horizon=1e9, decay=decay)(q, k, v, causal=causal)
    assert not torch.allclose(far, expected, rtol=1e-4)


@both
def test_relu_is_cosformer_with_an_infinite_horizon(causal):
    q, k, v = qkv(33)
    relu = build("relu")(q, k, v, causal=causal)
    assert_close(relu, build("cosformer", horizon=math.inf)(q, k, v, causal=causal), rtol=0, atol=0)
    assert not torch.allclose(relu, build("cosformer")(q, k, v, causal=causal))


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
    assert_close(build(name)(q, k, v, causal=causal), wanted)


def test_a_signed_normaliser_keeps_its_sign_and_its_distance_from_zero():
    q = torch.tensor([1.0, -1.0, 1e-9, -1e-9, 0.0]).view(1, 1, 5, 1)
    k, v = torch.tensor([[[[2.0]]]]), torch.tensor([[[[3.0]]]])
    mixer = mixers.build("identity", heads=1, head_dim=1, max_length=4)
    small = 3 * 2e-9 / 1e-6  # n / eps, with the sign of n / z
    assert_close(mixer(q, k, v).flatten(), torch.tensor([3.0, 3.0, small, small, 0.0]))


# random features


def errors(name, target, features, draws, **options):
    """The mean error to `target` over draws, for each number of features."""
    q, k, v = qkv(24, scale=0.4)  # larger exponents make positive features' variance grow as exp(|q + k|^2)
    wanted = target(q, k) @ v
    wanted = wanted / target(q, k).sum(-1, keepdim=True)
    return [
        sum(
            (build(name, features=n, seed=s, **options)(q, k, v) - wanted).norm().item() for s in range(draws)
        )
        / draws
        for n in features
    ]


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
        mixer = build(name, features=64, seed=seed)
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
    from cosformer.mixers.random import orthogonal

    torch.manual_seed(0)
    w = orthogonal(8, 8).double()
    assert_close(
        (F.normalize(w, dim=-1) @ F.normalize(w, dim=-1).mT), torch.eye(8).double(), rtol=0, atol=1e-6
    )
    many = torch.cat([orthogonal(8, 8) for _ in range(2000)])
    assert many.mean(0).abs().max() < 4 / math.sqrt(len(many))  # no preferred direction, which a bare QR has
    assert (many.square().mean() - 1).abs() < 0.02


def test_performer_survives_large_keys_and_their_order():
    """The running maximum: a huge late key must not push earlier rows out of the floats, nor an early one later rows."""
    q, k, v = qkv(40)
    late = k.clone()
    late[:, :, 30] *= 60
    mixer = build("performer")
    for keys in (late, late.flip(2), 60 * k):
        e = mixer.exponents(q)[..., :, None, :] + mixer.exponents(keys)[..., None, :, :]
        for causal in (False, True):
            s = torch.logsumexp(e, -1).masked_fill(~past(40, causal), -math.inf)
            assert_close(mixer(q, keys, v, causal=causal), s.softmax(-1) @ v)


def test_the_gate_is_its_recurrence():
    mixer, (q, k, v) = build("rfa", gate=True), qkv(20)
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
    mixer, (q, k, v) = build("linformer", max_length=20, rank=20), qkv(13, 20)
    with torch.no_grad():
        mixer.E.copy_(torch.eye(20))
        mixer.F.copy_(torch.eye(20))
    assert_close(mixer(q, k, v), masked_softmax(q, k, v, torch.ones(13, 20, dtype=torch.bool)))
    with pytest.raises(ValueError, match="max_length = 20 keys; got k of length 21"):
        mixer(*qkv(13, 21))


@pytest.mark.parametrize("landmarks", [20, 64])
def test_nystrom_with_a_landmark_for_every_token_is_softmax(landmarks):
    mixer, (q, k, v) = build("nystrom", landmarks=landmarks, iterations=30, conv=None), qkv(20)
    assert_close(mixer(q, k, v), masked_softmax(q, k, v, past(20, False)), rtol=1e-5, atol=1e-5)


def test_nystrom_is_its_definition_and_its_convolution():
    mixer, (q, k, v) = build("nystrom", landmarks=5, iterations=40, conv=3), qkv(20)
    Q, K = (x.unflatten(2, (5, 4)).mean(3) for x in (q, k))
    left, middle, right = ((x @ y.mT / math.sqrt(DIM)).softmax(-1) for x, y in ((q, K), (Q, K), (Q, k)))
    w = mixer.conv.weight[:, 0, :, 0]
    near = F.pad(v, (0, 0, 1, 1))
    conv = sum(w[:, t, None, None] * near[:, :, t : t + 20] for t in range(3))
    assert_close(mixer(q, k, v), left @ torch.linalg.pinv(middle) @ (right @ v) + conv, rtol=1e-5, atol=1e-5)


# sparse patterns


@both
@pytest.mark.parametrize("length", [1, 12, 37])
@pytest.mark.parametrize(("window", "leading"), [(3, 0), (0, 2), (5, 3), (1, 40), (64, 0)])
def test_local_is_masked_softmax(causal, length, window, leading):
    (q, k, v), (i, j) = qkv(length), grid(length)
    allowed = (((i - j).abs() <= window) | (i < leading) | (j < leading)) & past(length, causal)
    assert_close(
        build("local", window=window, globals=leading)(q, k, v, causal=causal),
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
    mixer = build("sparse", pattern=pattern, stride=stride, columns=columns)
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
    mixer, (q, k, v) = build("bigbird", block=4, **options), qkv(length)
    table = bigbird_blocks(mixer, -(-length // 4))
    allowed = table.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :length, :length]
    assert_close(mixer(q, k, v), masked_softmax(q, k, v, allowed))


def test_bigbird_draws_the_blocks_it_says():
    n = 16
    for seed in range(5):
        table = bigbird_blocks(build("bigbird", block=4, seed=seed), n)
        b, c = grid(n)
        window, leading = (b - c).abs() <= 1, (c == 0) | (c == n - 1)
        assert table[:, (window | leading)].all()
        drawn = table & ~(window | leading)
        inner = slice(1, n - 1)
        assert (
            drawn[:, inner].sum(-1) == 3
        ).all()  # three others, all different, for all but the global blocks
    counts = sum(bigbird_blocks(build("bigbird", block=4, seed=s), n)[:, 8] for s in range(300)).sum(0)
    free = counts[[c for c in range(n) if c not in (0, 7, 8, 9, n - 1)]].double()
    assert (free / free.mean() - 1).abs().max() < 0.3  # uniform over what is left


def test_bigbird_with_a_window_over_everything_is_softmax():
    q, k, v = qkv(37)
    assert_close(build("bigbird", block=4, window=21)(q, k, v), masked_softmax(q, k, v, past(37, False)))
    assert_close(build("bigbird", block=64)(q, k, v), masked_softmax(q, k, v, past(37, False)))


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
    mixer = build("reformer", buckets=1, chunk=40, rounds=rounds)
    assert_close(mixer(q, k, v, causal=causal), shared_softmax(q, v, past(37, causal)))
    assert_close(
        mixer(q, torch.randn_like(k), v, causal=causal), mixer(q, k, v, causal=causal)
    )  # k is not read


def reformer_pairs(mixer, q):
    """Which pairs meet in some round, by its definition: same bucket, at most `chunk` of the bucket's tokens apart."""
    bucket = mixer.hash(q)  # (B, H, R, N)
    same = bucket[..., :, None] == bucket[..., None, :]
    rank = same.tril().sum(-1)  # a token's number within its bucket
    return (same & ((rank[..., :, None] - rank[..., None, :]).abs() <= mixer.chunk)).any(2)


@both
@pytest.mark.parametrize(
    "options", [{"buckets": 4, "chunk": 5, "rounds": 3}, {"buckets": 8, "chunk": 3, "rounds": 1}]
)
def test_reformer_is_one_softmax_over_all_it_meets(causal, options):
    mixer, (q, k, v) = build("reformer", **options), qkv(37)
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
        mixer = build("reformer", max_length=256, rounds=rounds, buckets=16, chunk=32)
        found = mixers.weights(mixer, q, q) > 0
        recall.append((full * found).sum(-1).mean().item())  # softmax's weight on what was found
    assert recall == sorted(recall)
    assert recall[-1] > recall[0] + 0.3, recall


# polynomial


@both
@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize(("length", "keys"), [(33, 33), (300, 40)])
def test_polynomial_is_its_quadratic_form(causal, degree, length, keys):
    q, k, v = qkv(length, keys)
    i, j = torch.arange(length)[:, None], torch.arange(keys)
    allowed = (j <= i) if causal else torch.ones(length, keys, dtype=torch.bool)
    s = (q @ k.mT / math.sqrt(DIM)) ** degree * allowed / allowed.sum(-1, keepdim=True).sqrt()
    assert_close(build("polynomial", degree=degree)(q, k, v, causal=causal), s @ v)


# positions


def test_rope_depends_on_the_distance_alone_and_turns_as_defined():
    from cosformer.mixers.positions import Rope

    rope, (q, k, _) = Rope(HEADS, DIM, 64), qkv(12)
    pair = torch.view_as_complex(torch.stack(q.chunk(2, -1), -1))
    speed = 10000.0 ** (-2 * torch.arange(DIM // 2).double() / DIM)
    turned = pair * torch.polar(torch.ones(12, 4).double(), torch.arange(12.0).double()[:, None] * speed)
    assert_close(rope.turn(q), torch.cat([turned.real, turned.imag], -1))
    (a, b), (c, d) = rope(q, k), rope(q, k, offset=1000)
    assert_close(a @ b.mT, c @ d.mT)
    assert not torch.allclose(a @ b.mT, q @ k.mT)


def test_rope_with_softmax_is_rotated_softmax():
    from cosformer.mixers.positions import Rope

    q, k, v = qkv(12)
    a, b = Rope(HEADS, DIM, 64)(q, k)
    assert_close(build("softmax", positions="rope")(q, k, v), masked_softmax(a, b, v, past(12, False)))


@pytest.mark.parametrize("name", ["sine_spe", "conv_spe"])
def test_spe_has_its_template_in_the_mean(name):
    from cosformer.mixers.positions import companion

    torch.manual_seed(0)
    spe = companion(name)(HEADS, DIM, 16).double()
    with torch.no_grad():
        for p in spe.parameters():
            p.add_(0.3 * torch.randn_like(p))
    q, k, _ = qkv(10)
    i, j = grid(10)
    wanted = torch.einsum("bhmd,bhnd,hdmn->bhmn", q, k, spe.template(i - j))
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
    q, k = (
        q[:, :, :1].expand_as(q),
        k[:, :, :1].expand_as(k),
    )  # equal tokens: without positions all queries get the same
    assert build("relu")(q, k, v).std(2).max() < 1e-12
    for positions in ("sine_spe", "conv_spe"):
        assert build("relu", positions=positions)(q, k, v).std(2).min() > 1e-3


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
    """Exponents of arithmetic and of the largest tensor made, between two lengths; the mixer is built for each."""
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
