"""What a trained language model does with its context: its last layer's weights, and its loss by position."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import tasks
from ..layer import Interior
from ..results import Picture, Positions
from ..train import models
from .quality import TrainingCell

TOKENS = 64  # of a picture
TEXTS = 64  # windows whose loss is taken
FIRST = 16  # positions of the first bin; each later bin ends at twice the position


@torch.no_grad()
def matrices(model: Any, input_ids: Tensor, layer: int) -> Tensor:
    """The weights (H, L, L) of a layer for one text (1, L)."""
    seen: dict[str, Any] = {}
    interior = [module for module in model.modules() if isinstance(module, Interior)][layer]

    def keep(module, args, kwargs):
        seen["args"], seen["causal"] = args, kwargs["causal"]

    hook = interior.register_forward_pre_hook(keep, with_kwargs=True)
    model.eval()(input_ids=input_ids, use_cache=False)
    hook.remove()
    return interior.weights(*seen["args"], causal=seen["causal"])[0]


def picture(cell: TrainingCell, task: tasks.Task) -> Picture:
    """The last layer's heads averaged, on the first tokens of the test set."""
    model = models.load(str(cell.folder(cell.subject.name)), task.kind)
    ids = task.test[0]["input_ids"][:TOKENS]
    layer = model.config.num_hidden_layers - 1
    mean = matrices(model, ids[None], layer).mean(0)
    return Picture(
        subject=cell.subject.name,
        mixer=cell.mixer,
        layer=layer,
        matrix=[[float(f"{weight:.3g}") for weight in line] for line in mean.tolist()],
        tokens=[task.tokenizer.decode([i]) if task.tokenizer else str(i) for i in ids.tolist()],
    )


@torch.no_grad()
def positions(cell: TrainingCell, task: tasks.Task) -> Positions:
    """The mean loss of tokens by how many precede them, over windows of the test set."""
    model = models.load(str(cell.folder(cell.subject.name)), task.kind).eval()
    windows = [task.test[i]["input_ids"] for i in range(0, len(task.test), max(1, len(task.test) // TEXTS))]
    windows = [ids for ids in windows if len(ids) == task.max_length][:TEXTS]
    total = torch.zeros(task.max_length - 1)
    for ids in windows:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[1:].long(), reduction="none")
    ends = [end for end in (FIRST * 2**i for i in range(32)) if end < len(total)] + [len(total)]
    mean = total / len(windows)
    loss = [mean[start:end].mean().item() for start, end in zip([0, *ends], ends)]
    row = partial(Positions, subject=cell.subject.name, mixer=cell.mixer, seed=cell.seed)
    return row(ends=ends, loss=loss, texts=len(windows))
