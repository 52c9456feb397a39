"""The Cosformer model types with any mixer in their layers, learned or rotary positions, packed rows, pooling
and pairs.
"""

import math

import pytest
import torch

from cosformer import mixers
from cosformer.hf import (
    CosformerConfig,
    CosformerEncoderConfig,
    CosformerEncoderModel,
    CosformerForCausalLM,
    CosformerForConditionalGeneration,
    CosformerForMaskedLM,
    CosformerForPairClassification,
    CosformerForSequenceClassification,
    CosformerSeq2SeqConfig,
)

LENGTH = 24
DECODER = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
DECODER |= {"max_position_embeddings": LENGTH, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
ENCODER = {**DECODER, "hidden_dropout_prob": 0.0}
SEQ2SEQ = {
    "vocab_size": 40,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
SEQ2SEQ |= {
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "dropout": 0.0,
}
KINDS = {
    "causal": (CosformerForCausalLM, CosformerConfig, DECODER),
    "masked": (CosformerForMaskedLM, CosformerEncoderConfig, ENCODER),
    "seq2seq": (CosformerForConditionalGeneration, CosformerSeq2SeqConfig, SEQ2SEQ),
}


def build(kind: str, **fields):
    torch.manual_seed(0)
    model, config, sizes = KINDS[kind]
    return model(config(**{**sizes, **fields})).eval()


def ids(rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(5, 40, (rows, length), generator=torch.Generator().manual_seed(1))


def admitted(name: str, kind: str) -> bool:
    mixer = mixers.build(name, heads=2, head_dim=16, max_length=LENGTH)
    asks = {"causal": [{"causal": True}], "masked": [{}], "seq2seq": [{}, {"causal": True}, {"cross": True}]}[
        kind
    ]
    try:
        for ask in asks:
            mixer.refuse(**ask)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [n for n in mixers.names() if n != "cosformer"])
def test_every_mixer_trains_or_says_why_not_and_survives_a_save(kind, name, tmp_path):
    if not admitted(name, kind):
        with pytest.raises(ValueError, match=f"mixer '{name}' does not do"):
            build(kind, mixer=name)
        return
    model = build(kind, mixer=name)
    assert not model.config.use_cache and model.config.decay is None
    batch = {"input_ids": ids(), "labels": ids()}
    model(**batch).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    projections = [
        p.grad for n, p in model.named_parameters() if ("v_proj" in n or "value" in n) and "weight" in n
    ]
    assert projections and all(g.abs().max() > 0 for g in projections)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def test_relu_is_cosformer_with_an_infinite_horizon():
    a, b = build("causal", mixer="relu"), build("causal", decay=None, horizon=float("inf"))
    b.load_state_dict(a.state_dict())
    torch.testing.assert_close(a(input_ids=ids()).logits, b(input_ids=ids()).logits, rtol=1e-5, atol=1e-5)


def test_softmax_with_rope_is_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    ours, theirs = (
        build("causal", mixer="softmax", positions="rope"),
        LlamaForCausalLM(LlamaConfig(**DECODER)).eval(),
    )
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(
        ours(input_ids=ids()).logits, theirs(input_ids=ids()).logits, rtol=1e-4, atol=1e-5
    )


def test_softmax_in_the_encoder_is_bert():
    from transformers import BertConfig, BertForMaskedLM

    ours, theirs = build("masked", mixer="softmax"), BertForMaskedLM(BertConfig(**ENCODER)).eval()
    theirs.load_state_dict(ours.state_dict())
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [15]])).long()
    for given in ({}, {"attention_mask": mask}):
        got, want = ours(input_ids=ids(), **given).logits, theirs(input_ids=ids(), **given).logits
        keep = given.get("attention_mask", torch.ones_like(mask)).bool()
        torch.testing.assert_close(got[keep], want[keep], rtol=1e-4, atol=1e-5)


def test_softmax_in_the_encoder_decoder_is_bart():
    from transformers import BartConfig, BartForConditionalGeneration

    ours, theirs = (
        build("seq2seq", mixer="softmax"),
        BartForConditionalGeneration(BartConfig(**SEQ2SEQ)).eval(),
    )
    theirs.load_state_dict(ours.state_dict())
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [15]])).long()
    batch = {"input_ids": ids(), "attention_mask": mask, "labels": ids(length=9)}
    torch.testing.assert_close(ours(**batch).logits, theirs(**batch).logits, rtol=1e-4, atol=1e-5)


PACKED = torch.tensor([[*range(10), *range(14)], [*range(3), *range(1), *range(20)]])


@pytest.mark.parametrize(
    "fields", [{}, {"decay": None}, {"decay": "ladder"}, {"mixer": "softmax"}, {"mixer": "elu"}], ids=str
)
@pytest.mark.parametrize("positions", ["learned", None])
@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_packed_rows_are_the_documents_alone(kind, positions, fields):
    model, tokens = build(kind, positions=positions, **fields), ids()
    for p in model.parameters():  # gates start at zero: make rates depend on the token
        torch.nn.init.normal_(p, std=0.2) if p.ndim > 1 else None
    packed = model(input_ids=tokens, position_ids=PACKED).logits
    row, at = 0, 0
    for start, stop in ((0, 10), (10, 24), (24, 27), (27, 28), (28, 48)):
        row, at = divmod(start, LENGTH)
        alone = model(input_ids=tokens[row : row + 1, at : at + stop - start]).logits[0]
        torch.testing.assert_close(packed[row, at : at + stop - start], alone, rtol=1e-4, atol=1e-5)
    if kind == "masked" or positions is None:  # and it is not what an unpacked row gives
        assert not torch.allclose(
            model(input_ids=tokens).logits[0, 10:], packed[0, 10:], rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize(
    "fields", [{"positions": "learned"}, {"mixer": "softmax", "positions": "learned"}], ids=str
)
def test_learned_positions_generate_what_the_whole_text_gives(fields):
    model, prompt = build("causal", **fields), ids(length=5)
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    for _ in range(8):
        prompt = torch.cat([prompt, model(input_ids=prompt).logits[:, -1:].argmax(-1)], 1)
    assert made.tolist() == prompt.tolist()
    a, b = model(input_ids=torch.full((1, 6), 7)).logits[0, [1, 5]]
    assert not torch.allclose(a, b, atol=1e-5)  # the same token six times: only its position tells
    with pytest.raises(
        ValueError, match=f"position {LENGTH} has no learned vector; max_position_embeddings is {LENGTH}"
    ):
        model(input_ids=torch.ones(1, LENGTH + 1, dtype=torch.long), use_cache=False)


def test_another_mixer_takes_no_cache():
    model = build("causal", mixer="elu")
    with pytest.raises(
        ValueError, match="mixer 'elu' keeps no cache in this model; call it with use_cache=False"
    ):
        model(input_ids=ids(), use_cache=True)


def test_mean_pooling_reads_every_kept_token_and_nothing_else():
    def pooled(pooling, tokens, mask):
        torch.manual_seed(0)
        model = CosformerForSequenceClassification(
            CosformerEncoderConfig(**ENCODER, pooling=pooling, num_labels=3)
        ).eval()
        return model.bert(tokens, attention_mask=mask).pooler_output, model

    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [15]])).long()
    got, model = pooled("mean", ids(), mask)
    hidden = model.bert(ids(), attention_mask=mask).last_hidden_state
    want = torch.stack([hidden[0].mean(0), hidden[1, :15].mean(0)])
    torch.testing.assert_close(got, torch.tanh(model.bert.pooler.dense(want)))
    torch.testing.assert_close(
        pooled("mean", ids()[1:, :15], mask[1:, :15])[0], got[1:], rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(pooled("cls", ids(), mask)[0], got)


def test_a_normed_mean_is_the_mean_with_batch_normalisation(tmp_path):
    torch.manual_seed(0)
    config = CosformerEncoderConfig(**ENCODER, pooling="normed-mean", num_labels=3)
    CosformerForMaskedLM(config).save_pretrained(tmp_path)  # it pools nothing, so it has no such norm
    model, info = CosformerForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert {"bert.pooled_norm.weight", "bert.pooled_norm.running_mean", "classifier.weight"} <= set(
        info["missing_keys"]
    )
    norm, many = model.bert.pooled_norm, torch.cat([ids(), ids().flip(1), ids().roll(3, 1)])
    assert norm.running_mean.eq(0).all() and norm.running_var.eq(1).all() and norm.num_batches_tracked == 0

    means = model.eval().bert(many).last_hidden_state.mean(1)
    want = (means - means.mean(0)) / (means.var(0, unbiased=False) + norm.eps).sqrt()
    got = model.train().bert(many).pooler_output
    torch.testing.assert_close(got, torch.tanh(model.bert.pooler.dense(want)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm.running_mean, 0.2 * means.mean(0))
    kept = norm.running_mean.clone()
    alone = model.bert(many[:1]).pooler_output  # one text, in training: no spread to divide by
    assert torch.equal(norm.running_mean, kept)
    torch.testing.assert_close(alone, model.eval().bert(many).pooler_output[:1])


def test_pairs_are_read_one_by_one():
    torch.manual_seed(0)
    model = CosformerForPairClassification(CosformerEncoderConfig(**ENCODER, num_labels=2)).eval()
    a, b = ids(), ids(length=9).flip(1)
    out = model(input_ids=a, pair_input_ids=b, labels=torch.tensor([0, 1]))
    x, y = (model.bert(t).pooler_output for t in (a, b))
    torch.testing.assert_close(out.logits, model.classifier(torch.cat([x, y, x * y, x - y], -1)))
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, torch.tensor([0, 1])))


def test_a_pair_and_a_pooled_text_can_be_tuples():
    for pooling in ("cls", "mean", "normed-mean"):
        for config_says in (True, False):
            config = CosformerEncoderConfig(**ENCODER, pooling=pooling, return_dict=config_says)
            model = CosformerEncoderModel(config).eval()
            want = model(ids(), return_dict=True)
            got = model(ids(), return_dict=None if not config_says else False)
            assert isinstance(got, tuple)
            torch.testing.assert_close(got, (want.last_hidden_state, want.pooler_output))
    pairs = CosformerForPairClassification(CosformerEncoderConfig(**ENCODER)).eval()
    (logits,) = pairs(ids(), ids(), return_dict=False)
    assert torch.equal(logits, pairs(ids(), ids()).logits)


def test_an_encoders_text_past_its_positions_is_an_error():
    model, longer = build("masked"), ids(length=LENGTH + 1)
    model(ids())
    said = (
        "input_ids has 25 tokens, but max_position_embeddings is 24 and each position has a "
        "learned vector; cut the text"
    )
    with pytest.raises(ValueError, match=said):
        model(longer)
    with pytest.raises(ValueError, match=said.replace("input_ids", "inputs_embeds")):
        model(inputs_embeds=torch.randn(1, LENGTH + 1, 32))
    with pytest.raises(
        ValueError, match="the text of position_ids has 25 tokens, but max_position_embeddings is 24"
    ):
        model(ids(), position_ids=torch.arange(1, LENGTH + 1)[None])
    rows = torch.cat([torch.arange(13), torch.arange(12)])[None]
    assert model(longer[:1], position_ids=rows).logits.shape == (
        1,
        LENGTH + 1,
        40,
    )  # packed: each text is short enough


def test_an_encoder_without_positions_and_cosine_has_no_limit():
    model, longer = build("masked", positions=None, horizon=math.inf), ids(length=3 * LENGTH)
    got = model(longer).logits
    torch.testing.assert_close(
        got[:, :LENGTH], model(longer, token_type_ids=torch.zeros_like(longer)).logits[:, :LENGTH]
    )
    rows = torch.arange(3 * LENGTH)[None]
    torch.testing.assert_close(model(longer, position_ids=rows).logits, got)
    with pytest.raises(ValueError, match="25 tokens reach past the horizon of 24; use shorter texts"):
        build("masked", positions=None)(ids(length=LENGTH + 1))
    assert build("masked", positions=None, mixer="elu")(longer).logits.shape == (2, 3 * LENGTH, 40)


@pytest.mark.parametrize(
    "fields", [{}, {"horizon": math.inf}, {"layer_types": ["full_attention"]}, {"mixer": "elu"}], ids=str
)
def test_an_encoder_decoders_text_past_its_positions_is_an_error(fields):
    model, longer = build("seq2seq", **fields), ids(length=LENGTH + 1)
    model(ids(), decoder_input_ids=ids())
    with pytest.raises(ValueError, match="input_ids has 25 tokens, but max_position_embeddings is 24"):
        model(longer, decoder_input_ids=ids())
    with pytest.raises(
        ValueError, match="decoder_input_ids has 25 tokens, but max_position_embeddings is 24"
    ):
        model(ids(), decoder_input_ids=longer)
    if "mixer" not in fields:
        cache = model.new_cache()
        model(ids(), decoder_input_ids=ids(length=20), past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match="decoder_input_ids has 25 tokens, 20 of them in the cache, but"):
            model(ids(), decoder_input_ids=ids(length=5), past_key_values=cache, use_cache=True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mixer": "nobody"}, "mixer is 'nobody'; one of bigbird"),
        (
            {"mixer": "elu", "mixer_options": {"features": 3}},
            "mixer_options has 'features'; mixer 'elu' accepts none",
        ),
        ({"mixer": "elu", "decay": "ladder"}, "decay='ladder' are cosformer's; mixer is 'elu'"),
        ({"mixer": "elu", "horizon": 8}, "horizon=8 and"),
        ({"positions": "rope"}, 'the re-weighting of mixer "cosformer" is its position encoding'),
        ({"positions": "sine"}, "positions is 'sine'; one of 'learned', 'rope', None"),
        ({"mixer_options": {"slope": 1}}, 'mixer "cosformer" has the fields horizon and decay instead'),
        ({"mixer": "elu", "positions": "rope"}, "mixer 'elu' does not do positions='rope'"),
    ],
    ids=str,
)
def test_fields_that_make_no_sense_are_refused(fields, said):
    with pytest.raises(Exception, match=said.replace("(", r"\(")):
        build("causal", **fields)


def test_encoder_fields_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="pooling is 'max'; one of 'cls', 'mean', 'normed-mean'"):
        CosformerEncoderConfig(pooling="max")
    with pytest.raises(ValueError, match='the encoder-decoder has only "learned", as BART does'):
        CosformerSeq2SeqConfig(positions=None)
