"""Labels of texts and tokens: the problem they stand for, the shapes they may have, the loss of texts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import checks, modes

IGNORE = -100  # the label of a token without one, as torch and transformers have it


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


def has_values(labels: Tensor) -> bool:
    """Whether they can be read without waiting: not in a graph, on a device, under vmap, as mere shapes."""
    return modes.have_addresses(labels) and checks.readable(labels)


def check_classes(labels: Tensor, classes: int) -> None:
    """Raise for labels that are no classes, where reading them means no waiting."""
    if not has_values(labels) or labels.numel() == 0:
        return
    least, most = (bound.item() for bound in labels.masked_fill(labels == IGNORE, 0).aminmax())
    if least < 0 or most >= classes:
        wrong = least if least < 0 else most
        raise ValueError(f"labels hold {wrong}; they must be from 0 to {classes - 1}, or {IGNORE} for none")


def labelled(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens with a label, (1, n, C) and (1, n); all tokens if counting would mean waiting."""
    check_of_tokens(hidden, labels)
    if not has_values(labels):
        return hidden, labels
    asked = (labels != IGNORE).flatten().nonzero().flatten()
    chosen = hidden.flatten(0, 1).index_select(0, asked), labels.flatten().index_select(0, asked)
    return chosen[0][None], chosen[1][None]
