"""The contract every mixer keeps, over names(): a mixer in a new file is held to it with no edit here."""

import copy

import pytest
import torch
from torch.testing import assert_close

from cosformer import mixers

HEADS, DIM, MAX = 4, 8, 64
# Options under which a pattern, rank or hash does something at these lengths; a mixer not named here is tested as it comes.
VARIANTS = {
    "bigbird": [{"block": 4, "random": 1}],
    "cosformer": [{"decay": "ladder"}, {"horizon": 100.5}],
    "linformer": [{"rank": 8}],
    "local": [{"window": 3, "globals": 2}, {"window": 1}],
    "nystrom": [{"landmarks": 6}, {"conv": None}],
    "performer": [{"features": 32}],
    "polynomial": [{"degree": 2}],
    "reformer": [{"chunk": 8, "buckets": 4, "rounds": 3}],
    "rfa": [{"gate": True}],
    "sparse": [{"stride": 5, "columns": 2}, {"pattern": "strided", "stride": 4}],
}
COMPANIONS = [
    ("local", {"positions": "rope"}),
    ("performer", {"positions": "sine_spe"}),
    ("relu", {"positions": "conv_spe"}),
]
CASES = [(name, options) for name in mixers.names() for options in [{}, *VARIANTS.get(name, [])]] + COMPANIONS
# Patterns that count positions from the first row: padding on the left moves them.
RIGHT_PADDING_ONLY = {"bigbird", "linformer", "local", "sparse"}

every = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Calls this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name, options, **more):
    torch.manual_seed(1)
    return mixers.build(name, heads=HEADS, head_dim=DIM, max_length=MAX, **options, **more)


def qkv(length, *, keys=None, heads=HEADS, size=DIM, batch=2, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    keys = length if keys is None else keys
    q, k = (
        torch.randn(batch, HEADS, length, DIM, dtype=dtype),
        torch.randn(batch, heads, keys, DIM, dtype=dtype),
    )
    return q, k, torch.randn(batch, heads, keys, size, dtype=dtype)


def modes(mixer):
    return [causal for causal in (False, True) if (mixer.causal if causal else mixer.bidirectional) is True]


def call(mixer, q, k, v, **options):
    return mixer.to(q.dtype)(q, k, v, **options)


@every
@pytest.mark.parametrize(("length", "size"), [(1, DIM), (7, 5), (33, DIM)])
def test_shape_and_finite(name, options, length, size):
    mixer = build(name, options)
    assert modes(mixer), "a mixer must do something"
    for causal in modes(mixer):
        q, k, v = qkv(length, size=size, dtype=torch.float32)
        out = mixer(q, k, v, causal=causal)
        assert out.shape == (2, HEADS, length, size)
        assert out.isfinite().all()


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_kept_and_rounding_is_small(name, options, dtype):
    mixer = build(name, options)
    for causal in modes(mixer):
        q, k, v = qkv(20)
        out = mixer(q.to(dtype), k.to(dtype), v.to(dtype), causal=causal)
        assert out.dtype == dtype
        assert out.isfinite().all()
        if dtype == torch.float32 and name not in (
            "identity",
            "reformer",
        ):  # a sum near zero, a hash at a boundary: no bound
            assert_close(
                out.double(), call(copy.deepcopy(mixer), q, k, v, causal=causal), atol=2e-3, rtol=2e-3
            )


@every
def test_grouped_heads_are_repeated_heads(name, options):
    mixer = build(name, options)
    for causal in modes(mixer):
        q, k, v = qkv(19, heads=2)
        whole = call(mixer, q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), causal=causal)
        assert_close(call(mixer, q, k, v, causal=causal), whole)


@every
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_causal_output_ignores_the_future(name, options, scale):
    mixer = build(name, options)
    if mixer.causal is not True:
        pytest.skip(mixer.causal)
    q, k, v = qkv(33)
    before = call(mixer, q, k, v, causal=True)
    for cut in (1, 8, 20, 32):
        changed = [torch.cat([x[:, :, :cut], scale * torch.randn_like(x[:, :, cut:])], 2) for x in (q, k, v)]
        after = call(mixer, *changed, causal=True)
        assert_close(after[:, :, :cut], before[:, :, :cut])
        assert not torch.allclose(after[:, :, cut:], before[:, :, cut:])


@every
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_equals_unpadded(name, options, side):
    mixer = build(name, options)
    if side == "left" and (name in RIGHT_PADDING_ONLY or mixer.positions is not None):
        pytest.skip("its pattern counts positions from the first row")
    for causal in modes(mixer):
        q, k, v = qkv(21)
        here = slice(0, 21) if side == "right" else slice(9, 30)
        padded = [torch.full((2, HEADS, 30, DIM), float("nan"), dtype=q.dtype) for _ in range(3)]
        for x, y in zip(padded, (q, k, v), strict=True):
            x[:, :, here] = y
        mask = torch.zeros(2, 30, dtype=torch.bool)
        mask[:, here] = True
        out = call(mixer, *padded, causal=causal, key_mask=mask)
        assert_close(out[:, :, here], call(mixer, q, k, v, causal=causal))


@every
def test_a_row_without_keys_is_zero_and_harmless(name, options):
    mixer = build(name, options)
    for causal in modes(mixer):
        q, k, v = (x.requires_grad_() for x in qkv(13))
        mask = torch.ones(2, 13, dtype=torch.bool)
        mask[1] = False
        out = call(mixer, q, k, v, causal=causal, key_mask=mask)
        assert_close(out[1], torch.zeros_like(out[1]))
        assert_close(out[0], call(mixer, q[:1], k[:1], v[:1], causal=causal)[0])
        out.sum().backward()
        assert all(x.grad is None or x.grad.isfinite().all() for x in (q, k, v, *mixer.parameters()))


@every
def test_batch_rows_are_independent(name, options):
    mixer = build(name, options)
    for causal in modes(mixer):
        q, k, v = qkv(21, batch=3)
        out = call(mixer, q, k, v, causal=causal)
        for row in range(3):
            alone = slice(row, row + 1)
            assert_close(out[alone], call(mixer, q[alone], k[alone], v[alone], causal=causal))


@every
def test_gradients_are_those_of_finite_differences(name, options):
    mixer = build(name, options).double()
    for causal in modes(mixer):
        inputs = [x.requires_grad_() for x in qkv(9, batch=1)]
        out = mixer(*inputs, causal=causal)
        direction = torch.randn_like(out)
        wanted = (*inputs, *mixer.parameters())
        grads = torch.autograd.grad((out * direction).sum(), wanted, allow_unused=True)
        for label, grad in zip("qkv", grads, strict=False):
            assert grad is None if label in mixer.unread else grad.norm() > 1e-3, label
        step = 1e-6
        for x, grad in zip(wanted, grads, strict=True):
            if grad is None:
                continue
            move = torch.randn_like(x)
            with torch.no_grad():
                ends = []
                for sign in (1, -1):
                    x.add_(move, alpha=sign * step)
                    ends.append((mixer(*inputs, causal=causal) * direction).sum())
                    x.sub_(move, alpha=sign * step)
            assert_close((ends[0] - ends[1]) / (2 * step), (grad * move).sum(), rtol=1e-4, atol=1e-5)


@every
def test_the_same_seed_gives_the_same_mixer(name, options):
    q, k, v = qkv(21)
    for causal in modes(build(name, options)):
        outs = [call(build(name, options), q, k, v, causal=causal) for _ in range(2)]
        assert_close(*outs, rtol=0, atol=0)


@every
def test_save_and_load(name, options):
    saved = build(name, options)
    if "seed" in mixers.options(name):
        other = build(name, options, seed=7)
        assert not all(
            torch.equal(a, b)
            for a, b in zip(saved.state_dict().values(), other.state_dict().values(), strict=True)
        )
    else:
        torch.manual_seed(2)
        other = mixers.build(name, heads=HEADS, head_dim=DIM, max_length=MAX, **options)
    other.load_state_dict(saved.state_dict())
    q, k, v = qkv(21)
    for causal in modes(saved):
        assert_close(call(other, q, k, v, causal=causal), call(saved, q, k, v, causal=causal), rtol=0, atol=0)


@every
def test_redraw(name, options):
    mixer = build(name, options)
    if not hasattr(mixer, "redraw"):
        pytest.skip("it draws nothing")
    before = {key: x.clone() for key, x in mixer.state_dict().items()}
    mixer.redraw()
    assert any(not torch.equal(before[key], x) for key, x in mixer.state_dict().items())
    mixer.redraw(0)
    assert all(torch.equal(before[key], x) for key, x in mixer.state_dict().items())


@every
@pytest.mark.parametrize("cuts", [(33,), (1,) * 33, (1, 7, 20, 5)], ids=["whole", "tokens", "pieces"])
def test_streamed_equals_whole(name, options, cuts):
    mixer = build(name, options).double()
    if mixer.streaming is not True:
        with pytest.raises(ValueError, match=f"{name}.*{mixer.streaming}"):
            mixer.stream(*qkv(3))
        assert mixer.state_size() is None
        return
    for heads in (HEADS, 2):
        q, k, v = qkv(33, heads=heads)
        mask = torch.rand(2, 33) > 0.2
        mask[0, :9] = False  # a stream may begin with padding
        for key_mask in (None, mask):
            state, outs, start = None, [], 0
            for n in cuts:
                piece = slice(start, start + n)
                kept = None if key_mask is None else key_mask[:, piece]
                out, state = mixer.stream(
                    q[:, :, piece], k[:, :, piece], v[:, :, piece], state, key_mask=kept
                )
                outs.append(out)
                start += n
                assert state.position == start
            assert_close(torch.cat(outs, 2), mixer(q, k, v, causal=True, key_mask=key_mask))
    assert mixer.state_size() > 0


@every
def test_a_stream_can_be_reordered_for_beams(name, options):
    mixer = build(name, options).double()
    if mixer.streaming is not True:
        pytest.skip(mixer.streaming)
    q, k, v = qkv(12)
    _, state = mixer.stream(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    order = torch.tensor([1, 1, 0])
    out, _ = mixer.stream(*(x[order, :, 9:] for x in (q, k, v)), state.index_select(order))
    assert_close(out, mixer(q, k, v, causal=True)[order, :, 9:])


@every
def test_refusals_carry_the_reason(name, options):
    mixer = build(name, options)
    q, k, v = qkv(12, dtype=torch.float32)
    for causal, declared in ((False, mixer.bidirectional), (True, mixer.causal)):
        if declared is not True:
            assert len(declared) > 20
            with pytest.raises(ValueError, match=f"{name}.*{declared}"):
                mixer(q, k, v, causal=causal)
    if mixer.cross is not True:
        assert len(mixer.cross) > 20
        with pytest.raises(ValueError, match=f"{name}.*{mixer.cross}"):
            mixer(q, k[:, :, :5], v[:, :, :5], causal=modes(mixer)[0])


@every
@pytest.mark.parametrize(("length", "keys"), [(7, 20), (20, 7), (1, 9)])
def test_cross_attention_adds_up(name, options, length, keys):
    """Other lengths of keys: one query's answer does not depend on the number of queries, and masked keys may be cut off."""
    mixer = build(name, options)
    if mixer.cross is not True:
        pytest.skip(mixer.cross)
    for causal in modes(mixer):
        q, k, v = qkv(length, keys=keys)
        out = call(mixer, q, k, v, causal=causal)
        assert out.shape == (2, HEADS, length, DIM)
        assert_close(out[:, :, :1], call(mixer, q[:, :, :1], k, v, causal=causal))
        mask = torch.arange(keys).expand(2, -1) < 5
        assert_close(
            call(mixer, q, k, v, causal=causal, key_mask=mask),
            call(mixer, q, k[:, :, :5], v[:, :, :5], causal=causal),
        )


@every
def test_weights_are_what_the_mixer_does(name, options):
    mixer = build(name, options).double()
    for causal in modes(mixer):
        q, k, v = qkv(17)
        matrix = mixers.weights(mixer, q, k, causal=causal)
        assert matrix.shape == (2, HEADS, 17, 17)
        assert_close(matrix @ v, mixer(q, k, v, causal=causal))
        if causal:
            assert (matrix.triu(1) == 0).all()


def test_unknown_names_and_options_are_refused_with_what_is_accepted():
    sizes = {"heads": 2, "head_dim": 4, "max_length": 8}
    with pytest.raises(ValueError, match=r"unknown mixer 'sofmax'; one of bigbird, cosformer"):
        mixers.build("sofmax", **sizes)
    with pytest.raises(ValueError, match=r"'performer' has no option 'feature'; it accepts features, seed"):
        mixers.build("performer", feature=3, **sizes)
    with pytest.raises(ValueError, match=r"heads must be an int of at least 1; got 0"):
        mixers.build("softmax", **{**sizes, "heads": 0})
    with pytest.raises(ValueError, match=r"positions 'alibi' is unknown; one of rope"):
        mixers.build("softmax", positions="alibi", **sizes)
    with pytest.raises(ValueError, match=r"'cosformer' does not do positions='rope': its re-weighting is"):
        mixers.build("cosformer", positions="rope", **sizes)
    with pytest.raises(ValueError, match=r"q must have 2 heads of size 4"):
        mixers.build("softmax", **sizes)(*(torch.randn(1, 2, 3, 5) for _ in range(3)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bigbird", {"window": 2}),
        ("cosformer", {"decay": [0.1]}),
        ("cosformer", {"decay": "steps"}),
        ("linformer", {"rank": 0}),
        ("local", {"window": -1}),
        ("nystrom", {"conv": 4}),
        ("performer", {"features": 0}),
        ("polynomial", {"degree": 0.5}),
        ("reformer", {"buckets": 3}),
        ("rfa", {"sigma": 0}),
        ("sparse", {"pattern": "diagonal"}),
        ("sparse", {"stride": 4, "columns": 5}),
    ],
)
def test_bad_options_are_named(name, options):
    with pytest.raises(ValueError, match="|".join(options)):
        build(name, options)


def test_a_name_belongs_to_one_class():
    with pytest.raises(
        ValueError, match=r"mixer 'softmax' is already registered by cosformer.mixers.softmax.Softmax"
    ):
        mixers.register("softmax")(type("Other", (mixers.Mixer,), {}))
