"""cosformer bench --tune: the triton kernels' block sizes, refilled by measuring on the GPU that is here."""

import argparse
import itertools
import logging
from collections.abc import Callable, Iterator

import torch

from ..ops import cosformer_attention, trust
from ..ops.operator import backend_problem
from ..ops.triton import blocks
from ..ops.triton.blocks import Blocks, Row, Tiles
from .measure import Say, Work, in_turns

ROWS, HEADS, LENGTH = 4, 16, 4096
TILES = [Tiles(*choice) for choice in itertools.product((32, 64), (32, 64), (4, 8), (1, 2))]
CHOICES = {"chunk": (32, 64, 128), "steps": (1, 2, 4), "gather": TILES, "read": TILES, "grad": TILES}


def run(args: argparse.Namespace, say: Say) -> None:
    """For each size and dtype asked for, puts a row with this device's name on top of the table."""
    problem = backend_problem("triton", args.device)
    if problem is not None:
        raise SystemExit(f"bench: --tune needs a GPU that runs the triton backend: {problem}")
    from ..ops.triton.device import bits

    device = torch.cuda.get_device_name()
    logging.getLogger("cosformer").setLevel(logging.CRITICAL)  # a failed trial only removes a choice
    for size, dtype in itertools.product(args.head_dims, args.dtypes):
        width = bits(getattr(torch, dtype), torch.device("cuda", torch.cuda.current_device()))
        step = training_step(size, getattr(torch, dtype))
        start = next(row for row in blocks.rows() if size <= row.size and width == row.bits)
        row = tuned(Row(device, size, width, 0, start.blocks), lambda: seconds(step), say)
        blocks.put(row)
        say("")
        print(f"{device}, size {size}, {dtype}: {tuple(row.blocks)}", flush=True)
    blocks.save()
    print(f"written to {blocks.FILE}")


def tuned(row: Row, measure: Callable[[], float], say: Say) -> Row:
    """The row with the best choices, one field after another; what does not run is left out."""
    failures: list[Exception] = []
    best, least = row, _tried(row, measure, failures)
    for field in CHOICES:
        for candidate in list(_candidates(best, field)):
            say(f"size {row.size}, {field}: {getattr(candidate.blocks, field)}")
            took = _tried(candidate, measure, failures)
            if took < least:
                best, least = candidate, took
    if least == float("inf"):
        raise SystemExit(f"bench: --tune: no block sizes ran at size {row.size}: {failures[0]}")
    return best


def _candidates(row: Row, field: str) -> Iterator[Row]:
    for choice in CHOICES[field]:
        changed = Blocks(**{**row.blocks._asdict(), field: choice})
        if changed.chunk // changed.steps >= 16:  # a matrix product needs at least 16
            yield row._replace(blocks=changed)


def _tried(row: Row, measure: Callable[[], float], failures: list[Exception]) -> float:
    blocks.put(row)
    trust.forget()  # other block sizes are other kernels, each with its own trial
    try:
        return measure()
    except Exception as error:  # too much shared memory, a failed trial, or any error of the compiler
        failures.append(error)
        return float("inf")


def training_step(size: int, dtype: torch.dtype) -> Work:
    """Forward and backward of causal attention with gated decay."""
    leaves = [torch.randn(ROWS, LENGTH, HEADS, size).to(dtype).transpose(1, 2) for _ in range(4)]
    q, k, v, dout = (x.requires_grad_() for x in leaves)
    rates = torch.rand(ROWS, HEADS, LENGTH).requires_grad_()

    def step() -> None:
        out = cosformer_attention(q, k, v, causal=True, decay=rates, backend="triton")
        torch.autograd.grad(out, (q, k, v, rates), dout)
        torch.cuda.synchronize()

    return step


def seconds(step: Work) -> float:
    return in_turns({"step": step}, seconds=0.2)["step"]["ms"] / 1e3
