"""Metrics against sums done by hand."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cosformer.tasks.metrics import (
    Seq2SeqMetrics,
    TokenScores,
    class_choice,
    class_metrics,
    edits,
    language_metrics,
    token_choice,
)


def predicted(predictions, labels=None):
    return SimpleNamespace(
        predictions=np.asarray(predictions), label_ids=None if labels is None else np.asarray(labels)
    )


def test_perplexity_and_bits_per_byte_by_hand():
    # A vocabulary of three; the right tokens have probability 1/2, 1/4 and 0.6 where the shifted labels are.
    logits = torch.log(
        torch.tensor(
            [
                [[0.25, 0.25, 0.5], [0.25, 0.5, 0.25], [1 / 3, 1 / 3, 1 / 3]],
                [[0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [1 / 3] * 3],
            ]
        )
    )
    labels = torch.tensor([[0, 2, 0], [1, -100, 2]])  # scored at t = 1, 2 of row 0 and t = 2 of row 1
    scores = TokenScores(shift=True, byte_lengths=np.array([0, 1, 3]))((logits, "state"), labels)
    nats = [math.log(2) + math.log(4), -math.log(0.6)]
    np.testing.assert_allclose(scores, [[nats[0], 2, 1, 3], [nats[1], 1, 1, 3]], rtol=1e-5)
    found = language_metrics(predicted(scores))
    total = sum(nats)
    assert found["perplexity"] == pytest.approx(math.exp(total / 3), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / 6, rel=1e-5)
    assert found["accuracy"] == pytest.approx(2 / 3) and found["tokens"] == 3
    unshifted = TokenScores(shift=False)(logits, torch.tensor([[-100, 1, -100], [1, -100, -100]]))
    np.testing.assert_allclose(unshifted[:, :3], [[math.log(2), 1, 1], [-math.log(0.8), 1, 1]], rtol=1e-5)
    assert "bits_per_byte" not in language_metrics(predicted(unshifted))
    mean = TokenScores(shift=True, byte_lengths=2.5)(logits, labels)
    np.testing.assert_allclose(mean[:, 3], [5, 2.5])
    with pytest.raises(ValueError, match="no token"):
        language_metrics(predicted(np.zeros((2, 4))))


def test_accuracy_and_f1_by_hand():
    # Class 1: two right of three chosen and four present, so F1 = 2 * 2 / (3 + 4).
    found = class_metrics(predicted([1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0]))
    assert found == {"accuracy": pytest.approx(0.5), "f1": pytest.approx(4 / 7)}
    # Three classes: F1 of 2/3, 2/3 and 1.
    found = class_metrics(predicted([0, 0, 1, 2], [0, 1, 1, 2]))
    assert found == {"accuracy": pytest.approx(0.75), "f1": pytest.approx((2 / 3 + 2 / 3 + 1) / 3)}
    assert class_metrics(predicted([0, 0], [0, 0])) == {"accuracy": 1.0, "f1": 0.0}
    assert class_choice(torch.tensor([[0.1, 0.9], [2.0, 1.0]]), torch.tensor([0, 0])).tolist() == [1, 0]


class Words:
    vocabulary = {5: "the", 6: "cat", 7: "sat", 8: "on", 9: "mats"}

    def decode(self, ids, skip_special_tokens):
        return " ".join(self.vocabulary[i] for i in ids if i in self.vocabulary)


def test_seq2seq_metrics_tell_teacher_forcing_from_generation():
    metrics = Seq2SeqMetrics(eos=2, pad=0, tokenizer=Words())
    labels = [[5, 6, 7, 8, 9, 2], [5, 6, 2, -100, -100, -100]]
    logits = torch.nn.functional.one_hot(torch.tensor([[5, 6, 7, 8, 6, 2], [5, 6, 2, 9, 9, 9]]), 10).float()
    forced = token_choice((logits, None), torch.tensor(labels))
    assert metrics(predicted(forced, labels)) == {
        "token_accuracy": pytest.approx(8 / 9),
        "sequence_accuracy": 0.5,
    }
    generated = torch.tensor([[1, 5, 6, 7, 8, 9, 2], [1, 5, 6, 2, 0, 0, 0]])
    assert token_choice(generated, None) is generated
    perfect = metrics(predicted(generated, labels))
    assert (
        perfect["sequence_accuracy"] == 1.0
        and perfect["bleu"] == pytest.approx(100)
        and perfect["chrf"] == pytest.approx(100)
    )
    # One sentence, five words, the last wrong: precisions 4/5, 3/4, 2/3, 1/2, no brevity penalty.
    worse = metrics(predicted([[1, 5, 6, 7, 8, 6, 2]], labels[:1]))
    assert (
        worse["bleu"] == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
        and worse["sequence_accuracy"] == 0.0
    )
    assert 0 < worse["chrf"] < 100
    assert perfect["word_error_rate"] == 0 and worse["word_error_rate"] == pytest.approx(1 / 5)


def plain_edits(a, b):
    if not a or not b:
        return len(a) + len(b)
    either = min(plain_edits(a[1:], b), plain_edits(a, b[1:])) + 1
    return min(either, plain_edits(a[1:], b[1:]) + (a[0] != b[0]))


def test_edits_are_levenshteins():
    rng = random.Random(0)
    for _ in range(200):
        a, b = (rng.choices(["x", "y", "long word"], k=rng.randrange(6)) for _ in range(2))
        assert edits(a, b) == plain_edits(a, b)


def test_evaluation_by_the_trainer_gives_the_same_numbers(tmp_path):
    """A tiny real model through transformers.Trainer: sliding windows score every token once."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from cosformer.tasks import build

    (tmp_path / "t.txt").write_text("".join(f"line {i} says {i * i}\n" for i in range(400)))
    task = build(
        "lm",
        data=tmp_path / "t.txt",
        length=32,
        stride=8,
        holdout=0.1,
        cache=tmp_path / "c",
        isolate=False,
        tokenizer="bytes",
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=task.vocab_size, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    ).eval()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "o"),
        per_device_eval_batch_size=7,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=task.collate,
        compute_metrics=task.compute_metrics,
        preprocess_logits_for_metrics=task.preprocess_logits_for_metrics,
    )
    found = trainer.evaluate(task.validation)

    stream = torch.from_numpy(np.asarray(task.validation.table.values("tokens")).astype(np.int64))
    total, previous = 0.0, 0
    for start in range(0, len(stream), 8):  # the loop of the usual sliding evaluation
        end = min(start + 32, len(stream))
        with torch.no_grad():
            logp = model(stream[None, start:end]).logits[0].log_softmax(-1)
        new = range(max(previous, start + 1), end)
        total -= sum(float(logp[t - start - 1, stream[t]]) for t in new)
        previous = end
        if end == len(stream):
            break
    assert found["eval_tokens"] == len(stream) - 1
    assert found["eval_perplexity"] == pytest.approx(math.exp(total / (len(stream) - 1)), rel=1e-4)
    assert found["eval_bits_per_byte"] == pytest.approx(total / math.log(2) / (len(stream) - 2), rel=1e-4)
