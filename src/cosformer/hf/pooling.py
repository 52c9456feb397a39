"""How an encoder's tokens become one vector for a text: (B, L, C) -> (B, size), over the tokens kept.

first        the first token's
mean         the mean
max          the largest value of each channel
mean-max     both, side by side
attention    a weighted mean, with the softmax of a learned score as weights
normed-mean  the mean with batch normalisation: the means of thousands of tokens are nearly the same for every
             text
"""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce

from ..ops.shard import gathered

POOLINGS = ("first", "mean", "max", "mean-max", "attention", "normed-mean")
# In training the mean over all texts moves by more than texts differ: the running mean must follow fast.
MOMENTUM = 0.2


class PooledNorm(nn.BatchNorm1d):
    """Batch normalisation; a batch of one, which has no spread, is normalised as in evaluation."""

    def __init__(self, size: int):
        super().__init__(size, momentum=MOMENTUM)

    def forward(self, pooled: Tensor, copies: int = 1) -> Tensor:
        """`copies`: how many processes have the same texts."""
        if self.training and distributed.is_available() and distributed.is_initialized():
            return self.over_all_processes(pooled, copies)
        return super().forward(pooled) if self.training and len(pooled) > 1 else self.as_in_evaluation(pooled)

    def as_in_evaluation(self, pooled: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            pooled, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )

    def over_all_processes(self, pooled: Tensor, copies: int) -> Tensor:
        """As one process would with the texts of all; torch's own, SyncBatchNorm, is for GPUs only."""
        count = all_reduce(pooled.new_tensor([len(pooled)]))
        texts = count / copies
        if texts < 2:
            return self.as_in_evaluation(pooled)
        mean = all_reduce(pooled.sum(0)) / count
        spread = all_reduce((pooled - mean).square().sum(0)) / count
        with torch.no_grad():
            for name, seen in (("running_mean", mean), ("running_var", spread * texts / (texts - 1))):
                running = self.get_buffer(name)
                running.lerp_(seen.to(running.dtype), MOMENTUM)
            self.get_buffer("num_batches_tracked").add_(1)
        return (pooled - mean) * (spread + self.eps).rsqrt() * self.weight + self.bias


class Pooling(nn.Module):
    """One vector per text, by `kind`; the attribute `size` is the vector's."""

    def __init__(self, kind: str, size: int):
        super().__init__()
        self.kind, self.size = kind, 2 * size if kind == "mean-max" else size
        self.norm = PooledNorm(size) if kind == "normed-mean" else None
        # Without a bias: the softmax of the scores would not feel it.
        self.score = nn.Linear(size, 1, bias=False) if kind == "attention" else None

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, group: distributed.ProcessGroup | None = None
    ) -> Tensor:
        """mask (B, L), True = keep; each process of `group` holds a part of the tokens."""
        if group is not None and self.kind == "first":
            raise ValueError(f"pooling={self.kind!r} needs all tokens in one process; use mean or max")
        mask = torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask
        keep = mask.bool().unsqueeze(-1)
        if self.kind == "first":
            first = keep.int().argmax(1, keepdim=True).expand(-1, 1, hidden.shape[2])
            return hidden.gather(1, first).squeeze(1).masked_fill(~keep.any(1), 0)
        if self.score is not None:
            return attended(hidden, self.score(hidden), keep, group)
        if self.kind == "max":
            return largest(hidden, keep, group)
        total, count = hidden.masked_fill(~keep, 0).sum(1), keep.sum(1)
        if group is not None:
            total, count = gathered(total, group).sum(0), gathered(count, group).sum(0)
        mean = total / count.clamp_min(1)
        if self.kind == "mean-max":
            return torch.cat([mean, largest(hidden, keep, group)], -1)
        copies = 1 if group is None else distributed.get_world_size(group)
        return mean if self.norm is None else self.norm(mean, copies)

    def extra_repr(self) -> str:
        return self.kind


def attended(hidden: Tensor, scores: Tensor, keep: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
    """The mean of the tokens kept, in all processes, weighted by the softmax of their scores (B, L, 1)."""
    scores, hidden = scores.masked_fill(~keep, -torch.inf), hidden.masked_fill(~keep, 0)
    weight = (scores - largest(scores.detach(), keep, group).unsqueeze(1)).exp()  # 1 for the largest score
    sums = torch.cat([(weight * hidden).sum(1), weight.sum(1)], -1)
    if group is not None:
        sums = gathered(sums, group).sum(0)
    return sums[:, :-1] / sums[:, -1:].clamp_min(1)  # less only for a text without tokens


def largest(hidden: Tensor, keep: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
    """The largest value of each channel over the tokens kept, in all processes; 0 where there are none."""
    least = torch.finfo(hidden.dtype).min
    values = hidden.masked_fill(~keep, least)
    if group is None:
        found = values.amax(1)
    else:
        values = nn.functional.pad(values, (0, 0, 0, 1), value=least)  # a process may have no token
        found = gathered(values.amax(1), group).amax(0)
    return found.masked_fill(found == least, 0)
