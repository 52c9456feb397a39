"""The registry of mixers: names, options, positions after a +, and a mixer for each layer from a spec."""

import re

import pytest
import torch

from cosformer import mixers

SIZES = {"heads": 2, "head_dim": 4, "max_length": 8}


def test_unknown_names_and_options_are_refused_with_what_is_accepted():
    with pytest.raises(ValueError, match=r"unknown mixer 'sofmax'; one of bigbird, cosformer, cosformer-cos"):
        mixers.build("sofmax", **SIZES)
    with pytest.raises(ValueError, match=r"'performer' has no option 'feature'; it accepts features, seed"):
        mixers.build("performer", feature=3, **SIZES)
    with pytest.raises(ValueError, match=r"heads must be an int of at least 1; got 0"):
        mixers.build("softmax", **{**SIZES, "heads": 0})
    with pytest.raises(ValueError, match=r"positions 'alibi' is unknown; one of rope"):
        mixers.build("softmax+alibi", **SIZES)
    refused = r"'cosformer\+rope' does not do positions, asked for by \+rope: its re-weighting is"
    with pytest.raises(ValueError, match=refused):
        mixers.build("cosformer+rope", **SIZES)
    with pytest.raises(ValueError, match=r"q must have 2 heads of size 4"):
        mixers.build("softmax", **SIZES)(*(torch.randn(1, 2, 3, 5) for _ in range(3)))
    with pytest.raises(TypeError, match="mixer must be a name, as 'softmax'; got None"):
        mixers.build(None, **SIZES)
    with pytest.raises(TypeError, match="mixer must name one mixer, or one for each layer; got None"):
        mixers.layers(None, 4)


@pytest.mark.parametrize("spec", ["cosformer-hybrid", "cosformer-hybrid+rope", "cosformer*3, softmax"])
def test_what_names_layers_is_no_mixer_of_one(spec):
    said = re.escape(f"mixer {spec!r} names the layers of a model; of one layer it is one of bigbird, ")
    with pytest.raises(ValueError, match=said) as refused:
        mixers.build(spec, **SIZES)
    assert "or cosformer-hybrid" not in str(refused.value)
    with pytest.raises(ValueError, match="unknown mixer 'sofmax'; .*some with .rope$"):
        mixers.build("sofmax", **SIZES)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bigbird", {"window": 2}),
        ("cosformer", {"decay": [0.1]}),
        ("cosformer", {"decay": "steps"}),
        ("cosformer", {"horizon": "long"}),
        ("cosformer", {"eps": 0.0}),
        ("cosformer", {"backend": "natvie"}),
        ("linformer", {"rank": 0}),
        ("local", {"window": -1}),
        ("local", {"window": 2.5}),
        ("local", {"globals": True}),
        ("nystrom", {"conv": 4}),
        ("performer", {"features": 0}),
        ("polynomial", {"degree": 0.5}),
        ("reformer", {"buckets": 3}),
        ("rfa", {"sigma": 0}),
        ("sparse", {"pattern": "diagonal"}),
        ("sparse", {"stride": 4, "columns": 5}),
        ("sparse", {"stride": 4, "columns": 0}),
    ],
)
def test_bad_options_are_named(name, options):
    with pytest.raises(ValueError, match="|".join(options)):
        mixers.build(name, **SIZES, **options)


def test_a_name_belongs_to_one_class():
    taken = r"mixer 'softmax' is already registered by cosformer.mixers.softmax.Softmax"
    with pytest.raises(ValueError, match=taken):
        mixers.register("softmax")(type("Other", (mixers.Mixer,), {}))


def test_a_preset_is_the_class_with_its_options_unless_others_are_given():
    assert mixers.options("cosformer")["decay"] == "gated"
    assert mixers.options("cosformer-paper")["decay"] is None
    assert mixers.options("cosformer-cosine")["horizon"] is None
    assert mixers.build("cosformer-paper", **SIZES, decay=0.5).decay.spec == 0.5


@pytest.mark.parametrize(
    ("spec", "count", "names"),
    [
        ("softmax", 3, "softmax softmax softmax"),
        ("cosformer*3, softmax+rope", 4, "cosformer cosformer cosformer softmax+rope"),
        ("elu,softmax", 4, "elu softmax elu softmax"),
        (" elu * 2 , local ", 3, "elu elu local"),
        ("cosformer-hybrid", 5, "cosformer cosformer cosformer softmax softmax"),
        ("cosformer-hybrid+rope", 4, "cosformer cosformer cosformer softmax+rope"),
        ("cosformer-hybrid", 1, "softmax"),
    ],
)
def test_a_spec_names_the_mixer_of_each_layer(spec, count, names):
    assert mixers.layers(spec, count) == names.split()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("cosformer*3, softmax", "names 4 layers, which 6 layers cannot repeat evenly"),
        ("cosformer*0", r"mixer 'cosformer\*0': after \* stands how many layers; got '0'"),
        ("cosformer*many", r"after \* stands how many layers; got 'many'"),
        ("cosformer*", r"after \* stands how many layers; got ''"),
        ("cosformer,", "mixer 'cosformer,': unknown mixer ''; one of bigbird"),
        ("cosformer, sofmax", "mixer 'cosformer, sofmax': unknown mixer 'sofmax'; one of bigbird"),
        ("cosformer-hybrid+sines", "positions 'sines' is unknown; one of rope"),
        ("softmax+sines", "positions 'sines' is unknown; one of rope"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(spec, said):
    with pytest.raises(ValueError, match=said):
        mixers.layers(spec, 6)


def test_a_layer_has_transformers_word_for_it():
    words = {"softmax": "full_attention", "softmax+rope": "full_attention", "local": "sliding_attention"}
    assert {name: mixers.layer_type(name) for name in words} == words
    assert mixers.layer_type("cosformer") == mixers.layer_type("elu") == "linear_attention"
