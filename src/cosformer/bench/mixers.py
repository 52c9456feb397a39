"""Every mixer: time and peak memory of forward and backward against length, and how fast each grows."""

import argparse
import math
from collections.abc import Callable

import torch

from ..mixers import build, names
from .measure import in_turns, peak_memory, spread

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
HEADS, SIZE = 2, 64
SECONDS = 20.0  # a mixer whose next length would take longer than this for one call stops growing


def prepare(case: dict) -> Callable[[], object]:
    """Forward and backward of one mixer at one length, batch 1."""
    length, causal = case["length"], case["causal"]
    mixer = build(case["mixer"], heads=HEADS, head_dim=SIZE, max_length=length)
    leaves = [torch.randn(1, HEADS, length, SIZE, requires_grad=True) for _ in range(3)]
    used = [x for x, name in zip(leaves, "qkv", strict=True) if name not in mixer.unread]
    dout = torch.randn(1, HEADS, length, SIZE)
    return lambda: torch.autograd.grad(mixer(*leaves, causal=causal), used, dout)


def run(args: argparse.Namespace, progress: Callable[[str], None]) -> list[dict]:
    chosen = names() if args.mixers == ["all"] else args.mixers
    if unknown := [n for n in chosen if n not in names()]:
        raise SystemExit(f"bench: mixer {unknown[0]!r} is unknown; `all`, or any of {', '.join(names())}")
    causal = args.causal == "yes"  # bidirectional unless asked: every mixer has that
    rows = []
    last: dict[str, float] = {}
    for length in args.lengths or LENGTHS:  # all mixers at one length take turns
        works = {}
        for name in chosen:
            reason = getattr(
                build(name, heads=HEADS, head_dim=SIZE, max_length=length),
                "causal" if causal else "bidirectional",
            )
            if reason is True and 4 * last.get(name, 0.0) < SECONDS:
                works[name] = prepare({"mixer": name, "length": length, "causal": causal})
        for name, samples in in_turns(
            works, seconds=args.seconds / 6, progress=lambda t: progress(f"length {length}, {t}")
        ).items():
            sizes = {"length": length, "causal": causal, "heads": HEADS, "size": SIZE}
            rows.append({"bench": "mixers", "mixer": name, **sizes, **spread(samples)})
            last[name] = rows[-1]["ms"] / 1e3
    for row in rows if args.memory else ():
        progress(f"memory of {row['mixer']} at length {row['length']}")
        row["memory_mib"] = peak_memory(
            "cosformer.bench.mixers", {k: row[k] for k in ("mixer", "length", "causal")}
        )
    return rows


def exponent(points: list[tuple[float, float]]) -> float:
    """The slope of a straight line through (log length, log cost) over the longer half of the lengths."""
    points = [(n, cost) for n, cost in sorted(points) if cost and cost > 0]
    points = points[len(points) // 2 - (len(points) % 2 == 0 and len(points) > 2) :]
    if len(points) < 2:
        return math.nan
    x, y = ([math.log(p[i]) for p in points] for i in (0, 1))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def summary(rows: list[dict]) -> str:
    """One line a mixer: its time at each length, and the exponents of time and memory."""
    lengths = sorted({r["length"] for r in rows})
    lines = [
        f"{'forward + backward, ms':<24}"
        + "".join(f"{n:>9,}" for n in lengths)
        + f"{'time ~ N^':>11}{'memory ~ N^':>13}"
    ]
    for name in dict.fromkeys(r["mixer"] for r in rows):
        mine = {r["length"]: r for r in rows if r["mixer"] == name}
        cells = "".join(f"{mine[n]['ms']:>9.3g}" if n in mine else f"{'-':>9}" for n in lengths)
        time_, memory = (
            exponent([(n, r.get(key) or 0) for n, r in mine.items()]) for key in ("ms", "memory_mib")
        )
        lines.append(f"{name:<24}{cells}{time_:>11.2f}{memory:>13.2f}")
    return "\n".join(lines)
