"""Compiles the triton kernels for GPUs that need not be here: their registers, spills and shared memory.

    python tests/triton_aot.py --out benchmarks/triton.jsonl      # half an hour; the options choose a part

The kernels are those of training steps, taken where the backend would launch them. A row has the hash of the
sources it was made from; of a file that is there only what has another hash, or is missing, is compiled.
"""

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as Triton has it today, said aloud
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # what comes from the cache has no log

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton_source import source

from cosformer.ops.call import Call, Inputs, Upstream
from cosformer.ops.triton import device, run

TARGETS = {  # and the bytes of shared memory that a program may use there
    "sm_80": (GPUTarget("cuda", 80, 32), 166912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65536),
}
SIZES = [32, 64, 128, 256]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CALLS = {  # causal, gated decay
    "causal, gated decay": (True, True),
    "bidirectional": (False, False),
    "bidirectional, gated decay": (False, True),
}
measured: dict[str, dict[str, int]] = {}  # by the hash of a compiled kernel
PTXAS = {"registers": r"Used (\d+) registers", "spills": r"(\d+) bytes spill stores"}
AMDGCN = {"registers": r"\.vgpr_count:\s+(\d+)", "spills": r"\.vgpr_spill_count:\s+(\d+)"}


class Absent:
    """A device that is not here: what Triton asks of one before it launches."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return str(self.target)

    def get_current_stream(self, device):
        return 0


def logged(compile, *arguments, **options):
    """What a compiler returns, and what it and the programs it starts have written."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        kept = [(fd, os.dup(fd)) for fd in (1, 2)]
        for fd, _ in kept:
            os.dup2(file.fileno(), fd)
        try:
            made = compile(*arguments, **options)
        finally:
            for fd, copy in kept:
                os.dup2(copy, fd)
                os.close(copy)
        file.seek(0)
        return made, file.read().decode()


def training_step(call: str, dtype: torch.dtype, size: int) -> None:
    """Forward and backward, with tensors laid out as projections are; their values are never read."""
    causal, gated = CALLS[call]
    x = torch.empty(2, 1024, 4, size, dtype=dtype).transpose(1, 2)
    inputs = Inputs(x, x, x, torch.empty(2, 4, 1024) if gated else None)
    options = Call((2048.0,), causal=causal, relu=True)
    y = run.forward(inputs, options)
    run.backward(Upstream(x, None), inputs, y, options)


def rows(target: str, call: str, dtype: str, size: int):
    """One for each distinct kernel of a training step."""
    chip, shared = TARGETS[target]
    found = {}

    def compiled(kernel, grid, *arguments, **options):
        made, log = logged(kernel.warmup, *arguments, grid=grid, **options)
        patterns, text = (AMDGCN, made.asm["amdgcn"]) if "amdgcn" in made.asm else (PTXAS, log)
        if made.hash not in measured:  # else it was compiled for another call, and has no log
            measured[made.hash] = {n: int(re.search(p, text)[1]) for n, p in patterns.items()}
        opt = arguments[-1]
        found[made.hash] = {
            "target": target,
            "dtype": dtype,
            "size": size,
            "call": call,
            "kernel": kernel.__name__,
            "tiles": [opt.C, opt.BK, opt.BV],
            "warps": options["num_warps"],
            "stages": options["num_stages"],
            **measured[made.hash],
            "shared": made.metadata.shared,
        }

    driver.set_active(Absent(chip))
    run._launch = compiled
    device.described = lambda _: (target, shared)
    device.has_tf32 = lambda _: True
    training_step(call, DTYPES[dtype], size)
    return found.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=SIZES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--out", type=Path, help="complete this file (default: print)")
    args = parser.parse_args()
    versions, present = {"triton": triton.__version__, "torch": torch.__version__}, source()
    found: dict[tuple, list[dict]] = {kind: [] for kind in itertools.product(TARGETS, CALLS, DTYPES, SIZES)}
    if args.out and args.out.exists():
        for row in map(json.loads, args.out.read_text().splitlines()[1:]):
            found[tuple(row[name] for name in ("target", "call", "dtype", "size"))].append(row)

    def text() -> str:
        lines = (versions, *(row for some in found.values() for row in some))
        return "".join(json.dumps(line) + "\n" for line in lines)

    for kind in itertools.product(args.targets, args.calls, args.dtypes, args.sizes):
        if not found[kind] or any(row["source"] != present for row in found[kind]):
            found[kind] = [{**row, "source": present} for row in rows(*kind)]
            if args.out:
                args.out.write_text(text())
    if not args.out:
        print(text(), end="")


if __name__ == "__main__":
    main()
