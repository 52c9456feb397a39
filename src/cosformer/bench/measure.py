"""How things are measured: in turns, against the machine's own limit, with peak memory from a fresh process."""

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from .. import __version__

Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], object]


def in_turns(
    works: Mapping[Key, Work], *, seconds: float, progress: Callable[[str], None] = lambda text: None
) -> dict[Key, list[float]]:
    """Seconds a call of each work, sample by sample: after a warm-up they take turns, so a busy moment of the machine meets all.

    Every work is sampled at least three times, and until `seconds` are spent; a sample is as many calls as fill 2 ms.
    """
    calls = {}
    for key, work in works.items():
        progress(f"warming up: {key}")
        work()
        start = time.perf_counter()
        work()
        calls[key] = max(1, int(0.002 / max(time.perf_counter() - start, 1e-7)))
    samples: dict[Key, list[float]] = {key: [] for key in works}
    begun, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - begun < seconds:
        for key, work in works.items():
            if rounds >= 3 and samples[key][0] * calls[key] > seconds / 20:
                continue  # slow ones are steady; the turns left are for the quick ones
            progress(f"round {rounds + 1}: {key}")
            start = time.perf_counter()
            for _ in range(calls[key]):
                work()
            samples[key].append((time.perf_counter() - start) / calls[key])
        rounds += 1
    return samples


def spread(samples: list[float]) -> dict[str, float]:
    """Median, fastest and slowest, in milliseconds."""
    return {
        "ms": 1e3 * statistics.median(samples),
        "low_ms": 1e3 * min(samples),
        "high_ms": 1e3 * max(samples),
        "samples": len(samples),
    }


def gemm_works() -> dict[str, tuple[Work, float]]:
    """Batched matrix products of a few shapes with their flops: the fastest is what a kernel made of such products can hope for."""
    works: dict[str, tuple[Work, float]] = {}
    for batch, n, m, p in ((8, 1024, 64, 128), (8, 64, 1024, 128), (8, 512, 256, 256), (2, 1024, 1024, 1024)):
        a, b, out = torch.randn(batch, n, m), torch.randn(batch, m, p), torch.empty(batch, n, p)
        works[f"gemm {batch}x{n}x{m}x{p}"] = (partial(torch.bmm, a, b, out=out), 2.0 * batch * n * m * p)
    return works


def peak_memory(module: str, case: dict) -> float | None:
    """MiB that `module.prepare(case)()` adds to the peak of a fresh process; None if it did not finish."""
    code = f"from cosformer.bench import measure; measure._print_peak_memory({module!r}, {case!r}, {torch.get_num_threads()})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return float(run.stdout) if run.returncode == 0 else None


def _print_peak_memory(module: str, case: dict, threads: int) -> None:
    import importlib
    import resource

    torch.set_num_threads(threads)
    prepare = importlib.import_module(module).prepare
    prepare({**case, "length": 64})()  # code, thread pools and libraries are not the operator's memory
    work = prepare(case)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    unit = 2**20 if sys.platform == "darwin" else 2**10
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit)


def machine() -> dict:
    """What the numbers depend on: processor, threads, versions, commit."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        commit = None
    return {
        "cpu": cpu,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cosformer": __version__,
        "commit": commit,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def show_progress(text: str) -> None:
    """One line on the terminal, rewritten; nothing where there is none to watch."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
