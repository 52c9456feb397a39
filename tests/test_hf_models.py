"""The Cosformer model types: what they compute, with every mixer, padded and packed."""

import math

import pytest
import torch
from conftest import TOY_DECODER, TOY_SEQ2SEQ, VOCAB, token_ids, toy_config, toy_mixer, toy_model

pytest.importorskip("transformers")

import transformers as tf

import cosformer.hf as hf
from cosformer import mixers, reference
from cosformer.hf import stack
from cosformer.mixers import kernel

LENGTH = 17
HYBRID = {"mixer": "cosformer, softmax"}
CAUSAL, MASKED, SEQ2SEQ = (
    hf.CosformerForCausalLM,
    hf.CosformerForMaskedLM,
    hf.CosformerForConditionalGeneration,
)
headed = pytest.mark.parametrize("kind", [CAUSAL, MASKED, SEQ2SEQ], ids=lambda c: c.__name__)
alone_or_hybrid = pytest.mark.parametrize("fields", [{}, HYBRID], ids=["linear", "hybrid"])


def run(model, x=None, **kwargs):
    x = token_ids() if x is None else x
    if model.config.is_encoder_decoder:
        kwargs.setdefault("decoder_input_ids", x[:, :9])
    return model(x, **kwargs)[0]


# What is computed


@headed
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mixer": "cosformer-ladder", "horizon": 40, "output_gate": True},
        {"mixer": "cosformer-paper"},
        {"mixer": "cosformer-paper", "cross_mixer": "cosformer-paper"},
        {"horizon": math.inf, "short_conv": 0, "qk_norm": False},
    ],
    ids=str,
)
def test_logits_are_the_definitions(kind, fields, monkeypatch):
    if kind is not SEQ2SEQ and "cross_mixer" in fields:
        pytest.skip("it has no cross attention")
    model = toy_model(kind, **fields).double()
    ours = run(model, use_cache=False)

    def quadratic(q, k, v, *, relu, signed, backend, decay=None, **options):
        assert relu and not signed
        exact = None if decay is None else decay.double()  # else the definition would multiply in float32
        return reference.attention(q, k, v, decay=exact, **options)

    def read(q, source, **options):
        k, v, key_mask = source
        return quadratic(q, k, v, key_mask=key_mask, **options)

    monkeypatch.setattr(kernel, "linear_attention", quadratic)
    monkeypatch.setattr(kernel, "linear_state", lambda k, v, *, key_mask, **_: (k, v, key_mask))
    monkeypatch.setattr(kernel, "linear_read", read)
    torch.testing.assert_close(run(model, use_cache=False), ours, atol=1e-9, rtol=1e-9)
    monkeypatch.setattr(kernel, "linear_attention", lambda q, k, v, **_: q * 0)
    assert (run(model, use_cache=False) - ours).abs().max() > 1e-3


@headed
def test_a_new_model_starts_at_the_ladder(kind):
    torch.manual_seed(0)
    model = kind(toy_config(kind)).eval()
    others = {
        name: kind(toy_config(kind, mixer=name)).eval() for name in ("cosformer-ladder", "cosformer-paper")
    }
    for other in others.values():
        other.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(run(model), run(others["cosformer-ladder"]))
    assert (run(model) - run(others["cosformer-paper"])).abs().max() > 1e-3


def test_relu_is_cosformer_with_an_infinite_horizon():
    a, b = toy_model(CAUSAL, mixer="relu"), toy_model(CAUSAL, mixer="cosformer-paper", horizon=math.inf)
    b.load_state_dict(a.state_dict())
    torch.testing.assert_close(run(a), run(b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "fields", "theirs", "config", "sizes"),
    [
        (CAUSAL, {"mixer": "softmax+rope"}, tf.LlamaForCausalLM, tf.LlamaConfig, TOY_DECODER),
        (SEQ2SEQ, {"mixer": "softmax"}, tf.BartForConditionalGeneration, tf.BartConfig, TOY_SEQ2SEQ),
    ],
    ids=["llama", "bart"],
)
def test_with_softmax_it_is_the_architecture_itself(kind, fields, theirs, config, sizes):
    ours, original = toy_model(kind, **fields), theirs(config(**sizes)).eval()
    original.load_state_dict(ours.state_dict())
    keep = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [12]])).long()
    for given in ({}, {"attention_mask": keep}):
        got, want = run(ours, **given), run(original, **given)
        if kind is not SEQ2SEQ and given:
            got, want = got[keep.bool()], want[keep.bool()]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@headed
@pytest.mark.parametrize("name", mixers.names())
def test_every_mixer_trains_or_says_why_not_and_survives_a_save(kind, name, tmp_path):
    mixer = toy_mixer(name)
    needed = {CAUSAL: [mixer.causal], MASKED: [mixer.bidirectional]}
    needed = needed.get(kind, [mixer.causal, mixer.bidirectional, mixer.cross])
    if kind is SEQ2SEQ and (name.startswith("cosformer") or name == "local"):
        needed = []  # cross attention uses relu, or softmax
    if any(admitted is not True for admitted in needed):
        with pytest.raises(ValueError, match=f"mixer '{name}' does not do"):
            toy_model(kind, mixer=name)
        return
    model = toy_model(kind, mixer=name)
    assert model.config.use_cache is (mixer.streaming is True and kind is not MASKED)
    batch = {"input_ids": token_ids(), "labels": token_ids()}
    model(**batch).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert all(grad is None or grad.isfinite().all() for grad in grads.values())
    values = [grad for n, grad in grads.items() if ("v_proj" in n or "value" in n) and "weight" in n]
    assert values and all(grad.abs().max() > 0 for grad in values)
    model.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path).eval()
    assert torch.equal(again(**batch).logits, model(**batch).logits)


@headed
def test_gradients_reach_every_parameter(kind):
    model = toy_model(kind, output_gate=True, **HYBRID).train()
    run(model).square().mean().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_the_options_reach_the_mixers_that_have_them():
    model = toy_model(CAUSAL, mixer="performer, elu", mixer_options={"features": 5})
    performer, elu = (layer.self_attn.interior.mixer for layer in model.model.layers)
    assert performer.projection.shape == (5, 8) and not hasattr(elu, "projection")


# Padded and packed


@headed
@alone_or_hybrid
def test_padded_equals_alone(kind, fields):
    model, x = toy_model(kind, output_gate=True, **fields).double(), token_ids()
    keep = torch.ones_like(x)
    if kind is CAUSAL:
        keep[1, :5] = 0
        positions = (keep.cumsum(-1) - 1).clamp_min(0)
        padded = run(model, x, attention_mask=keep, position_ids=positions)[1, 5:]
        alone = run(model, x[1:, 5:])[0]
    else:
        keep[1, 12:] = 0
        target = {"decoder_input_ids": x[1:, :9]} if kind is SEQ2SEQ else {}
        padded, alone = run(model, x, attention_mask=keep)[1], run(model, x[1:, :12], **target)[0]
        padded = padded if kind is SEQ2SEQ else padded[:12]
    torch.testing.assert_close(padded, alone, atol=1e-9, rtol=1e-9)


def spied(model) -> list[tuple]:
    """The shapes of what the last block will be given."""
    shapes: list[tuple] = []
    model.model.layers[-1].register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    return shapes


ROWS = torch.tensor([150, 90, 0, 70])  # tokens; one row has none


@pytest.mark.parametrize(
    ("kind", "mixer"),
    [
        *((kind, mixer) for kind in (CAUSAL, MASKED) for mixer in ("cosformer", "cosformer, softmax+rope")),
        (MASKED, "cosformer-paper"),
        (MASKED, "linformer"),
        (MASKED, "performer"),
    ],
)
def test_padding_is_left_out_and_changes_nothing(kind, mixer, monkeypatch):
    fields = {"mixer": mixer, "max_position_embeddings": 150}
    model, x = toy_model(kind, **fields).double().train(), token_ids(4, 150)
    keep = torch.arange(150) < ROWS[:, None]
    labels, shapes = x.masked_fill(~keep, -100), spied(model)
    found = []
    for padded in (False, True):
        if padded:
            monkeypatch.setattr(stack, "without_padding", lambda mask: None)
        hidden = model.model(x, attention_mask=keep).last_hidden_state
        model.zero_grad()
        model(x, attention_mask=keep, labels=labels).loss.backward()
        found.append((hidden, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert shapes == [(1, 310, 32)] * 2 + [(4, 150, 32)] * 2
    (out, gradients), (want, wanted) = found
    torch.testing.assert_close(out[keep], want[keep], rtol=1e-9, atol=1e-9)
    assert not out[~keep].any()
    torch.testing.assert_close(gradients, wanted, rtol=1e-7, atol=1e-9)


def test_padding_stays_where_leaving_it_out_would_not_pay_or_not_be_the_same():
    model, x = toy_model(MASKED, max_position_embeddings=150), token_ids(4, 150)
    shapes = spied(model)
    keep = torch.arange(150) < ROWS[:, None]
    gap = keep.clone()
    gap[0, 40:50] = False  # distance, to a mixer
    given: list[dict] = [{"attention_mask": gap}, {"attention_mask": keep.flip(1)}]
    given += [{"attention_mask": keep, "output_hidden_states": True}]
    given += [{"attention_mask": keep, "return_dict": False}]
    given += [{"attention_mask": torch.arange(150) < torch.tensor([[150], [149], [150], [120]])}]  # little
    given += [{"attention_mask": torch.arange(150) < torch.tensor([[150], [9], [9], [9]])}]  # short rows
    for kwargs in given:
        model.model(x, **kwargs)
    model.config.return_dict = False
    assert isinstance(model.model(x, attention_mask=keep), tuple)
    assert shapes == [(4, 150, 32)] * (len(given) + 1)


PACKED = torch.tensor([[*range(7), *range(10)], [*range(3), *range(1), *range(13)]])
PARTS = [(0, 0, 7), (0, 7, 17), (1, 0, 3), (1, 3, 4), (1, 4, 17)]  # row, begin, end


@pytest.mark.parametrize("kind", [CAUSAL, MASKED], ids=lambda c: c.__name__)
@pytest.mark.parametrize("positions", ["learned", "none"])
@pytest.mark.parametrize(
    "mixer",
    ["cosformer", "cosformer-paper", "cosformer-ladder", "softmax+rope", "cosformer, softmax", "performer"],
)
def test_packed_rows_are_the_documents_alone(kind, positions, mixer):
    model, x = toy_model(kind, positions=positions, mixer=mixer).double(), token_ids()
    packed = model(x, position_ids=PACKED).logits  # the default cache gives way
    for row, begin, end in PARTS:
        alone = model(x[row : row + 1, begin:end]).logits[0]
        torch.testing.assert_close(packed[row, begin:end], alone, rtol=1e-9, atol=1e-9)
    whole = model(x).logits[0, 7:]
    assert not torch.allclose(whole, packed[0, 7:], rtol=1e-3, atol=1e-3)


def test_boundaries_of_packed_rows_may_be_given():
    model, x = toy_model(CAUSAL).double(), token_ids(1)
    want = model(x, position_ids=PACKED[:1], use_cache=False).logits
    cu = torch.tensor([0, 7, 17], dtype=torch.int32)
    torch.testing.assert_close(model(x, cu_seq_lens_q=cu, use_cache=False).logits, want)
    with pytest.raises(ValueError, match="use_cache=True with packed sequences"):
        model(x, position_ids=PACKED[:1], use_cache=True)
    for beside in ({"attention_mask": torch.ones_like(x)}, {"past_key_values": model.new_cache()}):
        with pytest.raises(ValueError, match=f"cu_seq_lens_q marks packed .* leave {next(iter(beside))} out"):
            model(x, cu_seq_lens_q=cu, **beside)
    with pytest.raises(ValueError, match="position_ids mark packed sequences, and a cache holds one"):
        model(x, position_ids=PACKED[:1], past_key_values=model.new_cache())


@pytest.mark.parametrize("kind", [CAUSAL, MASKED], ids=lambda c: c.__name__)
def test_learned_positions_follow_the_boundaries(kind):
    model, x = toy_model(kind, positions="learned").double(), token_ids()
    cu = torch.tensor([0, 7, 17, 20, 21, 34], dtype=torch.int32)
    wanted = model(x, position_ids=PACKED, use_cache=False).logits
    torch.testing.assert_close(model(x, cu_seq_lens_q=cu, use_cache=False).logits, wanted)


def test_positions_go_on_from_the_cache():
    model, x = toy_model(CAUSAL), token_ids(1, 17)
    cache = model(x[:, :10], use_cache=True).past_key_values
    for begin in (0, 9, 99):
        at = torch.arange(begin, begin + 7)[None]
        with pytest.raises(
            ValueError, match=rf"position_ids must go on from the 10 tokens .* at \[{begin}\]"
        ):
            model(x[:, 10:], past_key_values=cache, position_ids=at)
    out = model(x[:, 10:], past_key_values=cache, position_ids=torch.arange(10, 17)[None]).logits
    torch.testing.assert_close(out, model(x).logits[:, 10:])


def test_one_text_without_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"input_ids must be \(batch, length\); got shape \(17,\)"):
        toy_model(CAUSAL)(token_ids()[0])


@pytest.mark.parametrize("kind", [CAUSAL, MASKED], ids=lambda c: c.__name__)
def test_a_text_is_given_once(kind):
    model, embeds = toy_model(kind), torch.randn(1, 17, 32)
    for ids, given, told in ((token_ids(1, 17), embeds, "both"), (None, None, "neither")):
        with pytest.raises(ValueError, match=f"input_ids or inputs_embeds, one of them; got {told}"):
            model(ids, inputs_embeds=given)


@pytest.mark.parametrize("kind", [CAUSAL, MASKED], ids=lambda c: c.__name__)
@pytest.mark.parametrize("length", [20, 100])
def test_a_mask_of_other_rows_is_refused(kind, length):
    model, x = toy_model(kind, max_position_embeddings=128), token_ids(2, length)
    mask = torch.ones(1, length)
    mask[:, length // 2 :] = 0
    for rows, given in ((x, mask), (x[:1], mask.expand(2, -1))):
        with pytest.raises(ValueError, match=f"attention_mask must have {len(rows)} rows"):
            model(rows, attention_mask=given)


def test_a_horizon_of_the_calls_own_length_does_not_depend_on_packing():
    options = {"mixer": "cosformer-paper", "mixer_options": {"horizon": "length"}}
    model, x = toy_model(MASKED, max_position_embeddings=128, **options), token_ids(2, 100)
    keep = torch.arange(100) < torch.tensor([[100], [70]])
    alone, states = (
        model(x, attention_mask=keep, output_hidden_states=more).logits for more in (False, True)
    )
    torch.testing.assert_close(alone[keep], states[keep])


# Positions


@pytest.mark.parametrize(
    ("kind", "mixer", "wanted"),
    [
        (CAUSAL, "cosformer", "none"),
        (CAUSAL, "cosformer-hybrid", "none"),
        (CAUSAL, "cosformer-paper", "learned"),
        (CAUSAL, "softmax", "learned"),
        (CAUSAL, "softmax+rope", "none"),
        (MASKED, "cosformer", "learned"),
        (MASKED, "softmax+rope", "none"),
        (SEQ2SEQ, "cosformer", "learned"),
    ],
)
def test_positions_are_learned_where_nothing_else_says_where_a_token_is(kind, mixer, wanted):
    assert toy_config(kind, mixer=mixer).positions == wanted


def test_a_learned_position_tells_equal_tokens_apart_and_has_an_end():
    model = toy_model(CAUSAL, mixer="softmax")
    a, b = model(torch.full((1, 6), 7)).logits[0, [1, 5]]
    assert not torch.allclose(a, b, atol=1e-3)
    longest = model.config.max_position_embeddings
    said = f"has {longest + 1} tokens, but max_position_embeddings is {longest} and each position has"
    with pytest.raises(ValueError, match=said):
        model(torch.ones(1, longest + 1, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize(
    "fields", [{}, {"horizon": math.inf}, {"mixer": "softmax"}, {"mixer": "elu"}], ids=str
)
def test_an_encoder_decoders_text_past_its_positions_is_an_error(fields):
    model = toy_model(SEQ2SEQ, max_position_embeddings=24, **fields)
    fits, longer = token_ids(length=24), token_ids(length=25)
    model(fits, decoder_input_ids=fits)
    with pytest.raises(ValueError, match="input_ids has 25 tokens, but max_position_embeddings is 24"):
        model(longer, decoder_input_ids=fits)
    with pytest.raises(
        ValueError, match="decoder_input_ids has 25 tokens, but max_position_embeddings is 24"
    ):
        model(fits, decoder_input_ids=longer)
    cache = model.new_cache()
    model(fits, decoder_input_ids=fits[:, :20], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="decoder_input_ids has 25 tokens, 20 of them in the cache, but"):
        model(fits, decoder_input_ids=fits[:, :5], past_key_values=cache, use_cache=True)


def test_logits_to_keep_and_loss_count():
    model, x = toy_model(CAUSAL), token_ids()
    torch.testing.assert_close(model(x, logits_to_keep=1).logits, model(x).logits[:, -1:])
    mean = model(x, labels=x).loss
    counted = model(x, labels=x, num_items_in_batch=torch.tensor(64)).loss
    torch.testing.assert_close(counted, mean * 2 * (LENGTH - 1) / 64)
    assert model(x).logits.shape == (2, LENGTH, VOCAB)
