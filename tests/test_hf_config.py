"""The configurations of the Cosformer model types: a mixer for each layer, what is saved, what is refused."""

import json
import math
import subprocess
import sys

import pytest
import torch
from conftest import TOY_DECODER, token_ids, toy_config, toy_model

pytest.importorskip("transformers")

import transformers as tf

import cosformer.hf as hf
from cosformer.hf.configuration import FORMAT
from cosformer.hf.reach import most_tokens
from cosformer.mixers import Mixer

LINEAR, FULL, WINDOW = "linear_attention", "full_attention", "sliding_attention"
HEADED = [hf.CosformerForCausalLM, hf.CosformerForMaskedLM, hf.CosformerForConditionalGeneration]
headed = pytest.mark.parametrize("kind", HEADED, ids=lambda c: c.__name__)


def config(**fields) -> hf.CosformerConfig:
    return hf.CosformerConfig(**{**TOY_DECODER, "num_hidden_layers": 4, **fields})


def plain(made) -> dict:
    """A configuration's fields, except where it was read from."""
    return {**made.to_dict(), "_name_or_path": ""}


def run(model, **given) -> torch.Tensor:
    extra = {"decoder_input_ids": token_ids(length=9)} if model.config.is_encoder_decoder else {}
    return model(token_ids(), **extra, **given)[0]


@pytest.mark.parametrize(
    ("fields", "names", "types"),
    [
        ({}, ["cosformer"] * 4, [LINEAR] * 4),
        ({"num_hidden_layers": 0}, [], []),
        ({"mixer": "softmax+rope"}, ["softmax+rope"] * 4, [FULL] * 4),
        ({"mixer": "elu*3, softmax"}, ["elu", "elu", "elu", "softmax"], [LINEAR, LINEAR, LINEAR, FULL]),
        ({"mixer": "elu, local"}, ["elu", "local"] * 2, [LINEAR, WINDOW] * 2),
        ({"mixer": "cosformer-hybrid"}, ["cosformer"] * 3 + ["softmax"], [LINEAR] * 3 + [FULL]),
        ({"full_attention_interval": 2}, ["cosformer", "softmax"] * 2, [LINEAR, FULL] * 2),
        (
            {"mixer": "elu", "full_attention_interval": 3},
            ["elu", "elu", "softmax", "softmax"],
            [LINEAR, LINEAR, FULL, FULL],
        ),
        ({"layer_types": [FULL, LINEAR] * 2}, ["softmax", "cosformer"] * 2, [FULL, LINEAR] * 2),
        ({"layer_types": [WINDOW, LINEAR] * 2, "mixer": "elu"}, ["local", "elu"] * 2, [WINDOW, LINEAR] * 2),
        ({"layer_types": [LINEAR] * 4, "mixer": "elu"}, ["elu"] * 4, [LINEAR] * 4),
    ],
    ids=str,
)
def test_each_layer_has_its_mixer(fields, names, types, tmp_path):
    made = config(**fields)
    assert (made.layer_mixers, made.layer_types) == (names, types)
    with torch.device("meta"):
        model = hf.CosformerForCausalLM(made)
    assert [layer.self_attn.interior.mixer.name for layer in model.model.layers] == names
    made.save_pretrained(tmp_path)
    again = tf.AutoConfig.from_pretrained(tmp_path)
    assert (again.layer_mixers, again.layer_types, again.mixer) == (names, types, made.mixer)
    assert plain(again) == plain(made)


def test_another_choice_over_a_saved_one():
    hybrid = {**config().to_dict(), "layer_types": [LINEAR, FULL] * 2}
    assert hf.CosformerConfig(**hybrid).layer_mixers == ["cosformer", "softmax"] * 2
    assert hf.CosformerConfig(**{**config().to_dict(), "mixer": "elu"}).layer_mixers == ["elu"] * 4
    assert (
        hf.CosformerConfig(**{**config().to_dict(), "num_hidden_layers": 6}).layer_mixers == ["cosformer"] * 6
    )


@headed
def test_what_is_given_for_a_saved_model_is_checked_and_followed(kind, tmp_path):
    """transformers sets such fields after a config's checks, and after what follows from them."""
    toy_model(kind).save_pretrained(tmp_path)

    def load(**fields):
        return kind.from_pretrained(tmp_path, **fields)

    bad = {
        "mixer": (3, TypeError, "mixer must be str; got 3"),
        "horizon": (0, ValueError, "horizon is 0; it must be greater than 0"),
        "layer_types": (["bogus"] * 2, ValueError, "layer_types has 'bogus'"),
        "sliding_window": ("x", TypeError, "sliding_window must be int or None; got 'x'"),
    }
    if kind.config_class is hf.CosformerSeq2SeqConfig:
        bad["cross_horizon"] = (9, ValueError, "cross_horizon is 9, but cross_mixer None has none")
    else:
        bad["loss"] = ("hinge", ValueError, "loss is 'hinge' over 256 samples; one of")
    if kind is hf.CosformerForMaskedLM:
        bad["pooling"] = ("maximum", ValueError, "pooling is 'maximum'; one of 'first', 'mean'")
    for name, (value, error, said) in bad.items():
        with pytest.raises(error, match=said):
            load(**{name: value})
    assert load(mixer="elu").config.layer_mixers == ["elu"] * 2
    types = {"layer_types": [LINEAR, WINDOW], "sliding_window": 3}
    model = load(**types)
    kept = [m for m in model.modules() if isinstance(m, Mixer) and m.name == "local"]
    assert model.config.layer_types == [LINEAR, WINDOW] and {m.window for m in kept} == {2}
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(run(kind.from_pretrained(tmp_path / "again")), run(model))


@torch.no_grad()
def test_fewer_layers_of_a_saved_hybrid_are_its_first(tmp_path):
    model = toy_model(hf.CosformerModel, mixer="cosformer-hybrid", num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    states = model(token_ids(), output_hidden_states=True).hidden_states
    short = hf.CosformerModel.from_pretrained(tmp_path, num_hidden_layers=3)
    assert short.config.layer_mixers == ["cosformer"] * 3
    short.norm = torch.nn.Identity()
    torch.testing.assert_close(short(token_ids()).last_hidden_state, states[3])


def test_what_follows_from_a_saved_models_mixer_follows_another(tmp_path):
    def saved(**fields):
        config(**fields).save_pretrained(tmp_path)
        return lambda **given: hf.CosformerConfig.from_pretrained(tmp_path, **given)

    load = saved()
    assert load(mixer="softmax").positions == "learned"
    assert load(mixer="softmax", positions="none").positions == "none"
    assert load(layer_mixers=["softmax"] * 4).mixer == "softmax, softmax, softmax, softmax"
    with pytest.raises(ValueError, match="unknown mixer 'bogus'"):
        load(layer_mixers=["bogus"] * 4)
    load = saved(mixer="sparse")
    assert not load().use_cache and load(mixer="cosformer").use_cache
    load = saved(full_attention_interval=2)
    assert load(full_attention_interval=4).layer_mixers == ["cosformer"] * 3 + ["softmax"]
    assert load(layer_types=[LINEAR] * 4).layer_mixers == ["cosformer"] * 4
    toy_config(hf.CosformerSeq2SeqModel, mixer="cosformer, softmax").save_pretrained(tmp_path)
    other = hf.CosformerSeq2SeqConfig.from_pretrained(tmp_path, num_hidden_layers=4, decoder_layers=1)
    assert (other.encoder_layers, other.layer_mixers) == (4, ["cosformer"])


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"mixer": "softmax+rope", "layer_types": [FULL, WINDOW] * 2}, ["softmax+rope", "local"] * 2),
        ({"mixer": "local", "layer_types": [FULL, WINDOW] * 2}, ["softmax", "local"] * 2),
        ({"mixer": "softmax+rope", "layer_types": [LINEAR, FULL] * 2}, None),
        ({"mixer": "local", "layer_types": [LINEAR, WINDOW] * 2}, None),
        ({"mixer": "elu, softmax", "layer_types": [FULL, LINEAR] * 2}, None),
        ({"mixer": "cosformer-hybrid", "layer_types": [FULL] * 4}, None),
        ({"mixer": "cosformer, softmax", "layer_types": [WINDOW] * 3}, None),
        ({"full_attention_interval": 2, "layer_types": [FULL] * 4}, None),
    ],
    ids=str,
)
def test_layer_types_beside_a_mixer_are_followed_or_refused(fields, names):
    if names is not None:
        assert config(**fields).layer_mixers == names
        return
    with pytest.raises(ValueError, match=r"layer_types (has|is) .*mixer '.*' (it may name|has) "):
        config(**fields)


def test_the_encoder_decoder_has_three_kinds_of_layers():
    made = toy_config(
        hf.CosformerForConditionalGeneration,
        mixer="cosformer, softmax",
        encoder_mixer="nystrom",
        encoder_layers=3,
        mixer_options={"landmarks": 5, "both_signs": True},
    )
    model = hf.CosformerForConditionalGeneration(made).model
    assert [layer.self_attn.interior.mixer.name for layer in model.encoder.layers] == ["nystrom"] * 3
    assert [layer.self_attn.interior.mixer.name for layer in model.decoder.layers] == ["cosformer", "softmax"]
    assert [layer.encoder_attn.mixer.name for layer in model.decoder.layers] == ["relu", "softmax"]
    assert model.encoder.layers[0].self_attn.interior.mixer.landmarks == 5
    assert model.decoder.layers[0].self_attn.interior.mixer.both_signs
    given = toy_config(hf.CosformerForConditionalGeneration, cross_mixer="cosformer-paper", horizon=200)
    cross = [m for m in hf.CosformerSeq2SeqModel(given).modules() if isinstance(m, Mixer)][-1]
    assert (cross.name, cross.reach) == ("cosformer-paper", 200)
    given = toy_config(hf.CosformerForConditionalGeneration, cross_mixer="cosformer-paper", cross_horizon=200)
    layers = hf.CosformerSeq2SeqModel(given).decoder.layers
    assert {layer.encoder_attn.mixer.reach for layer in layers} == {200}
    assert {layer.self_attn.interior.mixer.reach for layer in layers} == {math.inf}


def test_a_sliding_window_is_what_local_layers_see():
    fields = {"num_hidden_layers": 2, "layer_types": [LINEAR, WINDOW], "sliding_window": 5}
    given = toy_config(hf.CosformerForCausalLM, **fields)
    model = hf.CosformerForCausalLM(given)
    assert model.model.layers[1].self_attn.interior.mixer.window == 4  # to its left, beside itself
    assert hf.CosformerConfig.from_dict(given.to_dict()).sliding_window == 5


def test_convolutions_are_centred_in_an_encoder_and_causal_in_a_decoder():
    def ahead(part):
        return {m.ahead for m in part.modules() if type(m).__name__ == "ShortConvolution"}

    assert ahead(toy_model(hf.CosformerForCausalLM)) == {0}
    assert ahead(toy_model(hf.CosformerForMaskedLM)) == {1}
    both = toy_model(hf.CosformerForConditionalGeneration).model
    assert (ahead(both.encoder), ahead(both.decoder)) == ({1}, {0})
    assert ahead(toy_model(hf.CosformerForMaskedLM, short_conv=5)) == {2}
    assert ahead(toy_model(hf.CosformerForMaskedLM, short_conv=0)) == set()
    assert ahead(toy_model(hf.CosformerForCausalLM, mixer="cosformer-paper")) == set()


def test_what_surrounds_the_mixers_is_the_same_in_all_layers():
    """A hybrid's softmax layers have the others' convolution and norms, unless these are turned off."""

    def around(**fields):
        layers = toy_model(hf.CosformerForCausalLM, **fields).model.layers
        return [(x.conv is not None, x.q_norm is not None) for x in (y.self_attn.interior for y in layers)]

    assert around(mixer="cosformer-hybrid") == around(mixer="cosformer") == [(True, True)] * 2
    assert around(mixer="cosformer-hybrid", short_conv=0) == [(False, True)] * 2
    assert around(mixer="cosformer-hybrid", qk_norm=False) == [(True, False)] * 2
    assert around(mixer="softmax") == around(mixer="cosformer-paper, softmax") == [(False, False)] * 2


@headed
def test_a_new_model_starts_with_nothing_between_its_projections_and_its_mixer(kind):
    """Convolutions are the identity, gates at the ladder, output gates one half, norm weights one."""
    torch.manual_seed(0)
    model = kind(toy_config(kind, output_gate=True))
    found = {"gate.weight": 0, "gate.bias": 0, "norm.weight": 0, "conv": 0}
    for name, p in model.named_parameters():
        if ".interior." not in name:
            continue
        if "gate" in name:
            assert not p.any(), name
            found["gate." + name.rpartition(".")[2]] += 1
        elif "norm" in name:
            assert (p == 1).all(), name
            found["norm.weight"] += 1
        else:
            assert ".conv." in name and (p.sum(1) == 1).all() and ((p == 0) | (p == 1)).all(), name
            found["conv"] += 1
    layers = 4 if model.config.is_encoder_decoder else 2
    assert found == {
        "gate.weight": 2 * layers,
        "gate.bias": 2 * layers,
        "norm.weight": 2 * layers,
        "conv": 3 * layers,
    }


# Saving and loading

SAVED = {
    hf.CosformerModel: tf.AutoModel,
    hf.CosformerForCausalLM: tf.AutoModelForCausalLM,
    hf.CosformerEncoderModel: tf.AutoModel,
    hf.CosformerForMaskedLM: tf.AutoModelForMaskedLM,
    hf.CosformerForSequenceClassification: tf.AutoModelForSequenceClassification,
    hf.CosformerForTokenClassification: tf.AutoModelForTokenClassification,
    hf.CosformerSeq2SeqModel: tf.AutoModel,
    hf.CosformerForConditionalGeneration: tf.AutoModelForSeq2SeqLM,
}


@pytest.mark.parametrize("fields", [{"mixer": "cosformer, softmax"}, {"full_attention_interval": 2}], ids=str)
@pytest.mark.parametrize("kind", SAVED, ids=lambda c: c.__name__)
def test_save_and_load_are_identity(kind, fields, tmp_path):
    model = toy_model(kind, horizon=100, output_gate=True, **fields)
    model.save_pretrained(tmp_path)
    assert [f.suffix for f in tmp_path.iterdir() if f.name.startswith("model")] == [".safetensors"]
    loaded, info = SAVED[kind].from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is kind and not any(info.values())
    assert plain(loaded.config) == plain(model.config)
    names = [[m.name for m in x.modules() if isinstance(m, Mixer)] for x in (model, loaded)]
    assert names[0] == names[1] and {"cosformer", "softmax"} <= set(names[0])
    for (name, a), b in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(run(model), run(loaded))


def test_config_json_is_plain(tmp_path):
    config(mixer="cosformer*3, softmax+rope", mixer_options={"both_signs": True}).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["model_type"], saved["cosformer_format"]) == ("cosformer", FORMAT)
    assert saved["mixer"] == "cosformer*3, softmax+rope"
    assert saved["layer_mixers"] == ["cosformer"] * 3 + ["softmax+rope"]
    assert saved["layer_types"] == [LINEAR] * 3 + [FULL]
    assert saved["mixer_options"] == {"both_signs": True}


def test_an_infinite_horizon_is_saved(tmp_path):
    toy_model(hf.CosformerForCausalLM, horizon=math.inf).save_pretrained(tmp_path)
    assert hf.CosformerForCausalLM.from_pretrained(tmp_path).config.horizon == math.inf


@headed
@pytest.mark.parametrize("found", [None, 1, FORMAT + 1])
def test_a_model_in_another_format_is_refused(kind, found, tmp_path):
    """Another version has other weights and fields: one line says so, before any key is found missing."""
    toy_model(kind).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved.pop("cosformer_format")
    if found is not None:
        saved["cosformer_format"] = found
    (tmp_path / "config.json").write_text(json.dumps(saved))
    said = (
        f"was saved in format {found or 1} of cosformer, and this version reads format {FORMAT}: load it with"
    )
    for load in (kind, tf.AutoConfig, SAVED[kind]):
        with pytest.raises(ValueError, match=said):
            load.from_pretrained(tmp_path)


def test_without_the_package_a_saved_model_does_not_load(tmp_path):
    toy_model(hf.CosformerForCausalLM).save_pretrained(tmp_path)
    code = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "`cosformer`" in done.stderr.splitlines()[-1] + done.stderr


# Refusals


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mixer": "nobody"}, "unknown mixer 'nobody'; one of bigbird"),
        ({"mixer": "elu*3"}, r"mixer 'elu\*3' names 3 layers, which 4 layers cannot repeat evenly"),
        ({"mixer": "nystrom"}, "mixer 'nystrom' does not do causal attention: its landmarks"),
        ({"mixer": "cosformer+rope"}, r"'cosformer\+rope' does not do positions, asked for by \+rope"),
        ({"mixer": "elu", "mixer_options": {"features": 3}}, "has 'features'; mixer 'elu' accepts none"),
        (
            {"mixer_options": {"slope": 1}},
            "mixer_options has 'slope'; mixer 'cosformer' accepts backend, both",
        ),
        ({"mixer": "elu", "horizon": 8}, "horizon is 8, but mixer 'elu' has none"),
        ({"horizon": 0}, "horizon is 0; it must be greater than 0"),
        ({"positions": "sine"}, "positions is 'sine'; one of 'learned', 'none', None"),
        ({"layer_types": [FULL]}, r"layer_types must name each of the 4 layers; got \['full_attention'\]"),
        (
            {"layer_types": [FULL, "mamba"] * 2},
            "layer_types has 'mamba'; with mixer 'cosformer' it may name 'full_attention', 'linear",
        ),
        (
            {"full_attention_interval": 0},
            "full_attention_interval must be an int of at least 1, or None; got 0",
        ),
        (
            {"full_attention_interval": 2, "mixer": "elu*3, softmax"},
            r"full_attention_interval is 2, but mixer 'elu\*3, softmax' has softmax in other layers",
        ),
        (
            {"num_attention_heads": 5},
            "hidden_size is 32, which 5 heads cannot share evenly; .* or give head_dim",
        ),
        ({"hidden_size": 30}, "hidden_size is 30, which 4 heads cannot share evenly"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; .* divide num_attention_heads, which is 4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; .* divide num_attention_heads, which is 4"),
        ({"hidden_act": "foo"}, "hidden_act is 'foo'; one of .*silu"),
        ({"dropout": 1.5}, "dropout is 1.5; it must be at least 0 and less than 1"),
        ({"sliding_window": 5}, "sliding_window is 5, but no layer is 'sliding_attention'"),
        ({"mixer": "local", "sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
        (
            {"mixer": "local", "sliding_window": 5, "mixer_options": {"window": 3}},
            "sliding_window is 5, and mixer_options has 'window', too",
        ),
        ({"short_conv": -1}, "short_conv is -1; it must be 0 or at least 2"),
        ({"short_conv": 1}, "short_conv is 1; it must be 0 or at least 2"),
        (
            {"cosformer_format": 9},
            "cosformer_format is 9, and this version makes models of format 3; leave it",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; there are no attention weights to drop here"),
    ],
    ids=str,
)
def test_fields_that_make_no_sense_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        config(**fields)


@pytest.mark.parametrize("kind", [hf.CosformerConfig, hf.CosformerEncoderConfig, hf.CosformerSeq2SeqConfig])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mixer": 3}, "mixer must be str; got 3"),
        ({"layer_types": FULL}, "layer_types must be a list of names, .* got 'full_attention'"),
        ({"layer_types": 3}, "layer_types must be a list of names, one for each layer, or None; got 3"),
        ({"mixer_options": {"both_signs": "no"}}, "both_signs must be True or False; got 'no'"),
        ({"mixer": None}, "mixer must be str; got None"),
        ({"mixer": ["cosformer", "elu"]}, r"mixer must be str; got \['cosformer', 'elu'\]"),
        ({"mixer_options": 3}, "mixer_options must be dict or None; got 3"),
        ({"horizon": "a"}, "horizon must be int or float or None; got 'a'"),
        ({"short_conv": "a"}, "short_conv must be int or None; got 'a'"),
        ({"qk_norm": "no"}, "qk_norm must be bool or None; got 'no'"),
        ({"output_gate": "x"}, "output_gate must be bool; got 'x'"),
    ],
    ids=str,
)
def test_fields_of_another_kind_are_refused(kind, fields, said):
    with pytest.raises(TypeError, match=said):
        kind(**fields)


def test_heads_may_have_a_size_of_their_own():
    model = toy_model(hf.CosformerForCausalLM, num_attention_heads=5, num_key_value_heads=5, head_dim=8)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (40, 32) and run(model).isfinite().all()


def test_a_name_that_is_nearly_ours_is_warned_of():
    """Attributes that others set on a saved config are none of ours."""
    with pytest.warns(UserWarning, match="no field 'mixr', so it changes nothing; did you mean 'mixer'"):
        hf.CosformerConfig(mixr="softmax")
    kept = hf.CosformerConfig(n_positions=16, use_sliding_window=False, causal_layers=True)
    assert hf.CosformerConfig.from_dict(kept.to_dict()).n_positions == 16


@pytest.mark.parametrize("horizon", [16, 16.5])
def test_how_many_tokens_a_model_reads(horizon):
    """As many as its forward takes, and not one more."""
    for kind in (hf.CosformerForCausalLM, hf.CosformerForMaskedLM):
        options = {"mixer": "cosformer-paper", "positions": "none", "horizon": horizon}
        model = toy_model(kind, **options)
        most = int(most_tokens(model.config))
        model(token_ids(1, most))
        with pytest.raises(ValueError, match=f"{most + 1} tokens reach past the horizon"):
            model(token_ids(1, most + 1))


def test_how_many_tokens_a_decoder_writes_whose_encoder_has_other_heads():
    options = {"mixer": "cosformer-ladder", "encoder_mixer": "relu", "mixer_options": {"decay": [0.1, 0.2]}}
    config = toy_config(hf.CosformerSeq2SeqModel, encoder_attention_heads=4, decoder_attention_heads=2)
    config = type(config)(**{**config.to_dict(), **options})
    assert most_tokens(config) == config.max_position_embeddings


def test_fields_of_the_others_that_make_no_sense_are_refused():
    for kind in (hf.CosformerModel, hf.CosformerEncoderModel):  # BART's own is checked by transformers
        with pytest.raises(TypeError, match="dropout must be float; got 'a'"):
            toy_config(kind, dropout="a")
    with pytest.raises(ValueError, match="pooling is 'least'; one of 'first', 'mean', 'max', 'mean-max'"):
        toy_config(hf.CosformerEncoderModel, pooling="least")
    with pytest.raises(ValueError, match='the encoder-decoder has only "learned", as BART does'):
        toy_config(hf.CosformerSeq2SeqModel, positions="none")
    with pytest.raises(ValueError, match="unknown mixer 'nobody'"):
        toy_config(hf.CosformerSeq2SeqModel, encoder_mixer="nobody")
    with pytest.raises(ValueError, match="unknown mixer 'nobody'"):
        toy_config(hf.CosformerSeq2SeqModel, cross_mixer="nobody")
    for name in ("local", "cosformer"):
        with pytest.raises(ValueError, match=f"mixer '{name}' does not do .*cross_mixer"):
            toy_config(hf.CosformerSeq2SeqModel, cross_mixer=name)
    with pytest.raises(ValueError, match="mixer 'linformer' does not do"):
        toy_config(hf.CosformerSeq2SeqModel, mixer="linformer", encoder_mixer="elu")
    with pytest.raises(ValueError, match="decoder_attention_heads is 0; it must be at least 1"):
        toy_config(hf.CosformerSeq2SeqModel, decoder_attention_heads=0)
    with pytest.raises(ValueError, match="d_model is 32, which 5 heads cannot share evenly"):
        toy_config(hf.CosformerSeq2SeqModel, encoder_attention_heads=5)
    with pytest.raises(ValueError, match="cross_horizon is 50, but cross_mixer None has none"):
        toy_config(hf.CosformerSeq2SeqModel, cross_horizon=50)
    with pytest.raises(ValueError, match="cross_horizon is 0; it must be greater than 0"):
        toy_config(hf.CosformerSeq2SeqModel, cross_mixer="cosformer-paper", cross_horizon=0)
    options = {"cross_mixer": "cosformer-paper", "mixer_options": {"horizon": "length"}}
    with pytest.raises(ValueError, match='mixer .* does not do the memory of a source: horizon="length"'):
        toy_config(hf.CosformerSeq2SeqModel, mixer="cosformer-paper", **options)


@headed
@pytest.mark.parametrize("asked", ["sdpa", "eager", "flash_attention_2"])
def test_another_attention_implementation_is_refused(kind, asked, tmp_path):
    """It would not change what is computed, yet let through what only softmax can honour."""
    said = f"attn_implementation='{asked}': a Cosformer model's layers mix as config.mixer says"
    model = toy_model(kind)
    model.save_pretrained(tmp_path)
    asks = [
        lambda: SAVED[kind].from_config(toy_config(kind), attn_implementation=asked),
        lambda: SAVED[kind].from_pretrained(tmp_path, attn_implementation=asked),
        lambda: model.set_attn_implementation(asked),
    ]
    for ask in asks:
        with pytest.raises(ValueError, match=said):
            ask()
    assert SAVED[kind].from_pretrained(tmp_path, attn_implementation="cosformer").config.mixer == "cosformer"


@pytest.mark.parametrize("kind", [hf.CosformerForCausalLM, hf.CosformerForMaskedLM], ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    "positions", [[0, 1, 6, 7, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 4, 4, 5, 6]], ids=str
)
def test_parts_of_a_sequence_or_another_order_are_refused(kind, positions):
    said = r"position_ids must count each sequence from 0: .* got a row \[" + ", ".join(map(str, positions))
    with pytest.raises(ValueError, match=said):
        toy_model(kind)(token_ids(2, 8), position_ids=torch.tensor([positions, [*range(8)]]))
