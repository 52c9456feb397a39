"""Compiles the triton kernels for GPUs that need not be here: their registers, spills and shared memory.

    python tests/triton_aot.py --out benchmarks/triton.jsonl      # half an hour; the options choose a part

The kernels are those of training steps, taken where the backend would launch them. Of a file that is there
only what was made from other kernels, or is missing, is compiled.
"""

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default today, made explicit
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # cached kernels have no log

import torch
import triton
from triton_step import CALLS, DTYPES, SIZES, TARGETS, absent, identities, identity, training_step

measured: dict[str, dict[str, int]] = {}  # by a kernel's identity: other calls may launch the same
PTXAS = {"registers": r"Used (\d+) registers", "spills": r"(\d+) bytes spill stores"}
AMDGCN = {"registers": r"\.vgpr_count:\s+(\d+)", "spills": r"\.vgpr_spill_count:\s+(\d+)"}


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


def rows(target: str, call: str, dtype: str, size: int):
    """A row for each distinct kernel of a training step."""
    found = {}

    def compiled(kernel, grid, *arguments, **options):
        source = identity(kernel, arguments, options)
        if source not in measured:
            made, log = logged(kernel.warmup, *arguments, grid=grid, **options)
            patterns, text = (AMDGCN, made.asm["amdgcn"]) if "amdgcn" in made.asm else (PTXAS, log)
            counts = {name: int(re.search(pattern, text)[1]) for name, pattern in patterns.items()}
            measured[source] = counts | {"shared": made.metadata.shared}
        opt = arguments[-1]
        found[source] = {
            "target": target,
            "dtype": dtype,
            "size": size,
            "call": call,
            "kernel": kernel.__name__,
            "tiles": [opt.C, opt.BK, opt.BV],
            "warps": options["num_warps"],
            "stages": options["num_stages"],
            **measured[source],
            "source": source,
        }

    with absent(target, compiled):
        training_step(call, dtype, size)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=SIZES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--out", type=Path, help="complete this file (default: print)")
    args = parser.parse_args()
    versions = {"triton": triton.__version__, "torch": torch.__version__}
    found: dict[tuple, list[dict]] = {kind: [] for kind in itertools.product(TARGETS, CALLS, DTYPES, SIZES)}
    if args.out and args.out.exists():
        for row in map(json.loads, args.out.read_text().splitlines()[1:]):
            found[tuple(row[name] for name in ("target", "call", "dtype", "size"))].append(row)

    def text() -> str:
        lines = (versions, *(row for some in found.values() for row in some))
        return "".join(json.dumps(line) + "\n" for line in lines)

    for kind in itertools.product(args.targets, args.calls, args.dtypes, args.sizes):
        if [row["source"] for row in found[kind]] != identities(*kind):
            found[kind] = rows(*kind)
            if args.out:
                args.out.write_text(text())
    if not args.out:
        print(text(), end="")


if __name__ == "__main__":
    main()
