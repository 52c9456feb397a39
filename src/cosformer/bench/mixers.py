"""Every mixer: time and peak memory of forward and backward against length."""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ..mixers import build, names
from ..results import Cost
from .measure import Say, Work, measured

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
HEADS, HEAD_DIM = 2, 64
SECONDS = 20.0  # a mixer whose next length would take longer than this for one call stops growing


def prepare(case: dict[str, Any]) -> Work:
    """Forward and backward of one mixer at one length, batch 1."""
    mixer = build(case["mixer"], heads=HEADS, head_dim=HEAD_DIM, max_length=case["length"])
    shape = (1, HEADS, case["length"], HEAD_DIM)
    leaves, dout = [torch.randn(shape, requires_grad=True) for _ in range(3)], torch.randn(shape)
    x = torch.randn(1, case["length"], HEADS * HEAD_DIM)

    def work() -> object:  # a mixer need not read all of q, k and v
        out = mixer(*leaves, x=x, causal=case["causal"])
        return torch.autograd.grad(out, leaves, dout, allow_unused=True)

    return work


def run(args: argparse.Namespace, say: Say) -> Iterator[Cost]:
    """All mixers at one length take turns; bidirectional unless asked, since every mixer has that."""
    chosen = names() if "all" in args.mixers else args.mixers
    causal, last = args.causal == "yes", dict.fromkeys(chosen, 0.0)
    row = partial(Cost, what="mixer", work="training", heads=HEADS, head_dim=HEAD_DIM)
    for length in args.lengths or LENGTHS:
        cases: list[dict[str, Any]] = []
        for name in chosen:
            mixer = build(name, heads=HEADS, head_dim=HEAD_DIM, max_length=length)
            able = mixer.causal if causal else mixer.bidirectional
            if able is True and 4 * last[name] < SECONDS:
                cases.append({"mixer": name, "length": length, "causal": causal})
        seconds = args.seconds / len(LENGTHS)
        found = measured(__name__, cases, label="training", seconds=seconds, memory=args.memory, say=say)
        for case, fields in zip(cases, found):
            last[case["mixer"]] = fields["ms"] / 1e3
            yield row(**case, **fields)
