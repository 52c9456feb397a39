"""attn_implementation="cosformer:NAME": the registry's mixers inside transformers' architectures."""

import pytest
import torch
from conftest import TOY, TOY_DECODER, VOCAB, token_ids

pytest.importorskip("transformers")

import transformers as tf

from cosformer import mixers
from cosformer.hf import attach

LENGTH = 16


def build(causal: bool):
    torch.manual_seed(0)
    if causal:
        return tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**TOY_DECODER)).eval()
    return tf.AutoModelForMaskedLM.from_config(tf.BertConfig(**TOY, attention_probs_dropout_prob=0.0)).eval()


def ids():
    return token_ids(length=LENGTH)


@pytest.mark.parametrize("causal", [True, False], ids=["llama", "bert"])
@pytest.mark.parametrize("name", mixers.names())
def test_every_mixer_by_name(name, causal):
    if mixers.build(name, heads=1, head_dim=1, max_length=1).reads_input:
        with pytest.raises(
            ValueError, match=f"mixer '{name}' reads the layer's input, which transformers hands"
        ):
            attach(build(causal), name)
        return
    model = attach(build(causal), name)
    mixer = next(m for m in model.modules() if isinstance(m, mixers.Mixer))
    admitted = mixer.causal if causal else mixer.bidirectional
    kwargs = {"use_cache": False} if causal else {}
    if admitted is not True:
        with pytest.raises(ValueError, match="does not do"):
            model(ids(), **kwargs)
        return
    logits = model(ids(), **kwargs).logits
    assert logits.isfinite().all()
    if causal:
        changed = ids()
        changed[:, -1] = 3 + (changed[:, -1] - 2) % (VOCAB - 3)
        torch.testing.assert_close(
            model(changed, **kwargs).logits[:, :-1], logits[:, :-1], atol=1e-4, rtol=1e-3
        )


def test_softmax_as_a_mixer_is_softmax():
    for causal in (True, False):
        model, kwargs = build(causal), {"use_cache": False} if causal else {}
        model.set_attn_implementation("sdpa")
        keep = torch.ones_like(ids())
        keep[1, 10:] = 0
        want = model(ids(), attention_mask=keep, **kwargs).logits
        got = attach(model, "softmax")(ids(), attention_mask=keep, **kwargs).logits
        torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(got[1, :10], want[1, :10], atol=1e-5, rtol=1e-4)


def test_a_mixers_parameters_are_the_models():
    model = attach(build(False), "linformer")
    model(ids()).logits.square().mean().backward()
    found = {n: p for n, p in model.named_parameters() if ".mixer." in n}
    assert found and all(p.grad is not None and p.grad.any() for p in found.values())
    assert any(".mixer." in n for n in model.state_dict())


def test_a_mixer_with_positions_or_registered_later_can_be_attached():
    turned = attach(build(False), "elu+sine_spe")(ids()).logits
    assert not torch.allclose(turned, attach(build(False), "elu")(ids()).logits, atol=1e-3)


def test_errors_name_the_cause():
    model = build(True)
    with pytest.raises(
        ValueError, match=r'no mixer .performer.; attach it: cosformer.hf.attach\(model, "performer"\)'
    ):
        model.set_attn_implementation("cosformer:performer")
        model(ids())
    with pytest.raises(ValueError, match="unknown mixer 'nonesuch'"):
        attach(build(True), "nonesuch")
    attach(model, "performer")
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(ids(), max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    assert model.generate(
        ids(), max_new_tokens=3, pad_token_id=0, eos_token_id=None, use_cache=False
    ).shape == (2, LENGTH + 3)


def test_an_architecture_that_does_not_call_the_interface_is_refused():
    config = tf.DebertaV2Config(**TOY)
    with pytest.raises(ValueError, match="DebertaV2Model has no layer that calls transformers' attention"):
        attach(tf.AutoModel.from_config(config), "performer")
