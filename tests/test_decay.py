"""Decay: one vocabulary and one ladder everywhere, whose numbers no cast, load or empty memory changes."""

import copy
import math

import pytest
import torch
from conftest import toy_config, toy_model
from torch import nn
from torch.testing import assert_close

from cosformer import CosformerAttention, MixerAttention, mixers
from cosformer.decay import Decay, ladder

HEADS, SPAN, WIDTH = 4, 128, 32
EVERY = [0.25, "ladder", "gated", [0.5, 0.1, 0.02, 0.0]]


def decay(spec, **options) -> Decay:
    return Decay(spec, heads=HEADS, span=SPAN, width=WIDTH, **options)


def start(made: Decay) -> torch.Tensor:
    """The initial rates of a decay; a gate's are the same for any input."""
    rates = made.rates(torch.randn(1, 2, WIDTH, dtype=next(made.parameters(), torch.ones(())).dtype))
    return rates[0, :, 0] if rates.ndim == 3 else rates


def of(model) -> list[Decay]:
    return [module for module in model.modules() if isinstance(module, Decay)]


def test_the_ladder_is_geometric_from_a_quarter_to_sixteen_spans():
    rates = torch.tensor(ladder(5, 4096), dtype=torch.float64)
    assert_close(rates[[0, -1]], torch.tensor([1 / 4, 1 / 65_536], dtype=torch.float64))
    assert_close(rates[1:] / rates[:-1], (rates[1] / rates[0]).expand(4))
    assert ladder(1, 4096) == [0.25]


@pytest.mark.parametrize("span", [2, 50, SPAN])
def test_one_ladder_everywhere(span):
    """The module, the mixer, a gate's start, the interface and the config have the same numbers."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    from cosformer.hf import CosformerForCausalLM, interface

    want = torch.tensor(ladder(HEADS, span))
    sizes = {"heads": HEADS, "head_dim": WIDTH // HEADS, "max_length": span}
    attention = CosformerAttention(WIDTH, HEADS, decay="ladder", horizon=span)
    by_name = MixerAttention(WIDTH, HEADS, mixer="cosformer-ladder", max_length=span)
    llama = LlamaConfig(max_position_embeddings=span, cosformer={"decay": "ladder"})
    wide = LlamaConfig(max_position_embeddings=999, cosformer={"decay": "ladder", "horizon": span})
    config = toy_config(CosformerForCausalLM, mixer="cosformer-ladder", max_position_embeddings=span)
    model = CosformerForCausalLM(config)
    found = {
        "decay": start(Decay("ladder", heads=HEADS, span=span, width=WIDTH)),
        "gate": start(Decay("gated", heads=HEADS, span=span, width=WIDTH)),
        "mixer": start(mixers.build("cosformer", **sizes, decay="ladder").decay),
        "horizon": start(mixers.build("cosformer-ladder", **sizes | {"max_length": 999}, horizon=span).decay),
        "attention": start(*of(attention)),
        "mixer attention": start(*of(by_name)),
        "interface": interface.self_options(llama, heads=HEADS, device=torch.device("cpu"))["decay"],
        "option": interface.self_options(wide, heads=HEADS, device=torch.device("cpu"))["decay"],
    } | {f"layer {i} of a model": start(made) for i, made in enumerate(of(model))}
    assert len(found) == 8 + config.num_hidden_layers
    for where, rates in found.items():
        assert torch.equal(rates, want), where


@pytest.mark.parametrize("spec", EVERY, ids=str)
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "float"])
def test_constants_are_not_cast(spec, cast):
    made, want = decay(spec), start(decay(spec))
    assert torch.equal(start(getattr(made, cast)()).float(), want)
    assert made.constant.dtype == torch.float32
    assert torch.equal(start(nn.ModuleList([made]).bfloat16().float()[0]), want)


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_constants_survive_empty_memory(spec):
    """Deferred initialisation: made on meta, given memory, then filled in by a checkpoint or reset."""
    made = decay(spec).to("meta")
    assert made.constant.is_meta
    made = made.to_empty(device="cpu")
    assert torch.equal(made.constant, decay(spec).constant)
    for module in made.modules():  # as torch does, module by module
        module.reset_parameters()
    assert torch.equal(start(made), start(decay(spec)))


@pytest.mark.parametrize("layer", [{}, {"short_conv": 0, "qk_norm": False}], ids=["whole", "bare"])
@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_a_module_made_on_meta_takes_the_tensors_of_a_checkpoint(spec, layer):
    options = {"horizon": SPAN, "decay": spec, "batch_first": True, **layer}
    real, x = CosformerAttention(WIDTH, HEADS, **options), torch.randn(2, 9, WIDTH)
    with torch.device("meta"):
        made = CosformerAttention(WIDTH, HEADS, **options)
    made.load_state_dict(real.state_dict(), assign=True)
    assert torch.equal(made(x, x, x)[0], real(x, x, x)[0])


def test_learned_rates_are_reset_too():
    made = decay("ladder", learn=True).to("meta").to_empty(device="cpu")
    made.reset_parameters()
    assert_close(made.rates(), torch.tensor(ladder(HEADS, SPAN)))


def test_constants_are_not_saved_and_not_shared():
    made = decay("ladder")
    assert not made.state_dict()
    other = copy.deepcopy(made)
    other.constant.zero_()
    assert torch.equal(made.rates(), torch.tensor(ladder(HEADS, SPAN)))


def test_learned_rates_stay_positive_and_learn():
    made = decay(0.25, learn=True)
    assert_close(made.rates(), torch.full((HEADS,), 0.25))
    (made.rates() * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert_close(made.log_rates.grad, 0.25 * torch.tensor([1.0, 2.0, 3.0, 4.0]))  # d rate / d log rate = rate
    with torch.no_grad():
        made.log_rates.sub_(50.0)
    assert (made.rates() > 0).all()
    assert list(made.state_dict()) == ["log_rates"]
    assert decay(0.25, learn=True).double().rates().dtype == torch.float64


def test_a_gate_is_the_formula_and_forgets_nothing_where_it_is_masked():
    made, x = decay("gated"), torch.randn(2, 7, WIDTH)
    made.gate.weight.data.normal_(std=0.1)
    made.gate.bias.data.normal_()
    rungs, gate = ladder(HEADS, SPAN), made.gate
    want = torch.stack([rungs[h] * torch.exp(x @ gate.weight[h] + gate.bias[h]) for h in range(HEADS)], 1)
    assert_close(made.rates(x), want)
    mask = torch.arange(7) < torch.tensor([7, 4])[:, None]
    x[1, 4:] = math.nan
    rates = made.rates(x, mask)
    assert_close(rates[0], want[0])
    assert_close(rates[1, :, :4], want[1, :, :4])
    assert (rates[1, :, 4:] == 0).all()
    rates.sum().backward()
    assert made.rates(1000 * torch.randn(2, 7, WIDTH)).isfinite().all()
    assert made.double().rates(torch.randn(2, 7, WIDTH).double()).dtype == torch.float64


def test_a_gate_says_what_it_reads():
    with pytest.raises(ValueError, match='decay="gated" reads its rates from the layer.s input; pass x'):
        decay("gated").rates()
    with pytest.raises(
        ValueError, match=r"x must be \(batch, length, 32\), .*; got .* of shape \(2, 7, 31\)"
    ):
        decay("gated").rates(torch.randn(2, 7, 31))


def test_no_decay_has_no_rates():
    made = decay(None)
    assert made.rates() is None and not made.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixer", ["cosformer", "cosformer-ladder"])
def test_a_loaded_model_has_the_numbers_of_the_new_one(mixer, dtype, tmp_path):
    """transformers makes the model on meta and casts it: what is not saved must be filled in again."""
    pytest.importorskip("transformers")
    from cosformer.hf import CosformerForCausalLM

    toy_model(CosformerForCausalLM, mixer=mixer, horizon=100).save_pretrained(tmp_path)
    loaded = CosformerForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert len(of(loaded)) == 2
    for made in of(loaded):
        assert torch.equal(made.constant, torch.tensor(ladder(HEADS, 100)))


def test_learned_rates_are_saved_with_a_model(tmp_path):
    pytest.importorskip("transformers")
    from cosformer.hf import CosformerForCausalLM

    options = {"mixer": "cosformer-ladder", "mixer_options": {"learn_decay": True}}
    model = toy_model(CosformerForCausalLM, **options)
    model.save_pretrained(tmp_path)
    loaded = CosformerForCausalLM.from_pretrained(tmp_path)
    for a, b in zip(of(model), of(loaded), strict=True):
        assert torch.equal(a.rates(), b.rates())
        assert not torch.allclose(a.rates(), torch.tensor(ladder(HEADS, SPAN)))
