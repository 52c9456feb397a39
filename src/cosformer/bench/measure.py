"""How things are measured: in turns, against the machine's own limit, with peak memory from a fresh process."""

import importlib
import os
import platform
import resource
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
    """Seconds a call of each work, sample by sample: they take turns, so a busy moment of the machine meets all.

    Every work is sampled at least three times. Those that take less than a second go on until they have had `seconds` together.
    A sample follows an untimed call, which brings the work's own data into the caches, and is as many calls as fill 10 ms.
    """
    calls = {}
    for key, work in works.items():
        progress(f"warming up: {key}")
        for _ in range(2):
            start = time.perf_counter()
            work()
            took = time.perf_counter() - start
            if took > 1:
                break  # warm enough
        calls[key] = max(1, int(0.01 / max(took, 1e-7)))
    samples: dict[Key, list[float]] = {key: [] for key in works}
    spent, rounds = 0.0, 0
    while rounds < 3 or spent < seconds:
        turns = [key for key in works if rounds < 3 or samples[key][0] < 1]
        if not turns:
            break
        for key in turns:
            progress(f"round {rounds + 1}: {key}")
            begun = time.perf_counter()
            if rounds == 0 or samples[key][0] < 1:
                works[key]()
            start = time.perf_counter()
            for _ in range(calls[key]):
                works[key]()
            samples[key].append((time.perf_counter() - start) / calls[key])
            spent += time.perf_counter() - begun if samples[key][0] < 1 else 0.0
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
    return peak_memories(module, [case])[0]


def peak_memories(module: str, cases: list[dict]) -> list[float | None]:
    """The same of several cases: one process imports what they need, and each runs in a fork of it."""
    code = f"from cosformer.bench import measure; measure._print_peak_memories({module!r}, {cases!r}, {torch.get_num_threads()})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    found = {int(number): float(mib) for number, mib in (line.split() for line in run.stdout.splitlines())}
    return [found.get(number) for number in range(len(cases))]


def _print_peak_memories(module: str, cases: list[dict], threads: int) -> None:
    prepare = importlib.import_module(module).prepare
    for number, case in enumerate(cases):
        if (
            child := os.fork()
        ) == 0:  # this process has computed nothing yet, so it has no threads that a fork would lose
            torch.set_num_threads(threads)
            print(number, _added_peak(prepare, case), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def _added_peak(prepare: Callable[[dict], Work], case: dict) -> float:
    prepare({**case, "length": 64})()  # code, thread pools and libraries are not the operator's memory
    work = prepare(case)
    before = _peak(reset=True)
    work()
    return (_peak() - before) / 2**20


def _peak(reset: bool = False) -> int:
    """The process's peak memory in bytes, since the last reset where the system can (a new process starts at its parent's peak)."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if status.exists() and clear.exists():
        if reset:
            clear.write_text("5")
        return 1024 * next(
            int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


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
