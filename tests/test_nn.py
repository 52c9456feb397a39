"""CosformerAttention: nn.MultiheadAttention's constructor and call, other people's weights, stock transformer layers."""

import copy

import pytest
import torch
from judge import assert_close
from torch import nn

from cosformer import CosformerAttention, cosformer_attention, cosformer_stream, reference
from cosformer.decay import ladder


def by_hand(module, query, key, value, *, horizon, **kwargs):
    """The module written out with the definition; batch first."""
    heads = lambda x, n: x.unflatten(-1, (n, -1)).transpose(1, 2)
    q, k, v = (
        heads(module.q_proj(query), module.num_heads),
        *(heads(p(x), module.num_kv_heads) for p, x in ((module.k_proj, key), (module.v_proj, value))),
    )
    out = reference.attention(q, k, v, horizon=horizon, **kwargs)
    return module.out_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_definition(kv_heads, causal):
    module = CosformerAttention(
        32, 4, num_kv_heads=kv_heads, horizon=50, decay=[0.1, 0.2, 0.3, 0.0], batch_first=True
    ).double()
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    out, weights = module(x, x, x, is_causal=causal)
    decay = torch.tensor([0.1, 0.2, 0.3, 0.0], dtype=torch.float32).double()
    assert weights is None
    torch.testing.assert_close(
        out, by_hand(module, x, x, x, horizon=50, causal=causal, decay=decay), rtol=1e-6, atol=1e-7
    )


def test_cross_attention_with_other_sizes():
    module = CosformerAttention(32, 4, kdim=10, vdim=12, horizon=50)
    query, key, value = torch.randn(7, 2, 32), torch.randn(20, 2, 10), torch.randn(20, 2, 12)
    out, _ = module(query, key, value)
    expected = by_hand(module, *(x.transpose(0, 1) for x in (query, key, value)), horizon=50).transpose(0, 1)
    torch.testing.assert_close(out, expected)


def test_padding_mask_means_ignore():
    module = CosformerAttention(32, 4, horizon=50, batch_first=True)
    x = torch.randn(2, 20, 32)
    ignore = torch.zeros(2, 20, dtype=torch.bool)
    ignore[1, 12:] = True
    out, _ = module(x, x, x, key_padding_mask=ignore)
    alone, _ = module(x[1:, :12], x[1:, :12], x[1:, :12])
    torch.testing.assert_close(out[1:, :12], alone)
    as_float = torch.zeros(2, 20).masked_fill(ignore, float("-inf"))
    assert torch.equal(module(x, x, x, key_padding_mask=as_float)[0], out)


def test_weights():
    module = CosformerAttention(128, 4, num_kv_heads=2, horizon=50, batch_first=True)
    x = torch.randn(2, 20, 128)
    out, weights = module(x, x, x, is_causal=True, need_weights=True, average_attn_weights=False)
    assert weights.shape == (2, 4, 20, 20)
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 20))
    v = module.v_proj(x).unflatten(-1, (2, 32)).transpose(1, 2).repeat_interleave(2, 1)
    torch.testing.assert_close(module.out_proj((weights @ v).transpose(1, 2).flatten(2)), out)
    averaged = module(x, x, x, is_causal=True, need_weights=True)[1]
    torch.testing.assert_close(averaged, weights.mean(1))


def test_unbatched_and_sequence_first():
    module = CosformerAttention(32, 4, horizon=50)
    x = torch.randn(20, 2, 32)
    out, weights = module(x, x, x, need_weights=True)
    alone, alone_weights = module(x[:, 1], x[:, 1], x[:, 1], need_weights=True)
    torch.testing.assert_close(out[:, 1], alone)
    torch.testing.assert_close(weights[1], alone_weights)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 10, "vdim": 12}])
def test_loads_multihead_attention(sizes):
    theirs = nn.MultiheadAttention(32, 4, batch_first=True, **sizes)
    nn.init.normal_(theirs.in_proj_bias)
    ours = CosformerAttention(32, 4, batch_first=True, horizon=50, **sizes)
    ours.load_state_dict(theirs.state_dict())
    x, key, value = torch.randn(2, 9, 32), torch.randn(2, 9, ours.kdim), torch.randn(2, 9, ours.vdim)
    weight = theirs.in_proj_weight.chunk(3)[1] if not sizes else theirs.k_proj_weight
    torch.testing.assert_close(ours.k_proj(key), key @ weight.T + theirs.in_proj_bias.chunk(3)[1])
    assert ours(x, key, value)[0].shape == (2, 9, 32)


def test_loads_the_official_file():
    """The official module's parameters: q_proj, k_proj, v_proj, out_proj. Its horizon is the call's length, positions from 1."""
    official = {
        f"{n}_proj.{p}": torch.randn(32, 32) if p == "weight" else torch.randn(32)
        for n in ("q", "k", "v", "out")
        for p in ("weight", "bias")
    }
    ours = CosformerAttention(32, 4)
    ours.load_state_dict(official)
    x = torch.randn(11, 2, 32)
    torch.testing.assert_close(
        ours(x, x, x)[0],
        by_hand(ours, *(x.transpose(0, 1),) * 3, horizon=11).transpose(0, 1),
        rtol=1e-4,
        atol=1e-4,
    )


def test_state_dict_round_trip():
    a, b = (CosformerAttention(32, 4, decay=0.1, learn_decay=True) for _ in range(2))
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    x = torch.randn(5, 1, 32)
    assert torch.equal(a(x, x, x)[0], b(x, x, x)[0])
    a(x, x, x)[0].square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in a.parameters())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_inside_stock_encoder_layer(training, norm_first):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first).train(
        training
    )
    layer.self_attn = CosformerAttention(32, 4, horizon=50, batch_first=True)
    x = torch.randn(2, 20, 32)
    ignore = torch.zeros(2, 20, dtype=torch.bool)
    ignore[1, 12:] = True
    causal = torch.ones(20, 20, dtype=torch.bool).triu(1)
    with torch.set_grad_enabled(training):
        out = layer(x, src_mask=causal, src_key_padding_mask=ignore, is_causal=True)
        alone = layer(x[1:, :12])
        assert_close(layer(x, src_key_padding_mask=ignore)[1:, :12], alone)
        changed = x.clone()
        changed[:, 10:] += 1
        again = layer(changed, src_mask=causal)
    assert_close(again[:1, :10], out[:1, :10])
    assert not torch.allclose(again[:1, 10:], out[:1, 10:])


def test_inside_stock_decoder_layer_and_stack():
    layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    layer.self_attn = CosformerAttention(32, 4, horizon=50, batch_first=True)
    layer.multihead_attn = CosformerAttention(32, 4, horizon=50, batch_first=True)
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


def test_compiles():
    torch._dynamo.reset()
    module = CosformerAttention(32, 4, horizon=50, batch_first=True)
    x = torch.randn(2, 20, 32)
    assert_close(
        torch.compile(module, fullgraph=True)(x, x, x, is_causal=True)[0], module(x, x, x, is_causal=True)[0]
    )


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
        ("decay must be one rate, .* got nan", {"decay": float("nan")}),
        ("decay must be above 0 if it is learned, .* got 0", {"decay": 0, "learn_decay": True}),
        ("horizon must be greater than 0; got -1", {"horizon": -1}),
        (r"horizon must be one number or one per head \(4\); got 2 numbers", {"horizon": [1, 2]}),
        ("backend 'natvie' is unknown; one of 'native', 'torch'", {"backend": "natvie"}),
        ("eps must be greater than 0", {"eps": 0.0}),
        ("learn_decay needs rates to start from", {"learn_decay": True}),
        (r"decay must be \"gated\", one rate, or one per head \(4\); got 'gate'", {"decay": "gate"}),
        ("learn_decay is for rates given as numbers", {"decay": "gated", "learn_decay": True}),
    ],
)
def test_constructor_errors(match, change):
    with pytest.raises(ValueError, match=match):
        CosformerAttention(32, **{"num_heads": 4, **change})


@pytest.mark.parametrize(
    ("match", "change"),
    [
        (
            r"decay must be one rate, .* got a torch.float32 tensor of shape \(2, 4, 9\)",
            {"decay": torch.rand(2, 4, 9)},
        ),
        ("decay must be one rate, .* got bool True", {"decay": True}),
        ("horizon must be a number, or one per head; got str 'long'", {"horizon": "long"}),
    ],
)
def test_constructor_type_errors(match, change):
    with pytest.raises(TypeError, match=match):
        CosformerAttention(32, 4, **change)


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


def test_call_errors():
    module = CosformerAttention(32, 4, batch_first=True)
    x = torch.randn(2, 20, 32)
    with pytest.raises(ValueError, match=r"attn_mask of shape \(20, 20\) is neither causal nor all-visible"):
        module(x, x, x, attn_mask=torch.rand(20, 20) > 0.5)
    with pytest.raises(ValueError, match="neither causal nor all-visible"):
        module(x, x, x, attn_mask=torch.rand(20, 20))
    with pytest.raises(ValueError, match=r"value must be .* last dimension of 32; got \(2, 20, 31\)"):
        module(x, x, x[..., :31])
    with pytest.raises(ValueError, match="key_padding_mask of a float dtype may hold 0 and -inf only"):
        module(x, x, x, key_padding_mask=torch.rand(2, 20))
    with pytest.raises(TypeError, match="key_padding_mask must be bool"):
        module(x, x, x, key_padding_mask=torch.ones(2, 20, dtype=torch.long))
    wrong = nn.MultiheadAttention(32, 4).state_dict()
    with pytest.raises(ValueError, match="in_proj_weight holds 4 key heads; this module has num_kv_heads=2"):
        CosformerAttention(32, 4, num_kv_heads=2).load_state_dict(wrong)


def test_a_mask_beside_is_causal_is_not_ignored():
    module = CosformerAttention(32, 4, batch_first=True)
    x = torch.randn(2, 6, 32)
    hides_a_key = torch.ones(6, 6, dtype=torch.bool).triu(1)
    hides_a_key[:, 0] = True
    with pytest.raises(ValueError, match="neither causal nor all-visible"):
        module(x, x, x, is_causal=True, attn_mask=hides_a_key)
    with pytest.raises(
        ValueError, match=r"key_padding_mask must have shape \(batch, keys\) = \(2, 6\); got \(2, 5\)"
    ):
        module(x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))


def test_rates_survive_meta_initialisation_and_casts():
    made = CosformerAttention(32, 4, decay=20.0, horizon=50)
    late = CosformerAttention(32, 4, decay=20.0, horizon=50, device="meta").to_empty(device="cpu")
    late.load_state_dict(made.state_dict())
    x = torch.randn(9, 2, 32)
    assert torch.equal(late(x, x, x)[0], made(x, x, x)[0])
    assert made.to(torch.bfloat16).decay == (20.0,) * 4


def gated(**options):
    """A module whose gate has been moved from its start."""
    module = CosformerAttention(32, 4, decay="gated", batch_first=True, **{"horizon": 50, **options})
    nn.init.normal_(module.gate.weight, std=0.2)
    nn.init.normal_(module.gate.bias)
    return module


def projected(module, x):
    parts = (
        (module.q_proj, module.num_heads),
        (module.k_proj, module.num_kv_heads),
        (module.v_proj, module.num_kv_heads),
    )
    return [p(x).unflatten(-1, (n, -1)).transpose(1, 2) for p, n in parts]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_gated_rates_are_those_of_the_operator(causal, kv_heads):
    """Outputs and the gradients of every parameter and the input, against the operator with the formula's rates."""
    module = gated(num_kv_heads=kv_heads)
    x = torch.randn(2, 20, 32, requires_grad=True)
    leaves = [x, *module.parameters()]
    rates = ((x @ module.gate.weight.T + module.gate.bias).exp() * ladder(4, 50)).transpose(1, 2)
    mixed = cosformer_attention(*projected(module, x), horizon=50, causal=causal, decay=rates)
    expected = module.out_proj(mixed.transpose(1, 2).flatten(2))
    out, weights = module(x, x, x, is_causal=causal, need_weights=True, average_attn_weights=False)
    assert_close(out, expected)
    v = projected(module, x)[2].repeat_interleave(4 // kv_heads, 1)
    assert_close(module.out_proj((weights @ v).transpose(1, 2).flatten(2)), expected)
    for g, e in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        assert_close(g, e)
    assert torch.autograd.grad(module(x, x, x)[0].square().sum(), module.gate.weight)[0].abs().max() > 0


def test_gated_streams():
    module, x, state, outs = gated(), torch.randn(2, 20, 32), None, []
    for piece in x.split([7, 1, 12], dim=1):
        out, state = cosformer_stream(*projected(module, piece), state, horizon=50, decay=module.gate(piece))
        outs.append(module.out_proj(out.transpose(1, 2).flatten(2)))
    assert_close(torch.cat(outs, 1), module(x, x, x, is_causal=True)[0])


@pytest.mark.parametrize(
    ("horizon", "span"), [(50, 50), ([20.5, 30, 40.5, float("inf")], 41), (float("inf"), 4096), (None, 4096)]
)
def test_a_gate_starts_as_the_ladder(horizon, span):
    module = CosformerAttention(32, 4, decay="gated", horizon=horizon)
    plain = CosformerAttention(32, 4, decay=ladder(4, span), horizon=horizon)
    module.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(9, 2, 32)
    assert_close(module(x, x, x)[0], plain(x, x, x)[0])


@pytest.mark.parametrize("sequence_first", [False, True])
def test_gated_layouts_and_padding(sequence_first):
    module = gated()
    x = torch.randn(2, 20, 32)
    ignore = torch.arange(20) >= torch.tensor([20, 12])[:, None]
    x[1, 12:] = float("nan")
    row = x[1, :12]
    alone, _ = module(row, row, row)
    module.batch_first = not sequence_first
    x = x.transpose(0, 1) if sequence_first else x
    out, _ = module(x, x, x, key_padding_mask=ignore)
    assert_close((out.transpose(0, 1) if sequence_first else out)[1, :12], alone)


def test_a_gate_refuses_cross_attention():
    module, x = gated(), torch.randn(2, 20, 32)
    with pytest.raises(
        ValueError, match='decay="gated" reads .* the same tensor as query and key; .* decay=None'
    ):
        module(x, torch.randn(2, 20, 32), torch.randn(2, 20, 32))


@pytest.mark.parametrize("sizes", [{}, {"kdim": 10, "vdim": 12}])
@pytest.mark.parametrize("made", [{"decay": "gated"}, {"decay": 0.5, "learn_decay": True}])
def test_rates_keep_their_start_under_the_weights_of_multihead_attention(made, sizes):
    layer = nn.ModuleDict({"attention": CosformerAttention(32, 4, horizon=50, **made, **sizes)})
    rates = {n: p.clone() for n, p in layer.named_parameters() if "decay" in n or "gate" in n}
    theirs = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4, **sizes)})
    layer.load_state_dict(theirs.state_dict())
    assert rates and all(torch.equal(p, layer.get_parameter(n)) for n, p in rates.items())
    own = layer.state_dict()
    assert set(own) == {
        f"attention.{p}_proj.{n}" for p in ("q", "k", "v", "out") for n in ("weight", "bias")
    } | set(rates)
    layer.load_state_dict(own)
    own.pop(next(iter(rates)))
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict(own)
