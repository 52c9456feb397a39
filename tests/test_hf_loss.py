"""Losses for large vocabularies: one-vs-each is its bound, chunked is softmax; both only in training."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import token_ids, toy_model
from torch._subclasses import FakeTensorMode

pytest.importorskip("transformers")

import cosformer.hf as hf
from cosformer.hf.loss import chunked, one_vs_each, without_logits

V, C = 40, 8


def bound(hidden, weight, bias, labels) -> torch.Tensor:
    """The definition, term by term."""
    scores, total, asked = hidden @ weight.T + bias, 0.0, 0
    for f, y in zip(scores, labels.tolist()):
        if y >= 0:
            asked += 1
            total = total - sum(F.logsigmoid(f[y] - f[m]) for m in range(V) if m != y)
    return total / asked


def case():
    hidden, weight, bias = torch.randn(12, C), torch.randn(V, C), torch.randn(V)
    labels = torch.randint(V, (12,))
    labels[3] = -100
    return hidden, weight, bias, labels


def test_it_is_the_definition_and_above_the_softmax():
    given = case()
    exact = one_vs_each(*given, samples=V)
    torch.testing.assert_close(exact, bound(*given))
    hidden, weight, bias, labels = given
    assert exact > F.cross_entropy(hidden @ weight.T + bias, labels)


def test_a_sample_is_unbiased():
    given = case()
    found = torch.stack([one_vs_each(*given, samples=10) for _ in range(2000)])
    error = found.std() / len(found) ** 0.5
    assert (found.mean() - bound(*given)).abs() < 4 * error
    assert found.std() > 0.1  # it is sampled


def test_total_divides_instead_of_the_count():
    given = case()
    torch.testing.assert_close(one_vs_each(*given, samples=V, total=22), one_vs_each(*given, samples=V) / 2)


@pytest.mark.parametrize("total", [None, 22])
def test_chunked_is_the_softmax(total):
    hidden, weight, bias, labels = (x.requires_grad_() if x.is_floating_point() else x for x in case())
    want = F.cross_entropy(hidden @ weight.T + bias, labels, reduction="sum") / (total or 11)
    expected = torch.autograd.grad(want, (hidden, weight, bias))
    loss = chunked(hidden, weight, bias, labels, total=total)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight, bias)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunked_sums_half_precision_in_float32(dtype):
    hidden, weight, labels = torch.randn(8000, C), torch.randn(4000, C), torch.randint(4000, (8000,))
    loss = chunked(hidden.to(dtype), weight.to(dtype), None, labels)
    want = F.cross_entropy(hidden.to(dtype).float() @ weight.to(dtype).float().T, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("kind", ["CosformerForCausalLM", "CosformerForMaskedLM"])
def test_a_model_trains_by_chunks_as_by_the_whole(kind):
    grads = []
    for loss in ("softmax", "chunked"):
        torch.manual_seed(0)
        model, x = toy_model(getattr(hf, kind), loss=loss).train(), token_ids()
        out = model(input_ids=x, labels=x)
        out.loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert (out.logits is None) == (loss == "chunked" or kind == "CosformerForMaskedLM")
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("items", [None, 7])
def test_masked_models_score_the_tokens_that_are_asked_for(items):
    model, x = toy_model(hf.CosformerForMaskedLM), token_ids()
    labels = x.masked_fill(torch.rand(x.shape) < 0.8, -100)
    judged = model.eval()(input_ids=x, labels=labels, num_items_in_batch=items)
    assert judged.logits.shape[:2] == x.shape
    parameters = list(model.parameters())
    want = torch.autograd.grad(judged.loss, parameters)
    scored = []
    model.decoder.register_forward_hook(lambda module, given, out: scored.append(out.shape[:-1].numel()))
    out = model.train()(input_ids=x, labels=labels, num_items_in_batch=items)
    assert out.logits is None and scored == [int((labels != -100).sum())]
    torch.testing.assert_close(out.loss, judged.loss)
    torch.testing.assert_close(torch.autograd.grad(out.loss, parameters), want)
    with pytest.raises(ValueError, match=r"labels must have the shape \(\d, \d+\), one for each token; got "):
        model(input_ids=x, labels=labels[:, :5])


@pytest.mark.parametrize("loss", ["chunked", "one-vs-each"])
def test_labels_that_are_no_classes_are_refused(loss):
    model, x = toy_model(hf.CosformerForCausalLM, loss=loss).train(), token_ids()
    for wrong in (-1, model.config.vocab_size):
        labels = x.clone()
        labels[0, 3] = wrong
        with pytest.raises(ValueError, match=rf"labels hold {wrong}; they must be from 0 to \d+, or -100"):
            model(input_ids=x, labels=labels)
    with pytest.raises(ValueError, match=r"labels must have the shape \(2, 17\), one for each token; got "):
        model(input_ids=x, labels=x[:1])
    classifier = toy_model(hf.CosformerForSequenceClassification, num_labels=3, loss=loss).train()
    with pytest.raises(ValueError, match="labels hold -1; they must be from 0 to 2"):
        classifier(x, labels=torch.tensor([0, -1]))


@pytest.mark.parametrize("loss", [chunked, partial(one_vs_each, samples=50)], ids=["chunked", "one-vs-each"])
def test_losses_of_shapes_alone_and_under_vmap(loss):
    """Where labels cannot be read, they are not checked."""
    layer, config = torch.nn.Linear(8, 11), SimpleNamespace(loss="chunked", loss_samples=50)
    if loss is not chunked:
        config.loss = "one-vs-each"
    hidden, labels = torch.randn(3, 5, 8), torch.randint(11, (3, 5))
    each = torch.vmap(lambda h, y: without_logits(config, h, layer, y))(hidden, labels)
    want = torch.stack([loss(h, layer.weight, layer.bias, y) for h, y in zip(hidden, labels)])
    torch.testing.assert_close(each, want)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = without_logits(config, torch.empty(3, 5, 8), layer, torch.empty(3, 5, dtype=torch.long))
    assert fake.shape == ()


@pytest.mark.parametrize("training", [True, False])
def test_without_any_label_there_is_no_loss(training):
    for loss in ("softmax", "chunked", "one-vs-each"):
        model, x = toy_model(hf.CosformerForMaskedLM, loss=loss).train(training), token_ids()
        found = model(input_ids=x, labels=torch.full_like(x, -100)).loss
        found.backward()
        assert found == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_masked_models_have_it_and_heads_without_it_say_so():
    fields = {"loss": "one-vs-each", "loss_samples": 1000}
    model, x = toy_model(hf.CosformerForMaskedLM, **fields).train(), token_ids()
    out = model(input_ids=x, labels=x)
    hidden = model.head(model.encoded(x).last_hidden_state).flatten(0, 1)
    decoder = model.decoder
    torch.testing.assert_close(
        out.loss, one_vs_each(hidden, decoder.weight, decoder.bias, x.flatten(), samples=1000)
    )
    assert out.logits is None and model.eval()(x, labels=x).loss != out.loss
    for kind in (hf.CosformerForTokenClassification, hf.CosformerForPairClassification):
        with pytest.raises(ValueError, match=f'loss is "one-vs-each"; {kind.__name__} has only "softmax"'):
            toy_model(kind, **fields)
    with pytest.raises(ValueError, match='loss is "one-vs-each", of classes; num_labels is 1'):
        toy_model(hf.CosformerForSequenceClassification, num_labels=1, **fields)


def test_a_model_trains_with_it_and_is_judged_by_the_softmax():
    fields = {"loss": "one-vs-each", "loss_samples": 1000}
    model, x = toy_model(hf.CosformerForCausalLM, **fields), token_ids()
    out = model.train()(input_ids=x, labels=x)
    assert out.logits is None
    hidden = model.model(x, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    want = one_vs_each(hidden, model.lm_head.weight, None, x[:, 1:].flatten(), samples=1000)
    torch.testing.assert_close(out.loss, want)
    judged = model.eval()(input_ids=x, labels=x)
    want = F.cross_entropy(judged.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    torch.testing.assert_close(judged.loss, want)
    classifier = toy_model(hf.CosformerForSequenceClassification, num_labels=3, **fields).train()
    classes, layer = torch.tensor([0, 2]), classifier.classifier
    hidden = classifier.pooled(classifier.encoded(x).last_hidden_state, None)
    want = one_vs_each(hidden, layer.weight, layer.bias, classes, samples=1000)
    torch.testing.assert_close(classifier(x, labels=classes).loss, want)
    judged = classifier.eval()(x, labels=classes)
    torch.testing.assert_close(judged.loss, F.cross_entropy(judged.logits, classes))
    with pytest.raises(
        ValueError, match="loss is 'hinge' over 256 samples; one of 'softmax', 'chunked', 'one-vs-each'"
    ):
        toy_model(hf.CosformerForCausalLM, loss="hinge")
