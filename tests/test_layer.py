"""A layer's interior: convolution, norms, mixer and output gate give one result, however a text is fed."""

import math

import pytest
import torch
from conftest import moved, toy_mixer
from judge import value_and_grads
from torch.testing import assert_close

from cosformer import mixers
from cosformer.layer import Interior, ShortConvolution, Tokens
from cosformer.mixers import build
from cosformer.ops.convolution import short_convolution
from cosformer.ops.norm import rms_norm

HEADS, KV_HEADS, DIM, WIDTH, LENGTH = 4, 2, 8, 20, 33
# A mixer of each kind of state: sums, sums scaled by a running maximum, keys and values, a window of them.
STREAMING = ["cosformer", "cosformer-paper", "performer", "softmax+rope", "local"]
streaming = pytest.mark.parametrize("name", STREAMING)


def interior(name="cosformer", *, short_conv=4, qk_norm=True, output_gate=True, **options) -> Interior:
    """A layer of the toy mixer with every option, its weights moved off their initial values, in float64."""
    torch.manual_seed(1)
    around = {"short_conv": short_conv, "qk_norm": qk_norm, "output_gate": output_gate}
    mixer = toy_mixer(name, width=WIDTH)
    return moved(Interior(mixer, kv_heads=KV_HEADS, **around, **options).double(), by=0.3)


def tokens(rows: int = 2, length: int = LENGTH) -> list[torch.Tensor]:
    """x (B, L, WIDTH), q (B, L, H D), k, v (B, L, Hk D)."""
    generator = torch.Generator().manual_seed(2)
    sizes = (WIDTH, HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
    return [torch.randn(rows, length, size, dtype=torch.float64, generator=generator) for size in sizes]


def fed(layer: Interior, given, cuts, state=None, key_mask=None):
    """The output of a stream cut into pieces, and its last state."""
    outs, start = [], 0
    for n in cuts:
        here = slice(start, start + n)
        mask = None if key_mask is None else key_mask[:, here]
        out, state = layer.stream(Tokens(*(t[:, here] for t in given), mask), state)
        outs.append(out)
        start += n
    return torch.cat(outs, 1), state


def same(actual, expected) -> None:
    assert_close(actual, expected, rtol=1e-10, atol=1e-10)


# The convolution


def by_loop(x, weight, *, ahead=0, ends=None):
    """The definition, token by token."""
    ends, rows = [0, x.shape[1]] if ends is None else ends, []
    for begin, end in zip(ends, ends[1:]):
        for t in range(begin, end):
            taps = [s for s in range(weight.shape[1]) if begin <= t + ahead - s < end]
            rows.append(sum(weight[:, s] * x[:, t + ahead - s] for s in taps))
    return torch.stack(rows, 1)


@pytest.mark.parametrize(("length", "ends"), [(1, None), (3, None), (33, None), (20, [0, 2, 3, 3, 11, 20])])
@pytest.mark.parametrize(("width", "ahead"), [(2, 0), (4, 0), (4, 1), (5, 2), (4, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_convolution_is_its_definition(width, ahead, length, ends, dtype):
    """Outputs and gradients, in every dtype; nothing crosses a boundary."""
    rows = 1 if ends else 2
    given = [torch.randn(shape, dtype=dtype) for shape in ((rows, length, 24), (24, width))]
    dout = torch.randn(rows, length, 24, dtype=dtype)
    cu_seqlens = torch.tensor(ends) if ends else None
    exact = [t.double() for t in given]
    want, want_grads = value_and_grads(lambda x, w: by_loop(x, w, ahead=ahead, ends=ends), exact, dout)
    run = lambda x, w: short_convolution(x, w, ahead=ahead, cu_seqlens=cu_seqlens)
    out, grads = value_and_grads(run, given, dout)
    assert out.dtype == dtype
    close = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 8 * torch.finfo(dtype).eps)
    for got, exactly in zip((out, *grads), (want, *want_grads), strict=True):
        assert_close(got.double(), exactly, rtol=close, atol=close * exactly.abs().max().item())


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_lies_behind_a_boundary_may_be_anything(ahead, dtype):
    x, weight = torch.randn(1, 20, 6, dtype=dtype), torch.randn(6, 4, dtype=dtype)
    ends = torch.tensor([0, 3, 11, 20])
    out = short_convolution(x, weight, ahead=ahead, cu_seqlens=ends)
    x[:, 11:] = math.nan
    assert torch.equal(short_convolution(x, weight, ahead=ahead, cu_seqlens=ends)[:, :11], out[:, :11])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("ahead", "streamed"), [(0, False), (0, True), (2, False)])
def test_gradients_of_the_convolution(ahead, streamed, packed):
    if streamed and packed:
        pytest.skip("a stream holds one sequence a row")
    x, weight = torch.randn(1, 9, 3).double().requires_grad_(), torch.randn(3, 4).double().requires_grad_()
    before = torch.randn(1, 3, 3).double().requires_grad_() if streamed else None
    ends = torch.tensor([0, 4, 9]) if packed else None

    def run(x, weight, before):
        return short_convolution(x, weight, ahead=ahead, before=before, cu_seqlens=ends)

    assert torch.autograd.gradcheck(run, (x, weight, before))


@pytest.mark.parametrize("cuts", [(33,), (1,) * 33, (1, 2, 10, 20)], ids=["whole", "tokens", "pieces"])
def test_the_convolution_goes_on_where_it_was(cuts):
    conv, x = moved(ShortConvolution(6, width=4, centred=False)).double(), torch.randn(2, 33, 6).double()
    before, outs = x.new_zeros(2, 3, 6), []
    for piece in x.split(cuts, 1):
        outs.append(conv(piece, before))
        before = torch.cat([before, piece], 1)[:, -3:]
    assert_close(torch.cat(outs, 1), conv(x))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_a_convolution_starts_as_the_identity(width, centred):
    conv, x = ShortConvolution(6, width=width, centred=centred), torch.randn(2, 9, 6)
    assert torch.equal(conv(x), x)
    assert conv.ahead == ((width - 1) // 2 if centred else 0)
    moved(conv)
    assert not torch.equal(conv(x), x)
    conv.reset_parameters()
    assert torch.equal(conv(x), x)


# The norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 7), (3, 5, 33), (2, 700, 4, 16), (2, 0, 8)])
@pytest.mark.parametrize("strided", [False, True])
def test_the_norm_is_its_definition(shape, dtype, strided):
    """Outputs and gradients, in every dtype, of contiguous and strided rows."""

    def definition(x, w):
        return w * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    x, dout = (torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., :: 1 + strided] for _ in range(2))
    x, dout = x[..., : shape[-1]], dout[..., : shape[-1]]
    weight = torch.randn(shape[-1])
    want, want_grads = value_and_grads(definition, [x.double(), weight.double()], dout)
    out, grads = value_and_grads(lambda x, w: rms_norm(x, w, 1e-6), [x, weight], dout)
    assert out.dtype == dtype and grads[1].dtype == torch.float32
    close = {torch.float64: 1e-6, torch.float32: 1e-5}.get(dtype, 2 * torch.finfo(dtype).eps)
    for got, exactly in zip((out, *grads), (want, *want_grads), strict=True):
        size = exactly.abs().max().item() if exactly.numel() else 0.0
        assert_close(got.double(), exactly, rtol=close, atol=close * size)


def test_a_norm_of_nothing_but_zeros_is_zero_and_nan_stays():
    x = torch.zeros(2, 40, requires_grad=True)
    out = rms_norm(x, torch.ones(40), 1e-6)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, x) and grad.isfinite().all()
    assert rms_norm(torch.tensor([[1.0, math.nan], [3.0, 4.0]]), torch.ones(2), 1e-6).isnan().tolist() == [
        [True, True],
        [False, False],
    ]


# Whole sequences


def test_the_interior_is_what_it_says():
    layer, (x, q, k, v) = interior(), tokens()
    out = layer(Tokens(x, q, k, v), causal=True)

    def heads(t):
        return t.unflatten(-1, (-1, DIM)).transpose(1, 2)

    def normed(t, norm):
        return t * (t.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight

    q, k, v = (heads(by_loop(t, layer.conv[name].weight)) for name, t in (("q", q), ("k", k), ("v", v)))
    mixed = layer.mixer(normed(q, layer.q_norm), normed(k, layer.k_norm), v, x=x, causal=True)
    mixed = mixed.transpose(1, 2).flatten(2)
    same(out, mixed * torch.sigmoid(x @ layer.gate.weight.T + layer.gate.bias))


def test_a_mixer_says_what_it_wants_and_the_layer_has_the_last_word():
    def parts(name, **given):
        layer = Interior(toy_mixer(name), **given)
        return layer.conv is not None, layer.q_norm is not None, layer.gate is not None

    assert parts("cosformer") == parts("cosformer-ladder") == (True, True, False)
    assert parts("cosformer-paper") == parts("softmax") == (False, False, False)
    assert parts("cosformer", short_conv=0, qk_norm=False) == (False, False, False)
    assert parts("softmax", short_conv=3, qk_norm=True, output_gate=True) == (True, True, True)


def test_a_new_layer_is_its_mixer():
    """Initially the convolution and the norms' weights change nothing, and the output gate halves."""
    layer = Interior(
        toy_mixer("elu", width=WIDTH), kv_heads=KV_HEADS, short_conv=4, output_gate=True
    ).double()
    plain = Interior(toy_mixer("elu", width=WIDTH), kv_heads=KV_HEADS).double()
    given = Tokens(*tokens())
    same(layer(given, causal=True), plain(given, causal=True) / 2)


@pytest.mark.parametrize("centred", [False, True])
def test_gradients_reach_everything(centred):
    layer, given = interior(centred=centred), [t.requires_grad_() for t in tokens(1, 7)]
    layer.double()
    out = layer(Tokens(*given), causal=not centred)
    direction = torch.randn_like(out)
    leaves = [*given, *layer.parameters()]
    grads = torch.autograd.grad((out * direction).sum(), leaves)
    for leaf, grad in zip(leaves, grads, strict=True):
        move, ends = torch.randn_like(leaf), []
        with torch.no_grad():
            for sign in (1, -1):
                leaf.add_(move, alpha=sign * 1e-6)
                ends.append((layer(Tokens(*given), causal=not centred) * direction).sum())
                leaf.sub_(move, alpha=sign * 1e-6)
        assert_close((ends[0] - ends[1]) / 2e-6, (grad * move).sum(), rtol=1e-4, atol=1e-5)
        assert grad.abs().max() > 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_alone(side, causal):
    layer, given = interior(centred=not causal), tokens()
    here = slice(5, None) if side == "left" else slice(0, 28)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1] = False
    mask[1, here] = True
    alone = layer(Tokens(*(t[1:, here] for t in given)), causal=causal)
    for t in given:
        t[1][~mask[1]] = math.nan
    same(layer(Tokens(*given, mask), causal=causal)[1:, here], alone)


@pytest.mark.parametrize("name", ["cosformer", "softmax+rope", "elu"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_never_cross_a_boundary(name, causal):
    """The rows are laid end to end: a sequence may even continue in the next row."""
    layer, given = interior(name, centred=not causal), tokens()
    ends = torch.tensor([0, 5, 6, LENGTH + 4, 2 * LENGTH])
    out = layer(Tokens(*given), causal=causal, cu_seqlens=ends)
    assert out.shape == (2, LENGTH, HEADS * DIM)
    flat = [t.flatten(0, 1)[None] for t in given]
    pieces = [layer(Tokens(*(t[:, a:b] for t in flat)), causal=causal) for a, b in zip(ends, ends[1:])]
    same(out.flatten(0, 1), torch.cat(pieces, 1)[0])


# Streams


@streaming
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cuts", [(33,), (1,) * 33, (1, 2, 10, 20)], ids=["whole", "tokens", "pieces"])
def test_streamed_equals_whole(name, cuts, padded):
    layer, given = interior(name), tokens()
    mask = torch.arange(LENGTH) >= torch.tensor([0, 5])[:, None] if padded else None
    whole = layer(Tokens(*given, mask), causal=True)
    out, state = fed(layer, given, cuts, key_mask=mask)
    assert state.position == LENGTH
    same(out, whole)
    if padded:
        same(out[1:, 5:], layer(Tokens(*(t[1:, 5:] for t in given)), causal=True))


@streaming
def test_a_stream_can_be_reordered_for_beams(name):
    layer, given, order = interior(name), tokens(), torch.tensor([1, 1, 0])
    _, state = fed(layer, given, [9])
    out, _ = fed(layer, [t[order, 9:] for t in given], [1, LENGTH - 10], state.index_select(order))
    same(out, layer(Tokens(*given), causal=True)[order, 9:])


@pytest.mark.parametrize("name", [n for n in STREAMING if "softmax" not in n])
def test_a_state_does_not_grow(name):
    layer = Interior(build(name, heads=HEADS, head_dim=DIM, max_length=512, width=WIDTH), kv_heads=KV_HEADS)
    layer.double()
    if name == "local":
        layer.mixer.window = 8
    shapes = []
    for length in (16, 64, 300):
        _, state = fed(layer, tokens(1, length), [length])
        inner = [t.shape for t in vars(state.mixer).values() if isinstance(t, torch.Tensor)]
        shapes.append((inner, [t.shape for t in state.last]))
    assert shapes[0] == shapes[1] == shapes[2]


@streaming
def test_a_state_is_never_changed_in_place(name):
    layer, given = interior(name), tokens()
    _, state = fed(layer, given, [9])
    rest = [t[:, 9:] for t in given]
    same(fed(layer, rest, [1] * 24, state)[0], fed(layer, rest, [24], state)[0])


def test_a_centred_layer_does_not_stream():
    with pytest.raises(ValueError, match="looks ahead, so it cannot stream; make it with centred=False"):
        interior(centred=True).stream(Tokens(*tokens()), None)


@pytest.mark.parametrize("name", [n for n in mixers.names() if toy_mixer(n).streaming is not True])
def test_what_keeps_no_state_says_why(name):
    layer = Interior(toy_mixer(name, width=WIDTH), kv_heads=KV_HEADS).double()
    with pytest.raises(ValueError, match=f"mixer '{name}' does not do a stream: it keeps no decode state"):
        layer.stream(Tokens(*tokens()), None)


@pytest.mark.parametrize("given", [1, -2, 2.0, True, "four"])
def test_a_width_that_makes_no_sense_is_refused(given):
    with pytest.raises(ValueError, match=f"short_conv must be a width of 2 or more tokens, .* got {given!r}"):
        Interior(toy_mixer("cosformer"), short_conv=given)
