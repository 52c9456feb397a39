"""Sequences packed into the rows of a batch: where they begin, told from positions that start again at 0."""

import torch
from torch import Tensor


def packed_boundaries(position_ids: Tensor | None) -> Tensor | None:
    """The boundaries of packed sequences, the rows laid end to end; None where every row is one sequence."""
    if position_ids is None:
        return None
    if torch.compiler.is_compiling():
        raise ValueError(
            "position_ids may mark packed sequences, which a compiled graph cannot look for; "
            "also pass attention_mask (one sequence a row) or cu_seq_lens_q (packed)"
        )
    new = torch.ones_like(position_ids, dtype=torch.bool)
    new[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    begins = new.flatten().nonzero().flatten()
    if bool(position_ids.flatten()[begins].any()):
        raise ValueError(_misplaced(position_ids))
    if len(begins) == len(position_ids):
        return None
    return torch.cat([begins, begins.new_tensor([position_ids.numel()])])


def check_places(position_ids: Tensor | None, attention_mask: Tensor) -> None:
    """Beside a mask positions can only count a row's kept tokens, or its places: no model reads them."""
    if position_ids is None or torch.compiler.is_compiling():
        return
    keep = attention_mask[:, -position_ids.shape[1] :].bool()
    places = torch.arange(keep.shape[1], device=keep.device)
    counted = (position_ids == keep.cumsum(1) - 1) | (position_ids == places)
    if bool((keep & ~counted).any()):
        raise ValueError(_misplaced(position_ids))


def _misplaced(position_ids: Tensor) -> str:
    shown = str(position_ids[0, :12].tolist())[:-1] + (", ...]" if position_ids.shape[1] > 12 else "]")
    return (
        "position_ids must count each sequence from 0: one sequence a row, or several packed into it; "
        f"got a row {shown}. A part of a sequence, or one in another order, has no meaning without its "
        "beginning (context parallelism permutes sequences: these models have cosformer.hf."
        "sequence_parallel, or cosformer train --sequence-parallel, in its place)"
    )
