"""What only the encoder has: how a text becomes one vector, its heads, and how long a text may be."""

import pytest
import torch
from conftest import token_ids, toy_config, toy_model

pytest.importorskip("transformers")

import transformers as tf
from transformers.loss.loss_utils import ForSequenceClassificationLoss

import cosformer.hf as hf
from cosformer.hf.pooling import Pooling

LENGTH = 17
ENCODER, CLASSIFIER = hf.CosformerEncoderModel, hf.CosformerForSequenceClassification
KEEP = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [12]])).long()


def pooled(kind: str, hidden: torch.Tensor) -> torch.Tensor:
    """The definition, one text (L, C) at a time."""
    ways = {
        "first": lambda t: t[0],
        "mean": lambda t: t.mean(0),
        "max": lambda t: t.max(0).values,
        "mean-max": lambda t: torch.cat([t.mean(0), t.max(0).values]),
    }
    return ways[kind](hidden)


@pytest.mark.parametrize("kind", ["first", "mean", "max", "mean-max"])
def test_a_pooling_is_its_definition_over_the_kept_tokens(kind):
    pooling, hidden = Pooling(kind, 6), torch.randn(2, LENGTH, 6)
    got = pooling(hidden.masked_fill(KEEP[..., None] == 0, float("nan")), KEEP)
    want = torch.stack([pooled(kind, hidden[0]), pooled(kind, hidden[1, :12])])
    torch.testing.assert_close(got, want)
    assert got.shape[1] == pooling.size
    left = KEEP.flip(1)  # padding may be on either side
    torch.testing.assert_close(pooling(hidden, left)[1], pooled(kind, hidden[1, 5:]))


def test_attention_pooling_weighs_by_a_learned_score():
    pooling, hidden = Pooling("attention", 6), torch.randn(2, LENGTH, 6)
    got = pooling(hidden.masked_fill(KEEP[..., None] == 0, float("nan")), KEEP)
    for row, length in ((0, LENGTH), (1, 12)):
        weight = pooling.score(hidden[row, :length]).softmax(0)
        torch.testing.assert_close(got[row], (weight * hidden[row, :length]).sum(0))


def test_a_normed_mean_is_the_mean_with_batch_normalisation(tmp_path):
    torch.manual_seed(0)
    config = toy_config(ENCODER, pooling="normed-mean", num_labels=3)
    hf.CosformerForMaskedLM(config).save_pretrained(tmp_path)  # it does not pool, so it has no such norm
    model, info = CLASSIFIER.from_pretrained(tmp_path, output_loading_info=True)
    fresh = {"pooling.norm.weight", "pooling.norm.running_mean", "classifier.weight"}
    assert fresh <= set(info["missing_keys"])
    norm, many = model.pooling.norm, torch.cat([token_ids(seed=s) for s in (1, 2, 3)])
    assert norm.running_mean.eq(0).all() and norm.running_var.eq(1).all() and norm.num_batches_tracked == 0

    means = model.eval().encoded(many).last_hidden_state.mean(1)
    want = (means - means.mean(0)) / (means.var(0, unbiased=False) + norm.eps).sqrt()
    got = model.train()(many).logits
    torch.testing.assert_close(got, model.classifier(want), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm.running_mean, 0.2 * means.mean(0))
    kept = norm.running_mean.clone()
    alone = model(many[:1]).logits  # one text, in training: no spread to divide by
    assert torch.equal(norm.running_mean, kept)
    torch.testing.assert_close(alone, model.eval()(many).logits[:1])


def test_pairs_are_read_one_by_one():
    model = toy_model(hf.CosformerForPairClassification, num_labels=2)
    a, b, labels = token_ids(), token_ids(length=9, seed=2), torch.tensor([0, 1])
    out = model(input_ids=a, pair_input_ids=b, labels=labels)
    x, y = (model.pooling(model.encoded(t).last_hidden_state) for t in (a, b))
    torch.testing.assert_close(out.logits, model.classifier(torch.cat([x, y, x * y, x - y], -1)))
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))
    (logits,) = model(a, b, return_dict=False)
    assert torch.equal(logits, out.logits)


def test_a_text_past_its_positions_is_an_error():
    model = toy_model(hf.CosformerForMaskedLM, max_position_embeddings=24)
    model(token_ids(length=24))
    longer = token_ids(length=25)
    said = "the text has 25 tokens, but max_position_embeddings is 24 and each position has a learned"
    with pytest.raises(ValueError, match=said):
        model(longer)
    with pytest.raises(ValueError, match=said):
        model(inputs_embeds=torch.randn(1, 25, 32))
    rows = torch.cat([torch.arange(13), torch.arange(12)])[None]
    assert model(longer[:1], position_ids=rows).logits.shape[1] == 25  # packed: each text is short enough


def test_one_number_is_told_by_its_square_error():
    model = toy_model(CLASSIFIER, num_labels=1)
    labels = torch.tensor([0.5, 2.0])
    for given in (labels, labels[:, None]):
        out = model(token_ids(), labels=given)
        torch.testing.assert_close(out.loss, (out.logits[:, 0] - labels).square().mean())


def test_the_kind_of_problem_chooses_the_loss():
    """As transformers: what config.problem_type says, or what labels and num_labels suggest."""
    x, F = token_ids(), torch.nn.functional
    classes, several = torch.tensor([0, 2]), torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    for labels, given, kind, loss in (
        (classes, None, "single_label_classification", F.cross_entropy),
        (several, None, "multi_label_classification", F.binary_cross_entropy_with_logits),
        (several, "regression", "regression", F.mse_loss),
        (
            several,
            "multi_label_classification",
            "multi_label_classification",
            F.binary_cross_entropy_with_logits,
        ),
    ):
        model = toy_model(CLASSIFIER, num_labels=3, problem_type=given)
        out = model(x, labels=labels)
        torch.testing.assert_close(out.loss, loss(out.logits, labels))
        assert model.config.problem_type == kind  # which transformers' pipelines read
        bert = tf.BertConfig(num_labels=3, problem_type=given)
        torch.testing.assert_close(out.loss, ForSequenceClassificationLoss(labels, out.logits, bert))
    torch.testing.assert_close(model(x, labels=several.long()).loss, out.loss)  # 0 and 1 as integers


@pytest.mark.parametrize(
    ("fields", "labels", "said"),
    [
        ({"num_labels": 3}, torch.zeros(2, 3).long(), r"\(2,\) or \(2, 1\), for problem_type='single_label_"),
        (
            {"num_labels": 3},
            torch.zeros(2, 4),
            r"shape \(2, 3\), for problem_type='multi_label_.*got \(2, 4\)",
        ),
        ({"num_labels": 3, "problem_type": "regression"}, torch.zeros(2), r"shape \(2, 3\).*got \(2,\)"),
        ({"num_labels": 1}, torch.zeros(3), r"\(2,\) or \(2, 1\), for problem_type='regression'.*got \(3,\)"),
        (
            {"num_labels": 3, "problem_type": "single_label_classification"},
            torch.zeros(2),
            "labels must be integers, .* got torch.float32",
        ),
    ],
)
def test_labels_that_do_not_fit_the_problem_are_refused(fields, labels, said):
    with pytest.raises(ValueError, match=said):
        toy_model(CLASSIFIER, **fields)(token_ids(), labels=labels)


def test_losses_without_logits_are_of_classes():
    fields = {"loss": "chunked", "num_labels": 3}
    model, x, several = toy_model(CLASSIFIER, **fields), token_ids(), torch.zeros(2, 3)
    with pytest.raises(ValueError, match='loss is "chunked", of classes; .* "multi_label_classification"'):
        model.train()(x, labels=several)
    with pytest.raises(ValueError, match='loss is "chunked", of classes; .* "regression"'):
        toy_model(CLASSIFIER, problem_type="regression", **fields)
    model = toy_model(CLASSIFIER, **fields)
    classes = torch.tensor([[0], [2]])
    torch.testing.assert_close(model.train()(x, labels=classes).loss, model.eval()(x, labels=classes).loss)


@pytest.mark.parametrize("kind", [hf.CosformerForMaskedLM, hf.CosformerForTokenClassification])
@pytest.mark.parametrize("training", [True, False])
def test_labels_of_tokens_have_their_shape(kind, training):
    model, labels = toy_model(kind).train(training), torch.zeros(LENGTH, 2).long()
    with pytest.raises(
        ValueError, match=r"labels must have the shape \(2, 17\), one for each token; got \(17,"
    ):
        model(token_ids(), labels=labels)


HEADS = (hf.CosformerForMaskedLM, CLASSIFIER, hf.CosformerForTokenClassification)


@pytest.mark.parametrize("kind", HEADS, ids=lambda c: c.__name__)
def test_heads_give_the_hidden_states_that_are_asked_for(kind):
    model, x = toy_model(kind, num_labels=3), token_ids()
    out, want = (m(x, output_hidden_states=True) for m in (model, model.model))
    assert len(out.hidden_states) == 3 and out.attentions is None
    assert torch.equal(torch.stack(out.hidden_states), torch.stack(want.hidden_states))
    assert model(x).hidden_states is None
    assert len(model(x, output_hidden_states=True, return_dict=False)[1]) == 3
    labels = torch.tensor([0, 1]) if kind is CLASSIFIER else x % 3
    assert len(model.train()(x, labels=labels, output_hidden_states=True).hidden_states) == 3


def test_a_pair_has_the_hidden_states_of_both():
    model, a, b = toy_model(hf.CosformerForPairClassification), token_ids(), token_ids(length=9, seed=2)
    states = model(a, b, output_hidden_states=True).hidden_states
    assert [state.shape[1] for state in states] == [17] * 3 + [9] * 3


@pytest.mark.parametrize("kind", ["first", "mean", "max", "mean-max", "attention"])
def test_a_text_without_tokens_is_pooled_to_zeros(kind):
    pooling, hidden, keep = Pooling(kind, 6), torch.randn(2, LENGTH, 6, requires_grad=True), KEEP.clone()
    keep[1] = 0
    pooled = pooling(hidden, keep)
    assert pooled[0].any() and not pooled[1].any()
    pooled.sum().backward()
    assert hidden.grad.isfinite().all() and not hidden.grad[1].any()


def test_dropout_is_on_the_embeddings_and_on_what_blocks_add():
    model, x = toy_model(hf.CosformerForMaskedLM, dropout=0.5), token_ids()
    assert sum(isinstance(m, torch.nn.Dropout) and m.p == 0.5 for m in model.modules()) == 1 + 2 * 2
    torch.testing.assert_close(model(x).logits, model(x).logits)
    model.train()
    assert not torch.allclose(model(x).logits, model(x).logits)


def test_without_positions_and_cosine_there_is_no_limit():
    free = {"positions": "none", "max_position_embeddings": 24}
    model, longer = toy_model(hf.CosformerForMaskedLM, **free), token_ids(length=72)
    got = model(longer).logits
    torch.testing.assert_close(model(longer, token_type_ids=torch.zeros_like(longer)).logits, got)
    torch.testing.assert_close(model(longer, position_ids=torch.arange(72)[None]).logits, got)
    with pytest.raises(ValueError, match="25 tokens reach past the horizon of 24; use shorter texts"):
        toy_model(hf.CosformerForMaskedLM, mixer="cosformer-cosine", **free)(token_ids(length=25))
    assert toy_model(hf.CosformerForMaskedLM, mixer="elu", **free)(longer).logits.shape[1] == 72
