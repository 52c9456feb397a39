"""Which process of a run died or hangs: each shows that it lives, and an error names those that do not."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BEAT = 1.0  # seconds
LOST = 5.0  # without a beat


class Lost(RuntimeError):
    """Processes of the run that do not answer."""


@contextmanager
def watched() -> Iterator[None]:
    """Where processes exchange something within it and one does not answer: `Lost`, with its rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    main: Any = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore("cosformer-alive", main.clone())  # another connection: the main one may wait
    store.set_timeout(timedelta(seconds=LOST))
    done = threading.Event()
    thread = threading.Thread(target=beat, args=(store, dist.get_rank(), done), daemon=True)
    thread.start()
    try:
        yield
    except (RuntimeError, torch.distributed.DistError) as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(sign in text for sign in SIGNS):
            raise
        raise Lost(f"{blame(store)} ({text.splitlines()[0][:200]})") from error
    finally:
        done.set()
        thread.join()


SIGNS = ("gloo", "NCCL", "Connection", "ProcessGroup", "Timed out", "TCPStore")


def beat(store: dist.Store, rank: int, done: threading.Event) -> None:
    count = 0
    while not done.wait(BEAT):
        count += 1
        try:
            store.set(str(rank), str(count))
        except RuntimeError:  # the process that keeps the store is gone
            return


def blame(store: dist.Store) -> str:
    """Who shows no life for a while; a process that waits for one that died still beats."""
    ranks = [str(rank) for rank in range(dist.get_world_size())]
    try:
        before = [store.get(rank) if store.check([rank]) else None for rank in ranks]
        time.sleep(LOST)
        after = [store.get(rank) if store.check([rank]) else None for rank in ranks]
    except RuntimeError:
        return "the process that keeps the run's store is gone: rank 0, or torchrun itself"
    lost = [rank for rank, a, b in zip(ranks, before, after, strict=True) if a == b]
    if not lost:
        return "a process did not answer in time, though all of them run"
    return f"rank {', '.join(lost)} of {len(ranks)} does not answer: it died or hangs"
