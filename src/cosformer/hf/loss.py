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

from .labels import IGNORE, check_classes

LOSSES = ("softmax", "chunked", "one-vs-each")


def without_logits(
    config: Any, hidden: Tensor, layer: nn.Linear, labels: Tensor, total: Any = None
) -> Tensor:
    """The loss that `config` names, other than the plain softmax, of tokens under an output layer."""
    check_classes(labels, len(layer.weight))
    given = hidden, layer.weight, layer.bias, labels
    if config.loss == "chunked":
        return chunked(*given, total=total)
    return one_vs_each(*given, samples=config.loss_samples, total=total)


def chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
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
        ignore_index=IGNORE,
        reduction="none" if half else "sum",
        options=nn.LinearCrossEntropyOptions(),
    )
    loss = loss.sum(dtype=torch.float32) if half else loss
    return loss / ((labels != IGNORE).sum().clamp_min(1) if total is None else total)


def one_vs_each(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    samples: int,
    total: Tensor | int | None = None,
) -> Tensor:
    """The mean loss of hidden (..., C) with labels (...) under the output layer weight (V, C), bias (V,).

    If V is at most `samples`, the sum is over all classes. `total` divides instead of the number of
    labels.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    asked = labels != IGNORE
    target = labels.masked_fill(~asked, 0)
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
