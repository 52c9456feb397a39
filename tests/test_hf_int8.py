"""Weights in int8: rounded to nearest, read by the kernel as torch reads them, or refused."""

import pytest
import torch
from conftest import RUNNING
from torch import nn

pytest.importorskip("transformers")

from cosformer.hf import (
    CosformerConfig,
    CosformerEncoderConfig,
    CosformerForCausalLM,
    CosformerForMaskedLM,
    step,
    to_int8,
)
from cosformer.hf.int8 import Int8Linear

SIZES = {"vocab_size": 50, "hidden_size": 36, "intermediate_size": 45, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 3, "max_position_embeddings": 64}


def model(**fields) -> CosformerForCausalLM:
    torch.manual_seed(0)
    return CosformerForCausalLM(CosformerConfig(**(SIZES | fields))).eval()


@pytest.mark.parametrize("bias", [False, True])
def test_is_the_nearest_of_255_numbers_a_row(bias):
    torch.manual_seed(1)
    linear = nn.Linear(37, 11, bias=bias)
    with torch.no_grad():
        linear.weight[3] = 0  # a row whose largest value is 0
        linear.weight[4] *= 1e-30
    rounded, x = Int8Linear(linear), torch.randn(5, 37)
    back = rounded.weight * rounded.scales[:, None]
    assert rounded.weight.dtype == torch.int8 and rounded.weight.abs().amax(1)[[0, 4]].tolist() == [127, 127]
    assert ((back - linear.weight).abs() <= 0.501 * rounded.scales[:, None]).all()
    wanted = nn.functional.linear(x, back, linear.bias)
    torch.testing.assert_close(rounded(x), wanted)


@pytest.mark.skipif("native" not in RUNNING, reason="the native kernel is not built")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mixer": "cosformer*1, softmax+rope"},
        {"attention_bias": True, "mlp_bias": True, "output_gate": True},
    ],
    ids=["plain", "hybrid", "biases and gate"],
)
@torch.no_grad()
def test_the_kernel_reads_what_torch_reads(monkeypatch, fields, dtype, rows):
    it = to_int8(model(**fields).to(dtype))
    ids = torch.randint(50, (rows, 12))
    taken, at_once = [], step.Ready.logits
    monkeypatch.setattr(step.Ready, "logits", lambda *args: taken.append(1) or at_once(*args))
    cache = it(ids[:, :5], use_cache=True).past_key_values
    found = torch.cat([it(token, past_key_values=cache).logits for token in ids[:, 5:].split(1, 1)], 1)
    assert len(taken) == 7  # tokens, each from id to logits
    wanted = it(ids).logits[:, 5:]
    tolerance = 2e-5 if dtype == torch.float32 else 0.05
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


@torch.no_grad()
def test_stays_near_the_model_and_takes_a_quarter_of_its_bytes():
    it, ids = model(hidden_size=192, intermediate_size=512), torch.randint(50, (2, 30))
    linears = [m for m in it.modules() if type(m) is nn.Linear]
    bytes_before, before = sum(m.weight.nbytes for m in linears), it(ids).logits
    to_int8(it)
    rounded = [m for m in it.modules() if isinstance(m, Int8Linear)]
    assert len(rounded) == len(linears) == 2 * 7 + 1
    assert sum(m.weight.nbytes + m.scales.nbytes for m in rounded) < 0.27 * bytes_before
    assert 0 < (it(ids).logits - before).abs().max() <= 0.02 * before.abs().max()
    assert it.get_input_embeddings().weight.dtype == torch.float32
    text = it.generate(ids, max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    assert text.shape == (2, 33)


def test_what_cannot_be_done_is_said(tmp_path):
    encoder = CosformerForMaskedLM(CosformerEncoderConfig(**SIZES))
    with pytest.raises(
        TypeError, match="model is a CosformerForMaskedLM; to_int8 takes a CosformerForCausalLM"
    ):
        to_int8(encoder)
    it = model()
    with torch.no_grad():
        it.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="lm_head.weight holds NaN or infinity"):
        to_int8(it)
    assert not any(isinstance(m, Int8Linear) for m in it.modules())  # all or nothing
    with pytest.raises(RuntimeError, match="weights in int8 are not saved: save the model before to_int8"):
        to_int8(model()).save_pretrained(tmp_path)
    with pytest.raises(
        RuntimeError, match="weights in int8 cannot be loaded into: load the model before to_int8"
    ):
        to_int8(model()).load_state_dict(model().state_dict())


def test_tied_weights_part():
    tied = to_int8(model(tie_word_embeddings=True))
    before = tied(ids := torch.arange(1, 9)[None]).logits
    tied.tie_weights()
    assert torch.equal(tied(ids).logits, before)
