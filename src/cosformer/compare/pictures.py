"""Attention matrices of trained models on one real text: a mixing is linear in its values, so one-hot values show its weights."""

from typing import Any

import torch
from torch import Tensor

from .. import tasks
from ..train import models

TOKENS = 64
PAPER = ("softmax", "cosformer-paper", "relu")  # the panels of the paper's figure


@torch.no_grad()
def matrices(model: Any, input_ids: Tensor, layer: int) -> Tensor:
    """The weights (H, L, L) of a layer for one text (1, L)."""
    seen: dict[str, Any] = {}
    mixing = [module for name, module in model.named_modules() if name.endswith(".mixing")][layer]

    def keep(module, args, kwargs):
        seen["args"] = args

    hook = mixing.register_forward_pre_hook(keep, with_kwargs=True)
    model.eval()(input_ids=input_ids, use_cache=False)
    hook.remove()
    x, q, k, v = seen["args"]
    one_hot = torch.eye(k.shape[2]).expand(1, v.shape[1], -1, -1)
    out = mixing(x, q, k, one_hot)  # (1, L, H * L)
    return out.unflatten(-1, (q.shape[1], -1))[0].transpose(0, 1)


def rows(subject: str, task: tasks.Task, mixer: str, directory: str) -> list[dict[str, Any]]:
    """One picture, the last layer's heads averaged on the first tokens of the test set; those of the paper's figure twice."""
    model = models.load(directory, task.kind)
    ids = task.test[0]["input_ids"][:TOKENS]
    layer = model.config.num_hidden_layers - 1
    mean = matrices(model, ids[None], layer).mean(0)
    about = {
        "kind": "picture",
        "task": task.name,
        "subject": subject,
        "mixer": mixer,
        "title": mixer,
        "layer": layer,
    }
    about |= {
        "matrix": [[float(f"{w:.3g}") for w in line] for line in mean.tolist()],
        "tokens": words(task, ids),
    }
    return [{**about, "figure": figure} for figure in ("trained", *(["paper"] if mixer in PAPER else []))]


def words(task: tasks.Task, ids: Tensor) -> list[str]:
    """Each token as text."""
    if task.tokenizer is None:
        return [str(i) for i in ids.tolist()]
    return [task.tokenizer.decode([i]) for i in ids.tolist()]
