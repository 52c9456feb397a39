"""One sequence over several processes: how a model is told its group, and what its heads ask of the others.

Every process calls the model with its own part of the tokens, in the order of the ranks. A loss is this
process's share times the number of processes, because gradients are then averaged over them, as in DDP.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from torch import Tensor

from ..ops.shard import LIMIT, Shard, gathered
from .labels import IGNORE


@contextmanager
def sequence_parallel(
    model: Any, group: dist.ProcessGroup | None = None, *, limit: int = LIMIT
) -> Iterator[None]:
    """Within it a model's input is this process's part of a sequence that `group` shares.

    group    None for all processes
    limit    the most bytes of keys and values that a softmax layer may gather
    """
    share(model, joined(group), limit=limit)
    try:
        yield
    finally:
        share(model, None)


def share(model: Any, group: dist.ProcessGroup | None, *, limit: int = LIMIT) -> None:
    """Share sequences among `group` from now on; None ends it."""
    stacks = [module for module in model.modules() if hasattr(module, "sequence_group")]
    if not stacks:
        raise TypeError(
            f"{type(model).__name__} cannot share a sequence among processes; "
            "the Cosformer decoder and encoder models can"
        )
    for stack in stacks:
        stack.sequence_group, stack.sequence_limit = group, limit


def joined(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, by default all processes; it must contain this one."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("there are no processes to share a sequence: call dist.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if group is None or dist.get_rank(group) < 0:
        raise ValueError(f"group: process {dist.get_rank()} is not one of it; pass the one that it is in")
    return group


@torch.no_grad()
def prefill(model: Any, input_ids: Tensor, group: dist.ProcessGroup | None = None) -> Any:
    """The cache after all but the last of a prompt's tokens (B, N), read by all processes of `group` together
    and the same in each. Decoding can go on in any of them:

        cache = prefill(model, input_ids, group)
        model.generate(input_ids, attention_mask=torch.ones_like(input_ids), past_key_values=cache)
    """
    group = joined(group)
    read, processes = input_ids[:, :-1], dist.get_world_size(group)
    if read.shape[1] < processes:
        return model(read, use_cache=True, logits_to_keep=1).past_key_values
    mine = read.tensor_split(processes, 1)[dist.get_rank(group)]
    with sequence_parallel(model, group):
        return model(mine, use_cache=True, logits_to_keep=1).past_key_values


def shard_of(stack: Any, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache):
    """This call's shard; without a mask, positions that restart at 0 mean packed sequences."""
    if cache is not None and cache.get_seq_length():
        raise ValueError("a cache that holds tokens goes on in one process; leave sequence_parallel first")
    places = position_ids if attention_mask is None else None
    places = None if places is None else places.expand(x.shape[:2])
    shard = Shard.of(stack.sequence_group, x, places=places, limit=stack.sequence_limit)
    if not min(shard.lengths):
        raise ValueError(f"each process needs a token at least; they have {list(shard.lengths)}")
    if places is not None:
        check_order(shard, places)
    return shard


def check_order(shard: Shard, places: Tensor) -> None:
    """Check that places go on from part to part, or restart at 0. All processes raise if one is wrong:
    else they would wait for it."""
    jumps = (places[:, 1:] != places[:, :-1] + 1) & (places[:, 1:] != 0)
    ends = torch.stack([places[:, 0], places[:, -1], jumps.any(1).to(places.dtype)])
    first, last, jump = gathered(ends, shard.group).unbind(1)  # (ranks, B) each
    follows = F.pad(last[:-1] + 1, (0, 0, 1, 0))
    if bool((jump.bool() | ((first != 0) & (first != follows))).any()):
        raise ValueError(
            "position_ids must count each sequence from 0, in order, over the parts of all processes; "
            f"got a part {places[0, :12].tolist()}; the parts of the first row begin at "
            f"{first[:, 0].tolist()} and end at {last[:, 0].tolist()}"
        )


def refuse_others() -> None:
    """Raise if torch or accelerate share the sequence in their own way."""
    softmax = F.scaled_dot_product_attention
    if softmax is not torch._C._nn.scaled_dot_product_attention and "context_parallel" in softmax.__module__:
        raise ValueError(
            "torch's context_parallel is active, which cuts and permutes sequences for softmax attention "
            "alone; leave it, and use cosformer.hf.sequence_parallel instead"
        )
    refuse_sizes(AcceleratorState._shared_state.get("parallelism_config"))


def refuse_sizes(config: ParallelismConfig | None) -> None:
    """accelerate's ways to share a sequence are for softmax alone, and one permutes it."""
    for name in ("cp_size", "sp_size"):
        size = getattr(config, name, None) or 1
        if size > 1:
            raise ValueError(
                f"accelerate's ParallelismConfig has {name}={size}, which cuts or permutes sequences for "
                "softmax attention alone; leave it out, and use cosformer train --sequence-parallel "
                f"{size}, or cosformer.hf.sequence_parallel, instead"
            )


def labels_of(group: dist.ProcessGroup | None, labels: Tensor, given: Any) -> Any:
    """What divides this process's sum of losses: `given`, from the Trainer, or the labels of all processes
    divided by the number of processes; None in one process, which takes its own mean.
    """
    if group is None or given is not None:
        return given
    count = (labels != IGNORE).sum()
    dist.all_reduce(count, group=group)
    return count.clamp_min(1) / dist.get_world_size(group)
