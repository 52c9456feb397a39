"""Memory for large results: once a result is gone, its memory serves the next one.

malloc returns such memory to the system at once, and the system has to clear and map every page of the next
tensor: a tenth to a quarter of the time of a long call. torch has no allocator of its own on the CPU.
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable
from weakref import finalize

import torch
from torch import Tensor

LARGE = 1 << 22  # bytes: malloc itself reuses the pages of smaller tensors
MOST = 1 << 28  # bytes kept for later

_kept: defaultdict[int, list[Tensor]] = defaultdict(list)  # unused memory, by its size


def lasting(t: Tensor, prepare: Callable[[Tensor], object]) -> Tensor:
    """A tensor like t, which is about to be filled: t itself, or if it is large one in memory that is kept.

    `prepare` is called with new memory, before its first use.
    """
    if t.nbytes < LARGE:
        return t
    size = t.nbytes
    try:
        memory = _kept[size].pop()
    except IndexError:
        memory = t.new_empty(size, dtype=torch.uint8)
        prepare(memory)
    # The storage holds the lease, and the lease's end returns the memory.
    lease = (ctypes.c_char * size).from_address(memory.data_ptr())
    finalize(lease, _return, memory).atexit = False
    storage = torch.frombuffer(lease, dtype=t.dtype).untyped_storage()
    return t.new_empty(0).set_(storage, 0, t.shape, t.stride())  # no view: those refuse changes in place


def _return(memory: Tensor) -> None:
    if held() + memory.nbytes <= MOST:
        _kept[memory.nbytes].append(memory)


def held() -> int:
    """The bytes that are kept for later."""
    return sum(size * len(some) for size, some in list(_kept.items()))


def clear() -> None:
    """Return what is kept to the system."""
    _kept.clear()
