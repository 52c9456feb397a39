"""Which process of a run died or hangs: each shows that it lives, and an error names those that do not."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

BEAT = 1.0  # seconds between signs of life
LOST = 5.0  # seconds without one
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # of Ctrl-C; of clusters
COMMUNICATION_ERRORS = ("gloo", "NCCL", "Connection", "ProcessGroup", "Timed out", "TCPStore")  # their words


class Lost(RuntimeError):
    """Processes of the run do not answer; `first`: this one has the lowest rank of those that do."""

    def __init__(self, message: str, *, first: bool):
        super().__init__(message)
        self.first = first


@contextmanager
def watched() -> Iterator[None]:
    """Raises `Lost`, which names ranks, if a collective within it fails as a process does not answer."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    main: Any = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore("cosformer-alive", main.clone())  # its own connection: the main one may block
    store.set_timeout(timedelta(seconds=LOST))
    done = threading.Event()
    thread = threading.Thread(target=beat, args=(store, dist.get_rank(), done), daemon=True)
    thread.start()
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not any(word in text for word in COMMUNICATION_ERRORS):
            raise
        with signalled(signal.SIG_IGN):  # torchrun ends the others once one dies, but they must name it
            lost, message = blame(store)
        message = f"{message} ({text.splitlines()[0][:200]})"
        first = dist.get_rank() == min(set(range(dist.get_world_size())) - {*lost} | {dist.get_rank()})
        if 0 in lost and first:  # it would speak for all otherwise
            print(message, file=sys.stderr, flush=True)
        raise Lost(message, first=first) from error
    finally:
        done.set()
        thread.join()


def beat(store: dist.Store, rank: int, done: threading.Event) -> None:
    count = 0
    while not done.wait(BEAT):
        count += 1
        try:
            store.set(str(rank), str(count))
        except RuntimeError:  # the process that hosts the store is gone
            return


@contextmanager
def signalled(handler: Any) -> Iterator[None]:
    """Within it the signals that ask a process to stop go to this handler."""
    if threading.current_thread() is not threading.main_thread():  # only there can signal handlers be set
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def blame(store: dist.Store) -> tuple[list[int], str]:
    """Ranks without a beat for `LOST` seconds, and a message; a process that waits for a dead one beats."""
    ranks = range(dist.get_world_size())
    try:
        before = [count(store, rank) for rank in ranks]
        time.sleep(LOST)
        lost = [rank for rank in ranks if count(store, rank) == before[rank]]
    except RuntimeError:
        return [], "the process that keeps the run's store is gone: rank 0, or torchrun itself"
    if not lost:
        return [], "a process did not answer in time, though all of them run"
    return lost, f"rank {', '.join(map(str, lost))} of {len(ranks)} does not answer: it died or hangs"


def count(store: dist.Store, rank: int) -> bytes | None:
    return store.get(str(rank)) if store.check([str(rank)]) else None
