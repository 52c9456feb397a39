"""Metrics in transformers.Trainer's two steps: shrink the logits of a batch, then sum up over the set."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .contract import IGNORE


def _logits(output: Any) -> Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output  # states may follow the logits


class TokenScores:
    """Logits (B, L, V) -> (B, 4) sums over labelled positions: loss, tokens, correct tokens, bytes."""

    def __init__(self, *, shift: bool, byte_lengths: np.ndarray | float | None = None):
        self.shift = shift
        known = byte_lengths is not None
        self.byte_lengths = torch.as_tensor(byte_lengths, dtype=torch.float32) if known else None

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        logits = _logits(output)
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        scored = labels != IGNORE
        chosen, target = logits[scored].float(), labels[scored]
        loss = torch.nn.functional.cross_entropy(chosen, target, reduction="none")
        size = torch.zeros_like(loss)
        if self.byte_lengths is not None:
            lengths = self.byte_lengths.to(loss.device)
            size = lengths[target] if lengths.ndim else size + lengths
        values = torch.stack([loss, torch.ones_like(loss), (chosen.argmax(-1) == target).float(), size], -1)
        row = scored.nonzero()[:, 0]
        return torch.zeros(len(labels), 4, device=values.device).index_add_(0, row, values)


def language_metrics(prediction: Any) -> dict[str, float]:
    """Loss and perplexity per token, accuracy, and bits per byte where the tokens' bytes are known."""
    loss, tokens, right, size = np.asarray(prediction.predictions, np.float64).sum(0)
    if not tokens:
        raise ValueError("no token of the evaluation set has a label")
    mean = loss / tokens
    found = {"loss_per_token": mean, "perplexity": math.exp(min(mean, 700)), "accuracy": right / tokens}
    found["tokens"] = tokens
    if size:
        found["bits_per_byte"] = loss / math.log(2) / size
    return {name: float(value) for name, value in found.items()}


def class_choice(output: Any, labels: Tensor) -> Tensor:
    """Logits (B, labels) -> the chosen class of each row."""
    return _logits(output).argmax(-1)


def class_metrics(prediction: Any) -> dict[str, float]:
    """Accuracy, and F1: of class 1 if there are two, as GLUE reports it; else the mean over classes."""
    chosen, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    seen = np.union1d(chosen, labels)
    scores = []
    for c in [1] if seen.max() <= 1 else seen:
        both = ((chosen == c) & (labels == c)).sum()
        total = (chosen == c).sum() + (labels == c).sum()
        scores.append(2 * both / total if total else 0.0)
    return {"accuracy": float((chosen == labels).mean()), "f1": float(np.mean(scores))}


def majority(labels: np.ndarray) -> float:
    """The accuracy of always choosing the most frequent class."""
    return float(np.bincount(labels).max() / len(labels))


FORCED = -1  # first in rows from teacher forcing; generated rows begin with the start token


def token_choice(output: Any, labels: Tensor) -> Tensor:
    """Logits (B, T, V) -> FORCED and the chosen tokens (B, 1 + T). Generated tokens (B, T) pass through."""
    output = _logits(output)
    return torch.nn.functional.pad(output.argmax(-1), (1, 0), value=FORCED) if output.ndim == 3 else output


def edits(said: list[str], meant: list[str]) -> int:
    """Levenshtein distance: the fewest words inserted, deleted or replaced to turn one into the other.

    One row of the table per word of `said`. Inserting k words moves k places along the row and costs k, so
    with the places subtracted the best insertions are a running minimum.
    """
    words, places = np.array(meant, object), np.arange(len(meant) + 1)
    row = places
    for i, word in enumerate(said, 1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (words != word))
        row = np.minimum.accumulate(np.concatenate([[i], changed]) - places) + places
    return int(row[-1])


class Seq2SeqMetrics:
    """The metrics depend on how predictions were made.

    Teacher forcing: token_accuracy, and sequence_accuracy (every token right). Generation: sequence_accuracy
    and, given a tokenizer, BLEU, chrF and word_error_rate of the decoded text (edits per word of the target;
    the phoneme error rate where words are phonemes).
    """

    def __init__(self, *, eos: int, pad: int, tokenizer: Any = None):
        self.eos, self.pad, self.tokenizer = eos, pad, tokenizer

    def __call__(self, prediction: Any) -> dict[str, float]:
        chosen, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
        if (chosen[:, 0] == FORCED).all():
            scored, right = labels != IGNORE, chosen[:, 1:] == labels
            whole = (right | ~scored).all(1)
            return {"token_accuracy": float(right[scored].mean()), "sequence_accuracy": float(whole.mean())}
        made = [self._until_end(row[1:]) for row in chosen]
        wanted = [self._until_end(row) for row in labels]
        found = {"sequence_accuracy": float(np.mean([m == w for m, w in zip(made, wanted)]))}
        if self.tokenizer is not None:
            import sacrebleu

            decode = partial(self.tokenizer.decode, skip_special_tokens=True)
            said, meant = ([*map(decode, rows)] for rows in (made, wanted))
            found["bleu"] = sacrebleu.corpus_bleu(said, [meant]).score
            found["chrf"] = sacrebleu.corpus_chrf(said, [meant]).score
            pairs = [(s.split(), m.split()) for s, m in zip(said, meant)]
            words = sum(len(m) for _, m in pairs)
            found["word_error_rate"] = sum(edits(*pair) for pair in pairs) / max(1, words)
        return found

    def _until_end(self, row: np.ndarray) -> list[int]:
        stop = np.isin(row, (self.eos, self.pad, IGNORE))
        return row[: int(stop.argmax())].tolist() if stop.any() else row.tolist()


def scoring_fields(shrink: Any, compute: Any, metric: str, *, greater_is_better: bool) -> dict[str, Any]:
    """The four fields of a `Task` that say how it is scored."""
    steps = {"preprocess_logits_for_metrics": shrink, "compute_metrics": compute}
    return {**steps, "metric": metric, "greater_is_better": greater_is_better}
