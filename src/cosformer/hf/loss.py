"""Training losses for large vocabularies, which never hold a score for every token and class.

chunked        the softmax itself, some tokens at a time (torch's `linear_cross_entropy`)
one-vs-each    a bound on it whose cost does not grow with the vocabulary; Titsias, 2016, arXiv:1609.07410:

    log p(y) = -log sum_m exp(f_m - f_y)  >=  sum_{m != y} log sigmoid(f_y - f_m)

The sum on the right is estimated from n classes drawn uniformly, the same for all tokens of a batch: V/n
times the sum over those that are not y, which is unbiased. Only the scores of the targets and of the n
classes are computed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import checks

LOSSES = ("softmax", "chunked", "one-vs-each")


def without_logits(
    config: Any, hidden: Tensor, layer: nn.Linear, labels: Tensor, total: Any = None
) -> Tensor:
    """The loss that `config` names, other than the plain softmax, of tokens under an output layer."""
    given = hidden, layer.weight, layer.bias, labels
    if config.loss == "chunked":
        return chunked(*given, total=total)
    return one_vs_each(*given, samples=config.loss_samples, total=total)


def problem_of(config: Any, labels: Tensor) -> str:
    """The problem type of a text classifier: `config.problem_type` or, as in transformers, inferred and
    stored there, where its pipelines read it, too."""
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        found = "regression"
    elif labels.dtype in (torch.int64, torch.int32):
        found = "single_label_classification"
    else:
        found = "multi_label_classification"
    if not torch.compiler.is_compiling():  # a graph must not change the config
        config.problem_type = found
    return found


def fitting(labels: Tensor, kind: str, *, texts: int, classes: int) -> Tensor:
    """The labels of `texts` texts as their loss takes them, (B,) or (B, C); others are refused."""
    one = kind == "single_label_classification"
    shapes = [(texts,), (texts, 1)] if one or classes == 1 else [(texts, classes)]
    if tuple(labels.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(
            f"labels must have the shape {wanted}, for problem_type={kind!r} and num_labels={classes}; "
            f"got {tuple(labels.shape)}"
        )
    if one and labels.is_floating_point():
        raise ValueError(f"labels must be integers, for problem_type={kind!r}; got {labels.dtype}")
    return labels.flatten().long() if one else labels.float().view(texts, classes)


def check_is_of_classes(config: Any, kind: str | None) -> None:
    """Losses without logits need one class per text; `kind` is None if not known yet."""
    if config.loss != "softmax" and config.num_labels < 2:
        raise ValueError(f'loss is "{config.loss}", of classes; num_labels is {config.num_labels}')
    if config.loss != "softmax" and kind not in (None, "single_label_classification"):
        raise ValueError(f'loss is "{config.loss}", of classes; problem_type is "{kind}"; use "softmax"')


def of_texts(kind: str, logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of logits (B, C) with labels from `fitting`."""
    if kind == "regression":
        return F.mse_loss(logits.float(), labels)
    if kind == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits.float(), labels)
    return F.cross_entropy(logits.float(), labels)


def check_of_tokens(hidden: Tensor, labels: Tensor) -> None:
    if labels.shape != hidden.shape[:2]:
        wanted, given = tuple(hidden.shape[:2]), tuple(labels.shape)
        raise ValueError(f"labels must have the shape {wanted}, one for each token; got {given}")


def labelled(hidden: Tensor, labels: Tensor, *, ignore: int = -100) -> tuple[Tensor, Tensor]:
    """The tokens with a label, (1, n, C) and (1, n); all tokens if counting would mean waiting."""
    check_of_tokens(hidden, labels)
    if not checks.readable(labels) or torch.compiler.is_compiling():
        return hidden, labels
    asked = (labels != ignore).flatten().nonzero().flatten()
    chosen = hidden.flatten(0, 1).index_select(0, asked), labels.flatten().index_select(0, asked)
    return chosen[0][None], chosen[1][None]


def chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore: int = -100,
    total: Tensor | int | None = None,
) -> Tensor:
    """The mean cross entropy; the arguments are those of `one_vs_each`."""
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    half = hidden.dtype in (torch.bfloat16, torch.float16)  # torch would sum in it
    loss = F.linear_cross_entropy(
        hidden,
        weight,
        labels,
        linear_bias=bias,
        ignore_index=ignore,
        reduction="none" if half else "sum",
        options=nn.LinearCrossEntropyOptions(),
    )
    loss = loss.sum(dtype=torch.float32) if half else loss
    return loss / ((labels != ignore).sum().clamp_min(1) if total is None else total)


def one_vs_each(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    samples: int,
    ignore: int = -100,
    total: Tensor | int | None = None,
) -> Tensor:
    """The mean loss of hidden (..., C) with labels (...) under the output layer weight (V, C), bias (V,).

    If V is at most `samples`, the sum is over all classes. `total` divides instead of the number of
    labels.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    asked = labels != ignore
    target = labels.clamp_min(0)
    classes, V = None, len(weight)
    if samples < V:
        classes = torch.randint(V, (samples,), device=weight.device)
    some = weight if classes is None else weight.index_select(0, classes)
    offset = bias if bias is None or classes is None else bias.index_select(0, classes)
    others = F.linear(hidden, some, offset).float()  # (N, n)
    own = (hidden * weight.index_select(0, target)).sum(-1).float()
    own = own if bias is None else own + bias.index_select(0, target).float()
    names = torch.arange(V, device=weight.device) if classes is None else classes
    terms = F.softplus(others - own[:, None]).masked_fill(names == target[:, None], 0.0)  # -log sigmoid
    scale = 1.0 if classes is None else V / samples
    loss = scale * (terms.sum(-1) * asked).sum()
    return loss / (asked.sum().clamp_min(1) if total is None else total)
