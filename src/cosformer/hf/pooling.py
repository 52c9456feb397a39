"""How an encoder's tokens become one vector for a text: (B, L, C) -> (B, size), over the tokens kept.

first        the first token's
mean         the mean
max          the largest value of each channel
mean-max     both, side by side
attention    a weighted mean, with the softmax of a learned score as weights
normed-mean  the mean with batch normalisation: the means of thousands of tokens are nearly the same for every
             text
"""

import math

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce

POOLINGS = ("first", "mean", "max", "mean-max", "attention", "normed-mean")
# while a model learns, the mean of all texts moves by more than texts differ: the running one must follow
# fast
MOMENTUM = 0.2


class PooledNorm(nn.BatchNorm1d):
    """Batch normalisation; a batch of one, which has no spread, is normalised as in evaluation."""

    def __init__(self, size: int):
        super().__init__(size, momentum=MOMENTUM)

    def forward(self, pooled: Tensor) -> Tensor:
        if self.training and distributed.is_available() and distributed.is_initialized():
            return self.over_all_processes(pooled)
        return super().forward(pooled) if self.training and len(pooled) > 1 else self.as_in_evaluation(pooled)

    def as_in_evaluation(self, pooled: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            pooled, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )

    def over_all_processes(self, pooled: Tensor) -> Tensor:
        """What one process would do with the texts of all; torch's own, SyncBatchNorm, is for GPUs only."""
        count = all_reduce(pooled.new_tensor([len(pooled)]))
        if count < 2:
            return self.as_in_evaluation(pooled)
        mean = all_reduce(pooled.sum(0)) / count
        spread = all_reduce((pooled - mean).square().sum(0)) / count
        with torch.no_grad():
            for name, seen in (("running_mean", mean), ("running_var", spread * count / (count - 1))):
                running = self.get_buffer(name)
                running.lerp_(seen.to(running.dtype), MOMENTUM)
            self.get_buffer("num_batches_tracked").add_(1)
        return (pooled - mean) * (spread + self.eps).rsqrt() * self.weight + self.bias


class Pooling(nn.Module):
    """One vector a text, in the way called `kind`; `size` is that of the vector."""

    def __init__(self, kind: str, size: int):
        super().__init__()
        self.kind, self.size = kind, 2 * size if kind == "mean-max" else size
        self.norm = PooledNorm(size) if kind == "normed-mean" else None
        self.score = nn.Linear(size, 1) if kind == "attention" else None

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        keep = (
            torch.ones_like(hidden[..., :1], dtype=torch.bool) if mask is None else mask.bool().unsqueeze(-1)
        )
        if self.kind == "first":
            return hidden.gather(
                1, keep.int().argmax(1, keepdim=True).expand(-1, 1, hidden.shape[2])
            ).squeeze(1)
        if self.score is not None:
            weight = self.score(hidden).masked_fill(~keep, -math.inf).softmax(1)
            return (weight * hidden.masked_fill(~keep, 0)).sum(1)
        mean = hidden.masked_fill(~keep, 0).sum(1) / keep.sum(1).clamp_min(1)
        if self.kind in ("max", "mean-max"):
            most = hidden.masked_fill(~keep, torch.finfo(hidden.dtype).min).amax(1)
            return most if self.kind == "max" else torch.cat([mean, most], -1)
        return mean if self.norm is None else self.norm(mean)

    def extra_repr(self) -> str:
        return self.kind
