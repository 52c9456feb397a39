"""cosformer bench --parallel: a training step of one sequence that several processes here hold together.

Each pair of length and number of processes gets fresh processes, one thread each, connected by gloo. Every
other step waits for each message as soon as it is sent; the difference shows what overlapping messages with
work hides. Time in the scan, and in the states that one process would not need, is counted by wrapping those
functions.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..hf import sequence_parallel
from ..hf.sizes import Size
from ..ops import parallel
from ..results import Shared
from .measure import LEAST, Sample, Say, Watch, peak, timing
from .models import VOCABULARY, build

PROCESSES = [1, 2, 4]
LENGTHS = [2048, 8192, 32768, 131072]
SIZE = Size(2, 64, 4)
MIXER = "cosformer"
COUNTED = {  # functions of ops/parallel.py, and the name of their time
    "_scan": "scan",
    "_segment": "states",
    "_segment_backward": "states",
    "_read": "states",
    "_read_backward": "states",
}


class Message:
    """An all-gather under way: how long the process worked beside it, and how long it then waited."""

    def __init__(self, work: Any):
        self.work, self.begun, self.beside, self.waiting = work, time.perf_counter(), 0.0, 0.0

    def wait(self) -> None:
        asked = time.perf_counter()
        self.work.wait()
        self.beside = max(self.beside, asked - self.begun)
        self.waiting += time.perf_counter() - asked


class Clock:
    """Measures what a process does with the time of a step."""

    def __init__(self) -> None:
        self.gather = dist.all_gather_single
        dist.all_gather_single = self.watched  # type: ignore[assignment]
        for name, what in COUNTED.items():
            setattr(parallel, name, self.counted(getattr(parallel, name), what))
        self.start(at_once=False)

    def start(self, *, at_once: bool) -> None:
        self.at_once, self.sent = at_once, 0
        self.spent = dict.fromkeys(COUNTED.values(), 0.0)
        self.messages: list[Message] = []

    def counted(self, function: Callable, what: str) -> Callable:
        """Counts this thread's CPU time, as others may run in between."""

        def run(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args)
            finally:
                self.spent[what] += time.thread_time() - start

        return run

    def watched(self, out: torch.Tensor, x: torch.Tensor, **options: Any) -> Message:
        message = Message(self.gather(out, x, **options))
        self.messages.append(message)
        self.sent += x.nbytes
        if self.at_once:
            message.wait()
        return message

    def found(self, seconds: float) -> dict[str, float]:
        """Shares of a step that took `seconds`; seconds of work beside its messages; bytes sent."""
        spent = self.spent | {"waiting": math.fsum(message.waiting for message in self.messages)}
        about = {name: value / seconds for name, value in spent.items()}
        return about | {"beside": math.fsum(message.beside for message in self.messages), "sent": self.sent}


def work(rank: int, **case: Any) -> dict[str, Any]:
    """What each process measures. One that fails ends: as long as it lived the others would wait for it."""
    try:
        return worked(rank, **case)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def worked(rank: int, *, processes: int, length: int, size: Size, steps: int, store: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    group: Any = dist.group.WORLD
    model = build(MIXER, length, size).train()
    ids = torch.randint(VOCABULARY, (1, length)).tensor_split(processes, 1)[rank]

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids, shift_labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    found: list[dict[str, Any]] = []
    with sequence_parallel(model, group) if processes > 1 else nullcontext():
        step(ids[:, :64])  # code, thread pools and libraries are not the step's memory
        before = peak(reset=True)
        step(ids)
        memory = peak() - before  # later steps add more, as the heap fragments
        clock = Clock()
        for number in range(steps * min(2, processes)):
            clock.start(at_once=number % min(2, processes) == 1)
            dist.barrier()
            with Watch() as watch:
                start = time.perf_counter()
                step(ids)
                took = time.perf_counter() - start
            about = {"seconds": took, "waited": watch.waited, "at_once": clock.at_once}
            found.append(about | clock.found(took))
    dist.destroy_process_group()
    return {"steps": found, "memory_mib": memory / 2**20}


def measured(processes: int, length: int, *, size: Size, steps: int) -> Shared:
    """Time is the slowest process's, memory the largest's; the rest are means over processes."""
    found = started(processes, length, size=size, steps=steps)
    turns = list(zip(*(process["steps"] for process in found), strict=True))
    usual = [turn for turn in turns if not turn[0]["at_once"]]
    at_once = [max(one["seconds"] for one in turn) for turn in turns if turn[0]["at_once"]]
    crowd = max(0.0, 1 - (os.cpu_count() or 1) / processes)  # share in which they wait for each other
    samples = []
    for turn in usual:
        waited = max(one["waited"] for one in turn)
        samples.append(Sample(max(one["seconds"] for one in turn), max(0.0, waited - crowd)))

    def mean(name: str) -> float:
        return statistics.median(math.fsum(one[name] for one in turn) / processes for turn in usual)

    return Shared(
        mixer=MIXER,
        processes=processes,
        length=length,
        size=str(size),
        **timing(samples),
        memory_mib=round(max(process["memory_mib"] for process in found), 1),
        sent_bytes=usual[0][0]["sent"],
        waiting=round(mean("waiting"), 5),
        scan=round(mean("scan"), 5),
        states=round(mean("states"), 5),
        ms_beside=round(1e3 * mean("beside"), 3),
        ms_at_once=1e3 * statistics.median(at_once) if at_once else None,
    )


def started(processes: int, length: int, *, size: Size, steps: int) -> list[dict[str, Any]]:
    """What each of so many new processes measured."""
    fresh = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(processes, mp_context=fresh) as pool:
        case: dict[str, Any] = {"processes": processes, "length": length, "size": size, "steps": steps}
        try:
            return list(pool.map(partial(work, **case, store=Path(folder, "store")), range(processes)))
        except (RuntimeError, ValueError) as wrong:
            told = f"one of {processes} processes failed at length {length:,}: {wrong}"
            raise SystemExit(f"bench: --parallel: {told}") from None


def run(args: argparse.Namespace, say: Say) -> Iterator[Shared]:
    lengths = args.lengths or ([2048, 4096] if args.quick else LENGTHS)
    for length in lengths:
        for processes in args.parallel or PROCESSES:
            say(f"{length:,} tokens, {processes} process(es)")
            yield measured(processes, length, size=SIZE, steps=max(LEAST, min(16, 2**19 // length)))
