"""cosformer bench --parallel: a training step of one sequence that several processes here hold together.

Each pair of length and number of processes has fresh processes, one thread each, which speak gloo. Messages
are watched from when they begin to when all have come; every other step waits for each at once, so that its
time says what the work in between hides. The time in the scan, and in the states that one process would not
need, is counted where those functions are called.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..hf import sequence_parallel
from ..hf.parallel import parts
from ..hf.sizes import Size
from ..ops import parallel
from ..results import Shared
from .measure import LEAST, Sample, Say, Watch, _peak, timing
from .models import VOCABULARY, build

PROCESSES = [1, 2, 4]
LENGTHS = [8192, 32768, 131072]
SIZE = Size(2, 64, 4)
MIXER = "cosformer"
SCAN = ("_scan",)
STATES = ("_segment", "_segment_backward", "_read", "_read_backward")


class Message:
    """An all-gather under way: when it began, when all had come, how long somebody stood and waited."""

    def __init__(self, work: Any, begun: float):
        self.work, self.begun, self.done, self.waiting = work, begun, math.inf, 0.0
        work.get_future().add_done_callback(lambda _: setattr(self, "done", time.perf_counter()))

    def wait(self) -> None:
        asked = time.perf_counter()
        self.work.wait()
        now = time.perf_counter()
        self.waiting, self.done = now - asked, min(now, self.done)


class Clock:
    """What a process does with the time of a step."""

    def __init__(self) -> None:
        self.at_once, self.gather = False, dist.all_gather_single
        dist.all_gather_single = self.watched  # type: ignore[assignment]
        for name in SCAN + STATES:
            what = "scan" if name in SCAN else "states"
            setattr(parallel, name, self.counted(getattr(parallel, name), what))
        self.messages: list[Message] = []
        self.start()

    def start(self) -> None:
        self.processor, self.sent, self.messages = {"scan": 0.0, "states": 0.0}, 0, []

    def counted(self, function: Callable, what: str) -> Callable:
        """The processor's time of this thread: others may run in between."""

        def run(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args)
            finally:
                self.processor[what] += time.thread_time() - start

        return run

    def watched(self, out: torch.Tensor, x: torch.Tensor, **options: Any) -> Message:
        begun, self.sent = time.perf_counter(), self.sent + x.nbytes
        message = Message(self.gather(out, x, **options), begun)
        self.messages.append(message)
        if self.at_once:
            message.wait()
        return message

    def shares(self, seconds: float) -> dict[str, float]:
        waiting = math.fsum(message.waiting for message in self.messages)
        under_way = math.fsum(message.done - message.begun for message in self.messages)
        found = {**self.processor, "waiting": waiting, "messages": under_way}
        return {name: value / seconds for name, value in found.items()}


def work(case: dict[str, Any]) -> None:
    """One process: it prints what it measured."""
    torch.set_num_threads(1)
    rank, processes, length = case["rank"], case["processes"], case["length"]
    dist.init_process_group("gloo", init_method=f"file://{case['store']}", rank=rank, world_size=processes)
    group: Any = dist.group.WORLD
    model = build(MIXER, length, Size(**case["size"])).train()
    ids = torch.randint(VOCABULARY, (1, length)).split(parts(length, processes), 1)[rank]

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids, shift_labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    found: list[dict[str, Any]] = []
    with sequence_parallel(model, group) if processes > 1 else nullcontext():
        step(ids[:, :64])  # code, thread pools and libraries
        step(ids)
        clock = Clock()
        for number in range(case["steps"] * (2 if processes > 1 else 1)):
            clock.at_once = processes > 1 and number % 2 == 1
            dist.barrier()
            clock.start()
            with Watch() as watch:
                start = time.perf_counter()
                step(ids)
                took = time.perf_counter() - start
            about = {"seconds": took, "waited": watch.waited, "at_once": clock.at_once, "sent": clock.sent}
            found.append(about | clock.shares(took))
    print(json.dumps({"steps": found, "memory_mib": _peak() / 2**20}), flush=True)
    dist.destroy_process_group()


def measured(processes: int, length: int, *, size: Size, steps: int) -> Shared:
    """The slowest process counts for time, the largest for memory; shares are means over processes."""
    code = "import sys, json; from cosformer.bench import parallel; parallel.work(json.loads(sys.argv[1]))"
    with tempfile.TemporaryDirectory() as folder:
        case = {"processes": processes, "length": length, "size": asdict(size), "steps": steps}
        case["store"] = str(Path(folder) / "store")
        command = [sys.executable, "-W", "ignore", "-c", code]
        started = [
            subprocess.Popen(
                [*command, json.dumps({**case, "rank": rank})], stdout=subprocess.PIPE, text=True
            )
            for rank in range(processes)
        ]
        said = [process.communicate()[0] for process in started]
    if wrong := [rank for rank, process in enumerate(started) if process.returncode]:
        raise SystemExit(f"bench: --parallel: process {wrong[0]} of {processes} failed at length {length:,}")
    found = [json.loads(text.splitlines()[-1]) for text in said]
    turns = list(zip(*(process["steps"] for process in found), strict=True))
    usual = [turn for turn in turns if not turn[0]["at_once"]]
    slowest = [
        Sample(max(one["seconds"] for one in turn), max(one["waited"] for one in turn)) for turn in usual
    ]
    at_once = [max(one["seconds"] for one in turn) for turn in turns if turn[0]["at_once"]]

    def share(name: str) -> float:
        return round(statistics.median(math.fsum(one[name] for one in turn) / processes for turn in usual), 5)

    return Shared(
        mixer=MIXER,
        processes=processes,
        length=length,
        size=str(size),
        **timing(slowest),
        memory_mib=round(max(process["memory_mib"] for process in found), 1),
        sent_bytes=usual[0][0]["sent"],
        waiting=share("waiting"),
        messages=share("messages"),
        scan=share("scan"),
        states=share("states"),
        ms_at_once=1e3 * statistics.median(at_once) if at_once else None,
    )


def run(args: argparse.Namespace, say: Say) -> Iterator[Shared]:
    lengths = args.lengths or ([2048, 4096] if args.quick else LENGTHS)
    for length in lengths:
        for processes in args.parallel or PROCESSES:
            say(f"{length:,} tokens, {processes} process(es)")
            yield measured(processes, length, size=SIZE, steps=max(LEAST, min(16, 2**17 // length)))
