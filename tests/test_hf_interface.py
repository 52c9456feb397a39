"""attn_implementation="cosformer" in transformers' own architectures, judged by the definition."""

import copy
import math
import re

import pytest
import torch
from conftest import TOY, TOY_SEQ2SEQ, VOCAB, moved

pytest.importorskip("transformers")

import transformers as tf
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

import cosformer.hf
from cosformer import reference
from cosformer.decay import ladder
from cosformer.hf.reach import most_tokens

WIDTH, HEADS, POSITIONS, LENGTH = TOY["hidden_size"], 4, TOY["max_position_embeddings"], 11
NARROW = {
    key: TOY[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "initializer_range")
}

CONFIGS = {
    "gpt2": tf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=2,
        n_head=HEADS,
        n_positions=POSITIONS,
        initializer_range=0.2,
        attn_pdrop=0.0,
    ),
    "llama": tf.LlamaConfig(**TOY, num_key_value_heads=2),
    "qwen3": tf.Qwen3Config(**TOY, num_key_value_heads=2, head_dim=8),
    "bert": tf.BertConfig(**TOY, attention_probs_dropout_prob=0.0),
    "roberta": tf.RobertaConfig(**TOY, attention_probs_dropout_prob=0.0),
    "bart": tf.BartConfig(**TOY_SEQ2SEQ),
    "vit": tf.ViTConfig(**NARROW, intermediate_size=48, image_size=16, patch_size=4),
}
try:
    CONFIGS["modernbert"] = tf.ModernBertConfig(**TOY, layer_types=["full_attention"] * 2)
except Exception:  # transformers 5.10 cannot build a ModernBERT without local layers
    assert tf.__version__.startswith("5.10.")
AUTO = {
    "gpt2": tf.AutoModelForCausalLM,
    "llama": tf.AutoModelForCausalLM,
    "qwen3": tf.AutoModelForCausalLM,
    "bart": tf.AutoModelForSeq2SeqLM,
    "vit": tf.AutoModelForImageClassification,
}
CAUSAL = ("gpt2", "llama", "qwen3")
EVERY = list(CONFIGS)
PADDED = [name for name in CONFIGS if name != "vit"]


def build(name: str, implementation: str = "cosformer", **options):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    if options:
        config.cosformer = options
    auto = AUTO.get(name, tf.AutoModelForMaskedLM)
    return moved(auto.from_config(config, attn_implementation=implementation).double()).eval()


def inputs(name: str, batch: int = 2) -> dict:
    torch.manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, dtype=torch.float64)}
    ids = torch.randint(3, VOCAB, (batch, LENGTH))
    return {"input_ids": ids} | (
        {"decoder_input_ids": torch.randint(3, VOCAB, (batch, 7))} if name == "bart" else {}
    )


def quadratic(module, query, key, value, attention_mask, **kwargs):
    """The layer's attention by definition; what is causal or cross comes from the test's own table."""
    kind = module.kind
    options = {"horizon": math.inf} if kind == "cross" else {"horizon": module.horizon, "decay": module.decay}
    mask = None if attention_mask is None else attention_mask.bool()
    out = reference.attention(query, key, value, causal=kind == "causal", key_mask=mask, **options)
    return out.transpose(1, 2), None


AttentionInterface.register("quadratic", quadratic)
AttentionMaskInterface.register("quadratic", flash_attention_mask)


def kind_of(name: str, path: str) -> str:
    if name in CAUSAL:
        return "causal"
    if name == "bart" and "decoder" in path:
        return "cross" if "encoder_attn" in path else "causal"
    return "both"


def judged(name: str, *, horizon: float, decay=None):
    model = build(name, "quadratic")
    for path, module in model.named_modules():
        module.kind, module.horizon, module.decay = kind_of(name, path), horizon, decay
    return model


@pytest.mark.parametrize("name", EVERY)
def test_logits_are_the_definitions(name):
    x = inputs(name)
    horizon = 17 if name == "vit" else POSITIONS
    torch.testing.assert_close(
        build(name)(**x).logits, judged(name, horizon=horizon)(**x).logits, atol=1e-9, rtol=1e-7
    )


@pytest.mark.parametrize("name", ("llama", "bert", "bart"))
def test_horizon_and_decay_come_from_the_config(name):
    x = inputs(name)
    for given, rates in (("ladder", ladder(HEADS, 40)), (some := [0.0, 0.1, 0.5, 2.0], some)):
        got = build(name, horizon=40, decay=given)(**x).logits
        exact = torch.tensor(rates).double()  # else the definition would multiply by float32 constants
        want = judged(name, horizon=40, decay=exact)(**x).logits
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-7)
    assert (got - build(name)(**x).logits).abs().max() > 1e-3


def padded_and_alone(name: str, model) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a short row inside a padded batch, and of the same row alone."""
    x, short = inputs(name), LENGTH - 4
    keep = torch.ones(2, LENGTH, dtype=torch.long)
    if name in CAUSAL:  # left padded, the side that matters: a causal row never sees what is right of it
        keep[1, :4] = 0
        positions = (keep.cumsum(-1) - 1).clamp_min(0)
        batch = model(**x, attention_mask=keep, position_ids=positions).logits[1, 4:]
        return batch, model(input_ids=x["input_ids"][1:, 4:]).logits[0]
    keep[1, short:] = 0
    x["input_ids"][1, short:] = model.config.pad_token_id  # RoBERTa counts its positions by the padding token
    alone = {"input_ids": x["input_ids"][1:, :short]}
    if name == "bart":
        alone["decoder_input_ids"] = x["decoder_input_ids"][1:]
    batch, row = model(**x, attention_mask=keep).logits[1], model(**alone).logits[0]
    return (batch, row) if name == "bart" else (batch[:short], row)


@pytest.mark.parametrize("name", PADDED)
def test_padded_equals_alone(name):
    torch.testing.assert_close(*padded_and_alone(name, build(name)), atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", PADDED)
def test_padding_needs_the_mask_interface(name):
    """The test above fails if only the attention function is registered."""
    AttentionInterface.register("maskless", cosformer.hf.interface.attention)
    batch, row = padded_and_alone(name, build(name, "maskless"))
    assert (batch - row).abs().max() > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_switching_leaves_the_weights(name):
    model, x = build(name), inputs(name)
    before, logits = copy.deepcopy(model.state_dict()), model(**x).logits
    model.set_attn_implementation("sdpa")
    softmax = model(**x).logits
    model.set_attn_implementation("cosformer")
    torch.testing.assert_close(model(**x).logits, logits, atol=0, rtol=0)
    assert (softmax - logits).abs().max() > 1e-3
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", EVERY)
def test_gradients_reach_every_parameter(name):
    model = build(name).train()
    model(**inputs(name)).logits.square().mean().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # a key's bias shifts all scores of softmax alike; here it moves them, so it has a gradient too
    unused = {"pooler", "token_type_embeddings"} if name == "roberta" else {"pooler"}
    assert not [n for n in missing if not any(word in n for word in unused)]


@pytest.mark.parametrize("name", (*CAUSAL, "bart"))
def test_generates_the_same_with_and_without_cache(name):
    model, x = build(name), inputs(name)
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "forced_eos_token_id": None,
    }
    keep = torch.ones_like(x["input_ids"])
    for beams in (1, 3):
        cached, plain = (
            model.generate(x["input_ids"], attention_mask=keep, num_beams=beams, use_cache=use, **options)
            for use in (True, False)
        )
        assert torch.equal(cached, plain)


@pytest.mark.parametrize("name", CAUSAL)
def test_left_padded_generation_equals_alone(name):
    model, ids = build(name), inputs(name)["input_ids"]
    keep = torch.ones_like(ids)
    keep[1, :4] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    batch = model.generate(ids, attention_mask=keep, **options)
    alone = model.generate(ids[1:, 4:], attention_mask=keep[1:, 4:], **options)
    assert torch.equal(batch[1:, 4:], alone)


def test_config_options_are_saved(tmp_path):
    model = build("llama", horizon=40, decay="ladder")
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="cosformer", dtype=torch.float64
    )
    assert loaded.config.cosformer == {"horizon": 40, "decay": "ladder"}
    x = inputs("llama")
    torch.testing.assert_close(loaded(**x).logits, model(**x).logits, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("implementation", ["cosformer:softmax", "cosformer"])
def test_the_scale_of_an_architecture_is_kept(implementation):
    config = tf.GraniteConfig(**TOY, num_key_value_heads=2, attention_multiplier=2.0)
    model = moved(tf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()).eval()
    x, own = inputs("llama"), model(**inputs("llama")).logits
    if implementation == "cosformer:softmax":
        attached = cosformer.hf.attach(copy.deepcopy(model), "softmax")
        torch.testing.assert_close(attached(**x).logits, own)
    else:  # whose sums divide it out
        model.set_attn_implementation(implementation)
        doubled = copy.deepcopy(model)
        for module in doubled.modules():
            if hasattr(module, "scaling"):
                module.scaling *= 2
        torch.testing.assert_close(doubled(**x).logits, model(**x).logits)


def test_the_reach_of_horizons_per_head():
    config = copy.deepcopy(CONFIGS["llama"])
    config.cosformer = {"horizon": [20, 30, 40, 50]}
    assert most_tokens(config) == 21


# What cannot be honoured is refused.


def test_refuses_a_sliding_window():
    config = tf.MistralConfig(**TOY, sliding_window=4)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="cosformer")
    with pytest.raises(ValueError, match="sliding window"):
        model(**inputs("llama"))
    local = tf.ModernBertConfig(**TOY)  # every third layer global, the others local
    with pytest.raises(ValueError, match="sliding window"):
        tf.AutoModel.from_config(local, attn_implementation="cosformer")(**inputs("bert"))


@pytest.mark.parametrize("name", ("llama", "bert", "gpt2"))
def test_refuses_a_four_dimensional_mask(name):
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    with pytest.raises(
        ValueError,
        match=r"attention_mask must be a padding mask \(batch, keys\) = \(2, 11\).*\(2, 1, 11, 11\)",
    ):
        build(name)(**inputs(name), attention_mask=mask)


def test_refuses_attention_sinks():
    config = tf.GptOssConfig(
        **TOY, num_local_experts=2, num_experts_per_tok=1, head_dim=8, layer_types=["full_attention"] * 2
    )
    with pytest.raises(ValueError, match=r"attention sinks \(s_aux\)"):
        tf.AutoModelForCausalLM.from_config(config, attn_implementation="cosformer")(**inputs("llama"))


@pytest.mark.parametrize("name", ("llama", "bert", "bart"))
def test_refuses_attention_weights(name):
    with pytest.raises(ValueError, match="output_attentions"):
        build(name)(**inputs(name), output_attentions=True)


def test_refuses_packed_positions_and_preallocated_caches():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    with pytest.raises(ValueError, match="packed"):
        build("llama")(inputs("llama", batch=1)["input_ids"], position_ids=positions, use_cache=False)
    marks = torch.tensor([0, 4, 11])
    with pytest.raises(ValueError, match=r"asks for packed sequences \(cu_seq_lens_q\)"):
        build("llama")(inputs("llama", batch=1)["input_ids"], cu_seq_lens_q=marks, use_cache=False)
    with pytest.raises(ValueError, match="dynamic cache"):
        build("llama").generate(inputs("llama")["input_ids"], cache_implementation="static", max_new_tokens=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": "gated"}, 'is "gated"; accepted are None'),
        ({"window": 3}, r"unknown \['window'\]; it may have horizon, decay"),
        ({"horizon": 5}, "11 tokens reach past the horizon of 5"),
        ({"decay": [0.1]}, r"decay must be one rate, or one per head \(4\), .* got \(0.1,\)"),
    ],
)
def test_refuses_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build("llama", **options)(**inputs("llama"))


def test_past_the_positions_is_an_error():
    longer, model = torch.randint(0, VOCAB, (1, POSITIONS + 2)), build("llama")
    said = r"130 tokens reach past the horizon of 128; .* larger horizon: config.cosformer = {'horizon': 130}"
    with pytest.raises(ValueError, match=said):
        model(longer)
    cache = model(longer[:, :-1]).past_key_values
    with pytest.raises(ValueError, match=said):
        model(longer[:, -1:], past_key_values=cache)
    model.config.cosformer = {"horizon": 130}  # as the error says
    assert model(longer).logits.isfinite().all()
    both = build("bert", horizon=LENGTH - 1)
    with pytest.raises(ValueError, match="11 tokens reach past the horizon of 10"):
        both(**inputs("bert"))
    both.config.cosformer = {"horizon": LENGTH}
    both(**inputs("bert"))


@pytest.mark.parametrize("mixer", [None, "elu"])
def test_says_once_that_dropout_is_not_applied(mixer, monkeypatch):
    said = []
    monkeypatch.setattr(cosformer.hf.interface.logger, "warning_once", said.append)
    config = copy.deepcopy(CONFIGS["bert"])
    config.attention_probs_dropout_prob = 0.25
    model = tf.AutoModel.from_config(config, attn_implementation="cosformer").train()
    if mixer is not None:
        cosformer.hf.attach(model, mixer)
    model(**inputs("bert"))
    assert "dropout of 0.25 in BertSelfAttention is not applied" in said[0]


def test_an_architecture_with_attention_of_its_own_is_refused_or_can_be_told():
    """It would use our mask, which only marks padding, for its own softmax: Bloom's would not be causal."""
    bloom = tf.BloomConfig(vocab_size=VOCAB, hidden_size=WIDTH, n_layer=2, n_head=HEADS)
    model = tf.AutoModelForCausalLM.from_config(bloom, attn_implementation="cosformer")
    with pytest.raises(ValueError, match="BloomModel does not call transformers' attention interface"):
        model(**inputs("llama"))
    deberta = tf.AutoModel.from_config(tf.DebertaV2Config(**TOY))  # asks for no mask; the docs' check tells
    deberta.set_attn_implementation("cosformer")
    assert deberta.config._attn_implementation != "cosformer"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_graph_needs_no_mask(name):
    """While tracing, transformers cannot see that positions form one sequence, and passes a pattern."""
    model, given = build(name), inputs(name)
    want = model(**given, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**given, use_cache=False).logits, want)
    packed = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(2, -1)
    with pytest.raises(RuntimeError, match="packed sequences"):
        compiled(**given, position_ids=packed, use_cache=False)
    exported = torch.export.export(model, (), given | {"use_cache": False}).module()
    torch.testing.assert_close(exported(**given, use_cache=False).logits, want)


@pytest.mark.parametrize("decay", [{"a": 1}, [[0.1], 0.1, 0.1, 0.1]], ids=str)
def test_options_of_another_kind_are_refused(decay):
    said = (
        r'config.cosformer\["decay"\] must be None, "ladder", a rate, or a list of rates, one per head; got '
    )
    with pytest.raises(TypeError, match=said + re.escape(str(decay))):
        build("llama", decay=decay)(**inputs("llama"))
    model = build("llama")
    model.config.cosformer = 3
    with pytest.raises(TypeError, match="config.cosformer must be a dict or None; got 3"):
        model(**inputs("llama"))
