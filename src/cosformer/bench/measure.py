"""How things are measured: in turns, with a watch on other processes, peak memory from fresh processes."""

import importlib
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from .. import __version__
from ..results import CONTENDED, Machine, Row

LEAST = 3  # samples of every work at least
Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], object]
Say = Callable[[str], None]


class Sample(NamedTuple):
    seconds: float  # per call
    waited: float  # see `Watch`


class Watch:
    """What other processes take: `waited`, the share of time in which our threads were ready but not running.

    Linux counts it per thread. Elsewhere it is the share in which the calling thread was off the processor.
    """

    def __enter__(self) -> "Watch":
        self.before = self._times()
        return self

    def __exit__(self, *_: object) -> None:
        ran, waited = (max(0.0, now - then) for now, then in zip(self._times(), self.before))
        self.waited = waited / (ran + waited) if ran + waited else 0.0

    @staticmethod
    def _times() -> tuple[float, float]:
        ran = waited = 0
        try:
            for thread in os.scandir("/proc/self/task"):
                on_processor, ready, _ = Path(thread.path, "schedstat").read_text().split()
                ran, waited = ran + int(on_processor), waited + int(ready)
        except (OSError, ValueError):
            return time.thread_time(), time.perf_counter() - time.thread_time()
        return ran / 1e9, waited / 1e9


def in_turns(works: Mapping[Key, Work], *, seconds: float, say: Say = lambda text: None) -> dict[Key, dict]:
    """The timing fields of `results.Cost` for each work. They take turns, so a busy moment affects them all.

    Each is sampled at least three times. Those under a second per call continue until they have had `seconds`
    together. Those disturbed by other processes continue until three samples are undisturbed, but not beyond
    six samples or twice `seconds`.
    """
    calls = {}
    for key, work in works.items():
        say(f"warming up: {key}")
        calls[key] = _warm_up(work)
    samples: dict[Key, list[Sample]] = {key: [] for key in works}
    spent = 0.0

    def wants_more(taken: list[Sample]) -> bool:
        if len(taken) < LEAST or (taken[0].seconds < 1 and spent < seconds):
            return True
        return len(_calm(taken)) < LEAST and len(taken) < 2 * LEAST and spent < 2 * seconds

    while turns := [key for key in works if wants_more(samples[key])]:
        for key in turns:
            taken = samples[key]
            say(f"round {len(taken) + 1}: {key}")
            begun = time.perf_counter()
            if not taken or taken[0].seconds < 1:
                works[key]()  # brings the work's own data into the caches
            with Watch() as watch:
                start = time.perf_counter()
                for _ in range(calls[key]):
                    works[key]()
                took = (time.perf_counter() - start) / calls[key]
            taken.append(Sample(took, watch.waited))
            spent += time.perf_counter() - begun if taken[0].seconds < 1 else 0.0
    return {key: timing(taken) for key, taken in samples.items()}


def _warm_up(work: Work) -> int:
    """How many calls fill 10 ms, which is one sample."""
    took = 0.0
    for _ in range(2):
        start = time.perf_counter()
        work()
        took = time.perf_counter() - start
        if took > 1:
            break  # warm enough
    return max(1, int(0.01 / max(took, 1e-7)))


def _calm(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.waited <= CONTENDED]


def timing(samples: list[Sample]) -> dict[str, Any]:
    """The median and the middle half. Disturbed samples count only if fewer than three are undisturbed."""
    kept = calm if len(calm := _calm(samples)) >= LEAST else samples
    low, middle, high = statistics.quantiles([1e3 * s.seconds for s in kept], n=4, method="inclusive")
    waited = statistics.median(sample.waited for sample in kept)
    return {"ms": middle, "ms_low": low, "ms_high": high, "samples": len(kept), "waited": round(waited, 4)}


def disturbance(rows: Iterable[Row]) -> str:
    """What the terminal says about times taken while other processes ran."""
    rows = list(rows)
    if bad := [row for row in rows if row.contended]:
        worst = max(getattr(row, "waited", 0.0) for row in bad)
        return (
            f"{len(bad)} of {len(rows)} times were taken while other processes ran (threads waited up to"
            f" {worst:.0%} of the time); they are marked contended and are not to be trusted"
        )
    return f"no time was disturbed by other processes (threads waited less than {CONTENDED:.0%} of the time)"


def measured(
    module: str, cases: list[dict[str, Any]], *, label: str, seconds: float, memory: bool, say: Say
) -> list[dict[str, Any]]:
    """For each case, what `module.prepare(case)()` takes, as fields of `results.Cost`: time, peak memory."""
    prepare = importlib.import_module(module).prepare
    works = {f"{label} {case['mixer']} at {case['length']:,}": prepare(case) for case in cases}
    timed = in_turns(works, seconds=seconds, say=say)
    say(f"peak memory of {', '.join(works)}")
    peaks = peak_memories(module, cases) if memory else [None] * len(cases)
    return [{**fields, "memory_mib": mib} for fields, mib in zip(timed.values(), peaks, strict=True)]


def peak_memories(module: str, cases: list[dict[str, Any]]) -> list[float | None]:
    """MiB that `module.prepare(case)()` adds to a process's peak, for each case; None if it did not finish.

    One process imports what they need, and each case runs in a fork of it.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([module])
    found: list[float | None] = []
    for case in cases:
        with ProcessPoolExecutor(1, mp_context=server) as fresh:
            added = fresh.submit(_added_peak, module, case, torch.get_num_threads())
            found.append(None if added.exception() else added.result())
    return found


def device_memories(module: str, cases: list[dict[str, Any]]) -> list[float | None]:
    """MiB that `module.prepare(case)()` adds to a GPU's peak memory, for each case."""
    prepare = importlib.import_module(module).prepare
    found: list[float | None] = []
    for case in cases:
        work = prepare(case)
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        work()
        found.append((torch.accelerator.max_memory_allocated() - before) / 2**20)
    return found


def _added_peak(module: str, case: dict[str, Any], threads: int) -> float:
    torch.set_num_threads(threads)
    prepare = importlib.import_module(module).prepare
    prepare({**case, "length": 64})()  # code, thread pools and libraries are not the operator's memory
    work = prepare(case)
    before = peak(reset=True)
    work()
    return (peak() - before) / 2**20


def peak(reset: bool = False) -> int:
    """This process's peak memory in bytes since the last reset; a fork starts with its parent's."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if status.exists() and clear.exists():
        if reset:
            clear.write_text("5")
        lines = status.read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def machine(**more: Any) -> Machine:
    """What the numbers depend on: processor, threads, versions, commit."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    commit = memory = None
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    with suppress(OSError):
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    with suppress(OSError, ValueError):
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return Machine(
        cpu=cpu,
        isa=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        cosformer=__version__,
        python=platform.python_version(),
        date=datetime.now(timezone.utc).date().isoformat(),
        system=platform.system(),
        memory_gib=memory,
        commit=commit,
        **more,
    )


def say(text: str) -> None:
    """Rewrites one line on the terminal; does nothing without one."""
    if sys.stderr.isatty():
        shown = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r\033[K{shown}", end="", file=sys.stderr, flush=True)
