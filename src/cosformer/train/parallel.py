"""The Trainer where processes share sequences: a mesh of data x sequence, batches cut, scores put together.

Processes along the mesh's `sequence` dimension read the same rows, each its part of them. DDP or FSDP
averages gradients over all processes, and everything is saved, as without it.
"""

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ..hf.parallel import refuse_sizes, share
from ..tasks.contract import IGNORE
from ..tasks.metrics import TokenScores
from .settings import SettingsError
from .sharded import Sharded


class Parallel(Sharded):
    """`sequence_parallel` processes share each sequence; with 1 nothing changes."""

    def __init__(self, *args: Any, sequence_parallel: int = 1, **kwargs: Any):
        self.processes, self.group = sequence_parallel, None
        super().__init__(*args, **kwargs)
        if sequence_parallel == 1:
            return
        world = self.args.world_size
        if world % sequence_parallel:
            raise SettingsError(
                f"--sequence-parallel {sequence_parallel}: the run has {world} process(es), which must be a "
                "multiple of it; start it with torchrun --nproc-per-node"
            )
        shape = (world // sequence_parallel, sequence_parallel)
        names = ("data", "sequence")
        self.mesh = init_device_mesh(self.args.device.type, shape, mesh_dim_names=names)
        self.group = self.mesh["sequence"].get_group()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.args.ddp_timeout), self.group)
        try:
            share(self.model, self.group)
        except TypeError as error:
            raise SettingsError(f"--sequence-parallel: {error}") from None
        causal = bool(self.model.config.causal_layers)
        self.data_collator: Any = Part(kwargs["data_collator"], self.group, shifted=causal)
        if isinstance(scores := kwargs.get("preprocess_logits_for_metrics"), TokenScores):
            self.preprocess_logits_for_metrics: Any = summed(scores, self.group)

    def create_accelerator_and_postprocess(self) -> None:
        config = self.args.parallelism_config
        if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
            config = ParallelismConfig()  # from what `accelerate launch` sets
        try:
            refuse_sizes(config)
        except ValueError as error:
            raise SettingsError(str(error)) from None
        super().create_accelerator_and_postprocess()

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.processes

    def _get_dataloader(self, *args: Any, **kwargs: Any):
        """accelerate gives every process different rows; those that share sequences need the same."""
        loader = super()._get_dataloader(*args, **kwargs)
        if self.group is not None:
            loader.batch_sampler.num_processes = self.args.world_size // self.processes
            loader.batch_sampler.process_index = self.args.process_index // self.processes
        return loader

    def prediction_step(self, *args: Any, **kwargs: Any):
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        if self.group is not None and loss is not None:
            dist.all_reduce(loss, group=self.group)
            loss = loss / self.processes
        return loss, logits, labels

    def gather_scores(self, data: Any) -> Any:
        """Every row's scores once, however many processes hold it, without the last batch's padding rows."""
        if self.group is None:
            return self.accelerator.gather_for_metrics(data)
        rows = self.accelerator.gather(data).unflatten(0, (self.args.world_size, -1))
        rows = rows[:: self.processes].flatten(0, 1)
        state = self.accelerator.gradient_state
        return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows


class Part:
    """Collates a batch and takes this process's part of every row; labels are shifted before cutting."""

    def __init__(self, collate: Callable[[list[Any]], dict[str, Tensor]], group: Any, *, shifted: bool):
        self.collate, self.shifted = collate, shifted
        self.rank, self.processes = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, items: list[Any]) -> dict[str, Tensor]:
        batch = self.collate(items)
        if self.shifted and "labels" in batch:
            following = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORE)[:, 1:]
            batch["labels"] = batch["shift_labels"] = following
        return {name: self.cut(t) if t.ndim > 1 else t for name, t in batch.items()}

    def cut(self, x: Tensor) -> Tensor:
        return x.tensor_split(self.processes, 1)[self.rank].contiguous()


def summed(scores: TokenScores, group: Any) -> Callable[[Any, Tensor], Tensor]:
    """Sums the scores of rows' parts, whose labels are shifted already, to those of whole rows."""
    part = copy.copy(scores)
    part.shift = False

    def whole(output: Any, labels: Tensor) -> Tensor:
        found = part(output, labels)
        dist.all_reduce(found, group=group)
        return found

    return whole
