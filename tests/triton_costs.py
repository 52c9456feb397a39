"""What the triton backend's launches must cost, computed from their tiles, not run: docs/gpu.md's tables.

    python tests/triton_costs.py

A launch takes as long as its bytes at the memory's speed or its matrix products at the tensor cores',
whichever is longer. What two programs read is counted twice, as if no cache served the second.
"""

from typing import NamedTuple

import torch

from cosformer.ops.call import Call, Inputs, Upstream
from cosformer.ops.triton import device as chips
from cosformer.ops.triton import run

HEADS, SIZE, TOKENS = 16, 64, 65536
LENGTHS = (1024, 8192, 65536)
LAUNCH, STEP = 4e-6, 1e-6  # seconds, assumed: of a launch; of a step in a walk, which is a chain of loads


class Device(NamedTuple):
    name: str
    products: float  # bfloat16, per second, dense
    memory: float  # bytes per second
    shared: int  # bytes per program
    softmax: float  # of FlashAttention, per second: the best published forward


DEVICES = (  # published: FlashAttention-2 reaches 73 % of an A100, FlashAttention-3 740 TFLOP/s on an H100
    Device("A100 80 GB", 312e12, 2.0e12, 163 * 1024, 0.73 * 312e12),
    Device("H100 SXM", 989e12, 3.35e12, 227 * 1024, 740e12),
)


class Cost(NamedTuple):
    bytes: float
    operations: float
    chain: int = 0  # steps that must follow one another


def cost(kernel: str, grid: tuple[int, ...], arguments: tuple) -> Cost:
    opt, programs = arguments[-1], 1
    for n in grid:
        programs *= n
    C, BK, BV, D, E, b = opt.C, opt.BK, opt.BV, opt.D, opt.E, 2
    state = (2 if opt.cosine else 1) * BK * BV  # numbers in one tile, and products per token
    if kernel == "weigh":
        return Cost(programs * C * (2 * E * b + 12), 0)
    if kernel == "gather":
        steps, each = opt.steps * (arguments[1].stretch // 2 - 1), arguments[4]  # see tiles.odd
        kept = each.matrix.itemsize * state / opt.steps if each is not None else 0
        return Cost(
            programs * steps * (C * ((BK + BV) * b + 8) + kept), programs * steps * 2 * C * state, steps
        )
    across, inner, outer = (D, BK, BV) if kernel == "read" else (E, BV, BK)
    found = [s.matrix.itemsize for s in arguments[-3:-1] if s is not None]
    states, stored = len(found), sum(found)
    loops = -(-across // inner)  # the program's own tile is `outer` wide; it walks `across`
    read = C * (loops * inner + outer) * b + loops * state * stored + C * 16
    operations = states * loops * 2 * C * state
    if opt.pairs:
        read += C * (loops * inner + outer) * b
        twice = kernel == "grad" and opt.sees == "both"
        operations += 2 * C * C * (loops * inner + (2 if twice else 1) * outer)
    return Cost(programs * opt.group * read + programs * C * outer * b, programs * opt.group * operations)


def launches(device: Device, length: int, causal: bool, gated: bool) -> tuple[list[Cost], list[Cost]]:
    """The launches of a forward, and of a backward."""
    found: list[Cost] = []
    run._launch = lambda kernel, grid, *args, **options: found.append(cost(kernel.__name__, grid, args))
    chips.described = lambda _: (device.name, device.shared)
    meta = {"device": "meta", "dtype": torch.bfloat16}
    x = torch.empty(TOKENS // length, length, HEADS, SIZE, **meta).transpose(1, 2)
    rates = torch.empty(TOKENS // length, HEADS, length, device="meta") if gated else None
    inputs, call = Inputs(x, x, x, rates), Call((2.0 * length,), causal=causal, relu=True)
    y = run.forward(inputs, call)
    forward = found.copy()
    run.backward(Upstream(x, None), inputs, y, call)
    return forward, found[len(forward) :]


def seconds(costs: list[Cost], device: Device) -> float:
    return sum(
        max(c.bytes / device.memory, c.operations / device.products, c.chain * STEP) + LAUNCH for c in costs
    )


def softmax(device: Device, length: int, causal: bool) -> tuple[float, float]:
    """A forward, and a training step: the backward has two and a half times its products."""
    forward = 4 * TOKENS * length * HEADS * SIZE / (2 if causal else 1) / device.softmax + LAUNCH
    return forward, 3.5 * forward


def table(causal: bool, gated: bool) -> str:
    lines = [
        "| device | length | launches | GB moved | TFLOP | forward | training step | flash softmax's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for device in DEVICES:
        for length in LENGTHS:
            forward, backward = launches(device, length, causal, gated)
            both = forward + backward
            moved, products = sum(c.bytes for c in both) / 1e9, sum(c.operations for c in both) / 1e12
            ours = seconds(forward, device), seconds(both, device)
            theirs = softmax(device, length, causal)
            times = " | ".join(f"{1e3 * t:.2f} ms" for t in ours)
            times += f" | {1e3 * theirs[0]:.2f}, {1e3 * theirs[1]:.1f} ms"
            count = f"{len(forward)} + {len(backward)}"
            lines.append(f"| {device.name} | {length:,} | {count} | {moved:.2f} | {products:.2f} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"Causal, gated decay:\n\n{table(True, True)}\n\nBidirectional:\n\n{table(False, False)}")
