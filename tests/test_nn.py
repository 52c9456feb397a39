"""MixerAttention and CosformerAttention: nn.MultiheadAttention's call and weights, torch's own layers."""

import math

import pytest
import torch
from conftest import moved
from torch import nn
from torch.testing import assert_close

from cosformer import CosformerAttention, MixerAttention, mixers, reference
from cosformer.decay import ladder
from cosformer.layer import LayerState, Tokens


def by_hand(module, query, key, value, *, causal=False, horizon=50, decay=None):
    """The module written out with the definition; batch first."""
    q, k, v = module.interior.heads(
        Tokens(query, module.q_proj(query), module.k_proj(key), module.v_proj(value))
    )
    out = reference.attention(q, k, v, horizon=horizon, causal=causal, decay=decay)
    return module.out_proj(out.transpose(1, 2).flatten(2))


def attention(**options) -> CosformerAttention:
    return moved(CosformerAttention(32, 4, batch_first=True, **{"horizon": 50, **options}))


def ignored(length: int = 20) -> torch.Tensor:
    """The padding of two rows, the second with 12 tokens."""
    return torch.arange(length) >= torch.tensor([length, 12])[:, None]


# What is computed


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_with_softmax_it_is_multihead_attention(batch_first, bias):
    sizes = {"bias": bias, "kdim": 12, "vdim": 10, "batch_first": batch_first}
    theirs, ours = nn.MultiheadAttention(16, 4, **sizes), MixerAttention(16, 4, **sizes, mixer="softmax")
    ours.load_state_dict(moved(theirs).state_dict())
    q, k, v = torch.randn(2, 7, 16), torch.randn(2, 9, 12), torch.randn(2, 9, 10)
    if not batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    ignore = torch.rand(2, 9) < 0.3
    out, weights = ours(q, k, v, key_padding_mask=ignore, need_weights=True)
    expected, expected_weights = theirs(q, k, v, key_padding_mask=ignore)
    assert_close(out, expected)
    assert_close(weights, expected_weights)
    assert ours(q, k, v)[1] is None


@pytest.mark.parametrize("name", mixers.names())
def test_every_mixer_trains_in_it(name):
    module = MixerAttention(
        16, 4, mixer=name, max_length=20, num_kv_heads=2, output_gate=True, batch_first=True
    )
    mixer, x = module.interior.mixer, torch.randn(2, 20, 16)
    out, _ = moved(module)(x, x, x, is_causal=mixer.causal is True)
    out.square().sum().backward()
    assert out.shape == x.shape
    for part, p in module.named_parameters():
        if not (part.startswith("k_proj") and "k" in mixer.unread):
            assert p.grad is not None, part
            assert p.grad.isfinite().all(), part


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("decay", [None, [0.1, 0.2, 0.3, 0.0]], ids=["paper", "rates"])
def test_equals_the_definition(kv_heads, causal, decay):
    module = attention(num_kv_heads=kv_heads, decay=decay).double()
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    out, weights = module(x, x, x, is_causal=causal)
    rates = None if decay is None else torch.tensor(decay)
    assert weights is None
    assert_close(out, by_hand(module, x, x, x, causal=causal, decay=rates), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_gated_rates_are_those_of_the_formula(causal, kv_heads):
    """Outputs, weights, and the gradients of every parameter and the input."""
    module = attention(num_kv_heads=kv_heads, decay="gated").double()
    x = torch.randn(2, 20, 32, dtype=torch.float64, requires_grad=True)
    leaves, gate = [x, *module.parameters()], module.interior.mixer.decay.gate
    rates = (torch.exp(x @ gate.weight.T + gate.bias) * torch.tensor(ladder(4, 50))).transpose(1, 2)
    expected = by_hand(module, x, x, x, causal=causal, decay=rates)
    out, weights = module(x, x, x, is_causal=causal, need_weights=True, average_attn_weights=False)
    assert_close(out, expected)
    v = module.interior.heads(Tokens(x, module.q_proj(x), module.k_proj(x), module.v_proj(x)))[2]
    mixed = (weights @ v.repeat_interleave(4 // kv_heads, 1)).transpose(1, 2).flatten(2)
    assert_close(module.out_proj(mixed), expected)
    got, want = (torch.autograd.grad(y.square().sum(), leaves) for y in (out, expected))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
        assert a.abs().max() > 0


def test_cross_attention_with_other_sizes():
    module = CosformerAttention(32, 4, kdim=10, vdim=12, horizon=50)
    query, key, value = torch.randn(7, 2, 32), torch.randn(20, 2, 10), torch.randn(20, 2, 12)
    expected = by_hand(module, *(x.transpose(0, 1) for x in (query, key, value)))
    assert_close(module(query, key, value)[0], expected.transpose(0, 1))


@pytest.mark.parametrize("decay", [None, "gated"])
@pytest.mark.parametrize("sequence_first", [False, True])
def test_padding_mask_means_ignore(decay, sequence_first):
    module, x = attention(decay=decay, output_gate=True), torch.randn(2, 20, 32)
    row = x[1, :12]
    alone, _ = module(row, row, row)
    x[1, 12:] = math.nan
    module.batch_first = not sequence_first
    x = x.transpose(0, 1) if sequence_first else x
    out, _ = module(x, x, x, key_padding_mask=ignored())
    assert_close((out.transpose(0, 1) if sequence_first else out)[1, :12], alone)
    as_float = torch.zeros(2, 20).masked_fill(ignored(), -math.inf)
    assert_close(module(x, x, x, key_padding_mask=as_float)[0], out, rtol=0, atol=0, equal_nan=True)


def test_weights():
    module = CosformerAttention(128, 4, num_kv_heads=2, horizon=50, batch_first=True)
    x = torch.randn(2, 20, 128)
    out, weights = module(x, x, x, is_causal=True, need_weights=True, average_attn_weights=False)
    assert weights.shape == (2, 4, 20, 20)
    assert (weights.triu(1) == 0).all()
    assert_close(weights.sum(-1), torch.ones(2, 4, 20))
    v = module.v_proj(x).unflatten(-1, (2, 32)).transpose(1, 2).repeat_interleave(2, 1)
    assert_close(module.out_proj((weights @ v).transpose(1, 2).flatten(2)), out)
    averaged = module(x, x, x, is_causal=True, need_weights=True)[1]
    assert_close(averaged, weights.mean(1))


def test_unbatched_and_sequence_first():
    module = CosformerAttention(32, 4, horizon=50)
    x = torch.randn(20, 2, 32)
    out, weights = module(x, x, x, need_weights=True)
    alone, alone_weights = module(x[:, 1], x[:, 1], x[:, 1], need_weights=True)
    assert_close(out[:, 1], alone)
    assert_close(weights[1], alone_weights)


@pytest.mark.parametrize("learn", [False, True])
def test_rates_and_horizons_in_any_form(learn):
    x = torch.randn(9, 2, 32)
    made = CosformerAttention(32, 4, horizon=50, decay=0.25, learn_decay=learn)
    forms = [
        ([0.25] * 4, [50] * 4),
        (torch.full((4,), 0.25), torch.tensor(50)),
        (torch.tensor(0.25), torch.full((4,), 50)),
    ]
    for decay, horizon in forms:
        other = CosformerAttention(32, 4, horizon=horizon, decay=decay, learn_decay=learn)
        other.load_state_dict(made.state_dict())
        assert torch.equal(other(x, x, x)[0], made(x, x, x)[0])


@pytest.mark.parametrize(
    ("horizon", "span"), [(50, 50), ([20.5, 30, 40.5, math.inf], 40.5), (math.inf, 4096), (None, 4096)]
)
def test_a_gate_starts_as_the_ladder(horizon, span):
    module = CosformerAttention(32, 4, decay="gated", horizon=horizon)
    plain = CosformerAttention(32, 4, decay=ladder(4, span), horizon=horizon)
    plain.load_state_dict(module.state_dict(), strict=False)
    x = torch.randn(9, 2, 32)
    assert_close(module(x, x, x)[0], plain(x, x, x)[0])


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_stream_is_the_whole(batch_first):
    module = attention(decay="gated", output_gate=True).double()
    module.batch_first = batch_first
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    x[1, :3] = math.nan
    left = torch.arange(20) < torch.tensor([0, 3])[:, None]
    tokens, state, outs = 0 if not batch_first else 1, None, []
    x = x if batch_first else x.transpose(0, 1)
    whole, _ = module(x, x, x, is_causal=True, key_padding_mask=left)
    for piece, ignore in zip(x.split([7, 1, 12], dim=tokens), left.split([7, 1, 12], dim=1)):
        out, state = module.stream(piece, state, key_padding_mask=ignore)
        outs.append(out)
    assert state.position == 20
    assert_close(torch.cat(outs, tokens), whole, equal_nan=True)


# Other people's weights


@pytest.mark.parametrize("sizes", [{}, {"kdim": 10, "vdim": 12}])
def test_loads_multihead_attention(sizes):
    theirs = moved(nn.MultiheadAttention(32, 4, batch_first=True, **sizes))
    ours = CosformerAttention(32, 4, batch_first=True, horizon=50, **sizes)
    ours.load_state_dict(theirs.state_dict())
    x, key, value = torch.randn(2, 9, 32), torch.randn(2, 9, ours.kdim), torch.randn(2, 9, ours.vdim)
    weight = theirs.in_proj_weight.chunk(3)[1] if not sizes else theirs.k_proj_weight
    assert_close(ours.k_proj(key), key @ weight.T + theirs.in_proj_bias.chunk(3)[1])
    assert ours(x, key, value)[0].shape == (2, 9, 32)


def test_loads_the_official_file():
    """Its parameters are q_proj, k_proj, v_proj, out_proj; its horizon is the length of the call."""
    official = {f"{n}_proj.weight": torch.randn(32, 32) for n in ("q", "k", "v", "out")}
    official |= {f"{n}_proj.bias": torch.randn(32) for n in ("q", "k", "v", "out")}
    ours, x = CosformerAttention(32, 4), torch.randn(11, 2, 32)
    ours.load_state_dict(official)
    want = by_hand(ours, *(x.transpose(0, 1),) * 3, horizon=11).transpose(0, 1)
    assert_close(ours(x, x, x)[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 10, "vdim": 12}])
@pytest.mark.parametrize(
    "made", [{"decay": "gated", "output_gate": True}, {"decay": 0.5, "learn_decay": True}]
)
def test_the_interior_keeps_its_start_under_the_weights_of_multihead_attention(made, sizes):
    layer = nn.ModuleDict({"attention": CosformerAttention(32, 4, horizon=50, **made, **sizes)})
    start = {n: p.clone() for n, p in layer.named_parameters() if ".interior." in n}
    layer.load_state_dict(nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4, **sizes)}).state_dict())
    assert start and all(torch.equal(p, layer.get_parameter(n)) for n, p in start.items())
    own = layer.state_dict()
    projections = {f"attention.{p}_proj.{n}" for p in ("q", "k", "v", "out") for n in ("weight", "bias")}
    assert set(own) == projections | set(start)
    layer.load_state_dict(own)
    own.pop(next(iter(start)))
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict(own)


# Inside stock layers, compiled


@pytest.mark.parametrize("decay", [None, "gated"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_inside_stock_encoder_layer(training, norm_first, decay):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    layer.train(training).self_attn = attention(decay=decay)
    x, causal = torch.randn(2, 20, 32), torch.ones(20, 20, dtype=torch.bool).triu(1)
    with torch.set_grad_enabled(training):
        out = layer(x, src_mask=causal, src_key_padding_mask=ignored(), is_causal=True)
        assert_close(layer(x, src_key_padding_mask=ignored())[1:, :12], layer(x[1:, :12]))
        changed = x.clone()
        changed[:, 10:] += 1
        again = layer(changed, src_mask=causal)
    assert_close(again[:1, :10], out[:1, :10])
    assert not torch.allclose(again[:1, 10:], out[:1, 10:])


def test_inside_stock_decoder_layer_and_stack():
    layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    layer.self_attn, layer.multihead_attn = attention(), attention()
    decoder = nn.TransformerDecoder(layer, 2)
    memory, x = torch.randn(2, 15, 32), torch.randn(2, 20, 32)
    out = decoder(x, memory, tgt_mask=nn.Transformer.generate_square_subsequent_mask(20), tgt_is_causal=True)
    prefix = decoder(x[:, :8], memory, tgt_mask=nn.Transformer.generate_square_subsequent_mask(8))
    assert_close(out[:, :8], prefix)
    encoder_layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder_layer.self_attn = CosformerAttention(32, 4, batch_first=True)
    encoder = nn.TransformerEncoder(encoder_layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        assert encoder(x).shape == x.shape


@pytest.mark.parametrize("decay", [None, "gated"])
def test_compiles(decay):
    torch._dynamo.reset()
    module, x = attention(decay=decay), torch.randn(2, 20, 32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, x, x, is_causal=True)[0], module(x, x, x, is_causal=True)[0])


def test_a_compiled_module_refuses_a_bias_as_padding():
    torch._dynamo.reset()
    module, x, mask = attention(), torch.randn(2, 20, 32), torch.zeros(2, 20)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    mask[1, 12:] = -math.inf
    expected = module(x, x, x, key_padding_mask=mask)[0]
    assert_close(compiled(x, x, x, key_padding_mask=mask)[0], expected)
    mask[1, 12:] = -1e9
    for called, error in ((module, ValueError), (compiled, RuntimeError)):
        with pytest.raises(error, match="key_padding_mask of a float dtype may hold 0 and -inf only"):
            called(x, x, x, key_padding_mask=mask)


# Refusals


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("embed_dim must be a positive multiple of num_heads; got 32 and 5", {"num_heads": 5}),
        ("num_heads must be a multiple of num_kv_heads; got 4 and 3", {"num_kv_heads": 3}),
        ("dropout is 0.1: attention weights are never formed", {"dropout": 0.1}),
        ("add_bias_kv and add_zero_attn are not supported", {"add_bias_kv": True}),
        (
            r"decay must be one rate, or one per head \(4\), finite and 0 or more; got \[0.1\]",
            {"decay": [0.1]},
        ),
        (r"decay must be one rate, .* got \[0.5, 0.5, 0.5\]", {"decay": torch.full((3,), 0.5)}),
        ("decay must be one rate, .* got nan", {"decay": math.nan}),
        ("decay must be above 0 if it is learned, .* got 0", {"decay": 0, "learn_decay": True}),
        ("learn_decay needs constant rates to start from, .*; decay is None", {"learn_decay": True}),
        ("learn_decay needs constant .*; decay is 'gated'", {"decay": "gated", "learn_decay": True}),
        (r'decay must be None, "ladder", "gated", one rate, .* \(4\); got .gate.', {"decay": "gate"}),
        ("horizon must be greater than 0; got -1", {"horizon": -1}),
        (r"horizon must be one number or one per head \(4\); got 2 numbers", {"horizon": [1, 2]}),
        ("backend 'natvie' is unknown; one of 'native', 'triton', 'torch'", {"backend": "natvie"}),
        ("eps must be at least 1.17549e-38", {"eps": 0.0}),
        ("short_conv must be a width of 2 or more tokens, or 0 for none; got 1", {"short_conv": 1}),
        ("short_conv must be a width of 2 or more .* got True", {"short_conv": True}),
        ("qk_norm must be True or False, or None; got 'no'", {"qk_norm": "no"}),
        ("output_gate must be True or False, or None; got 'no'", {"output_gate": "no"}),
    ],
)
def test_constructor_errors(match, change):
    with pytest.raises(ValueError, match=match):
        CosformerAttention(32, **{"num_heads": 4, **change})


@pytest.mark.parametrize(
    ("match", "change"),
    [
        (r"got a torch.float32 tensor of shape \(2, 4, 9\)", {"decay": torch.rand(2, 4, 9)}),
        ("decay must be one rate, .* got bool True", {"decay": True}),
        ("horizon must be a number, or one per head; got str 'long'", {"horizon": "long"}),
        ("unexpected keyword argument 'window'", {"window": 3}),
        ("embed_dim must be an int; got str '32'", {"embed_dim": "32"}),
        ("num_heads must be an int; got float 4.0", {"num_heads": 4.0}),
        ("num_kv_heads must be an int; got float 2.0", {"num_kv_heads": 2.0}),
        ("kdim must be an int; got str '9'", {"kdim": "9"}),
    ],
)
def test_constructor_type_errors(match, change):
    with pytest.raises(TypeError, match=match):
        CosformerAttention(**{"embed_dim": 32, "num_heads": 4, **change})


def test_options_reach_the_mixer_and_bad_ones_are_named():
    module = MixerAttention(16, 4, mixer="performer+rope", options={"features": 5}, max_length=8)
    assert module.interior.mixer.projection.shape == (5, 4)
    assert "mixer='performer+rope'" in repr(module)
    with pytest.raises(ValueError, match="'performer' has no option 'feature'"):
        MixerAttention(16, 4, mixer="performer", options={"feature": 5})


def test_another_sequence_of_the_same_length_is_refused_where_it_must_be():
    x, y = torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    refused = {
        "queries and keys are the same vectors": MixerAttention(32, 4, mixer="reformer", batch_first=True),
        'decay="gated" reads one rate per position from the queries': attention(decay="gated"),
        "short_conv is for self-attention, .* pass short_conv=0": attention(decay="ladder"),
    }
    for said, module in refused.items():
        module(x, x, x)
        with pytest.raises(ValueError, match=said):
            module(x, y, y)
    assert attention(decay="ladder", short_conv=0)(x, y, y)[0].shape == x.shape


def test_the_same_memory_is_self_attention():
    module, x = attention(decay="gated"), torch.randn(2, 6, 32)
    want = module(x, x, x)[0]
    assert torch.equal(module(x, x[:], x)[0], want)
    assert torch.equal(module(x, x.detach(), x)[0], want)
    plain, again = (x.clone().requires_grad_() for _ in range(2))
    module(plain, plain, plain)[0].square().sum().backward()
    out, _ = torch.utils.checkpoint.checkpoint(module, again, again, again, use_reentrant=True)
    out.square().sum().backward()  # its second forward sees three tensors
    assert_close(again.grad, plain.grad)
    said = "query and key are two tensors; for self-attention pass one as both"
    for key in (x.clone(), x[:, :5], x.as_strided((2, 6, 32), (192, 32, 0))):
        with pytest.raises(ValueError, match=said):
            module(x, key, key)
    with pytest.raises(ValueError, match=said):
        torch.vmap(module)(x, x, x)


def test_call_errors():
    module, x = CosformerAttention(32, 4, batch_first=True), torch.randn(2, 6, 32)
    hides_a_key = torch.ones(6, 6, dtype=torch.bool).triu(1)
    hides_a_key[:, 0] = True
    pattern = r"attn_mask of shape \(6, 6\) is neither causal nor all-visible"
    for given in ({"attn_mask": torch.rand(6, 6)}, {"attn_mask": hides_a_key, "is_causal": True}):
        with pytest.raises(ValueError, match=pattern):
            module(x, x, x, **given)
    with pytest.raises(ValueError, match=r"value must be .* last dimension of 32; got \(2, 6, 31\)"):
        module(x, x, x[..., :31])
    with pytest.raises(ValueError, match="key_padding_mask of a float dtype may hold 0 and -inf only"):
        module(x, x, x, key_padding_mask=torch.rand(2, 6))
    with pytest.raises(TypeError, match="key_padding_mask must be bool"):
        module(x, x, x, key_padding_mask=torch.ones(2, 6, dtype=torch.long))
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape .* = \(2, 6\); got \(2, 5\)"):
        module(x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match='does not do a stream: horizon="length" differs from call to call'):
        module.stream(x)
    with pytest.raises(TypeError, match="query must be a tensor; got list"):
        module([1.0], x, x)
    with pytest.raises(TypeError, match="key_padding_mask must be a tensor; got list"):
        module(x, x, x, key_padding_mask=[True])
    wrong = nn.MultiheadAttention(32, 4).state_dict()
    with pytest.raises(ValueError, match="in_proj_weight holds 4 key heads; this module has num_kv_heads=2"):
        CosformerAttention(32, 4, num_kv_heads=2).load_state_dict(wrong)


@pytest.mark.parametrize(
    "made",
    [
        lambda: attention(decay=None),
        lambda: attention(decay="gated"),
        lambda: MixerAttention(32, 4, mixer="softmax", batch_first=True),
        lambda: MixerAttention(32, 4, mixer="performer", batch_first=True),
    ],
    ids=["paper", "gated", "softmax", "performer"],
)
def test_stream_errors(made):
    module, x = made(), torch.randn(2, 6, 32)
    _, state = module.stream(x)
    refused = [
        (ValueError, r"query must be batched, .* got .* of shape \(6, 32\)", (x[0],), {}),
        (ValueError, r"query must be .* last dimension of 32; got \(2, 6, 31\)", (x[..., :31],), {}),
        (TypeError, "query must be a tensor; got list", ([1.0],), {}),
        (TypeError, "state must be a LayerState, .* or None; got str 's'", (x, "s"), {}),
        (ValueError, "state is of 2 batch rows; got a query of 1", (x[:1], state), {}),
        (
            ValueError,
            r"state holds 5 tokens for a convolution, and this layer needs \d",
            (x, LayerState(state.mixer, (torch.zeros(2, 5, 32),) * 3)),
            {},
        ),
        (
            ValueError,
            r"key_padding_mask must have shape .* = \(2, 6\); got \(2, 5\)",
            (x,),
            {"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)},
        ),
    ]
    for error, match, given, more in refused:
        with pytest.raises(error, match=match):
            module.stream(*given, **more)
    module.stream(x, state)


@pytest.mark.parametrize("decay", ["gated", None])
def test_swapped_into_a_finished_encoder(decay):
    """torch's encoder, made around softmax, would take its fused way in evaluation with padding."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True), 2)
    for layer in encoder.layers:
        layer.self_attn = CosformerAttention(32, 4, horizon=math.inf, decay=decay, batch_first=True)
    x, ignore = torch.randn(2, 20, 32), torch.arange(20) >= torch.tensor([[20], [9]])
    wanted = encoder.train()(x, src_key_padding_mask=ignore)
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            found = encoder.eval()(x, src_key_padding_mask=ignore)
        torch.testing.assert_close(found[~ignore], wanted[~ignore])
    assert "in_proj_weight" not in encoder.layers[0].self_attn.state_dict()


def test_a_saved_stream_is_loaded_as_safely_as_a_tensor(tmp_path):
    module = CosformerAttention(32, 4, horizon=math.inf, decay="gated", batch_first=True)
    _, state = module.stream(torch.randn(1, 9, 32))
    torch.save(state, tmp_path / "state.pt")
    x, loaded = torch.randn(1, 5, 32), torch.load(tmp_path / "state.pt", weights_only=True)
    torch.testing.assert_close(module.stream(x, loaded)[0], module.stream(x, state)[0])
