"""How an encoder's tokens become one vector: the mean of those kept, and its normalisation over a batch."""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce

MOMENTUM = 0.2  # while a model learns, the mean of all texts moves by more than texts differ: the running one must follow fast


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
        """What one process would do with the texts of all; torch's own that does it, SyncBatchNorm, is for GPUs only."""
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


def mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """(B, L, C) -> (B, C), over what the mask keeps."""
    if mask is None:
        return hidden.mean(1)
    keep = mask.to(hidden.dtype).unsqueeze(-1)
    return (hidden * keep).sum(1) / keep.sum(1).clamp_min(1)
