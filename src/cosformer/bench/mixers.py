"""Every mixer: time and peak memory of forward and backward against length, and how fast each grows."""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ..mixers import build, names, pattern
from ..results import Cost, Fit, growth
from .measure import Say, Work, in_turns, peak_memories

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
    chosen = names() if args.mixers == ["all"] else args.mixers
    for name in chosen:
        try:
            pattern(name)
        except ValueError as error:
            raise SystemExit(f"bench: {error}; or `all`") from None
    causal = args.causal == "yes"
    row = partial(Cost, what="mixer", work="training", heads=HEADS, head_dim=HEAD_DIM)
    last: dict[str, float] = {}
    for length in args.lengths or LENGTHS:
        works = {}
        for name in chosen:
            mixer = build(name, heads=HEADS, head_dim=HEAD_DIM, max_length=length)
            able = mixer.causal if causal else mixer.bidirectional
            if able is True and 4 * last.get(name, 0.0) < SECONDS:
                works[name] = prepare({"mixer": name, "length": length, "causal": causal})
        seconds = args.seconds / len(LENGTHS)
        timed = in_turns(works, seconds=seconds, say=lambda text: say(f"length {length}, {text}"))
        cases: list[dict[str, Any]] = [{"mixer": name, "length": length, "causal": causal} for name in timed]
        say(f"memory at length {length}")
        memory = peak_memories(__name__, cases) if args.memory else [None] * len(cases)
        for case, times, mib in zip(cases, timed.values(), memory):
            last[case["mixer"]] = times["ms"] / 1e3
            yield row(**case, **times, memory_mib=mib)


def summary(rows: list[Cost]) -> str:
    """One line a mixer: its time at each length, and the exponents of time and memory."""
    lengths = sorted({row.length for row in rows})
    heads = "".join(f"{n:>9,}" for n in lengths) + f"{'time ~ N^':>22}{'memory ~ N^':>22}"
    lines = [f"{'forward + backward, ms':<24}{heads}"]
    for name in dict.fromkeys(row.mixer for row in rows):
        mine = {row.length: row for row in rows if row.mixer == name}
        cells = "".join(f"{mine[n].ms:>9.3g}" if n in mine else f"{'-':>9}" for n in lengths)
        time_ = growth((n, row.ms) for n, row in mine.items())
        memory = growth((n, row.memory_mib or 0.0) for n, row in mine.items())
        lines.append(f"{name:<24}{cells}{_exponent(time_):>22}{_exponent(memory):>22}")
    return "\n".join(lines)


def _exponent(fit: Fit | None) -> str:
    return f"{fit.exponent:.2f} ({fit.lengths} lengths)" if fit else "too few lengths"
