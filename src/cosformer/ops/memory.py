"""Memory for large results: once a result is gone, its memory serves the next one.

malloc returns such memory to the system at once, and the system has to clear and map every page of the next
tensor: a tenth to a quarter of the time of a long call. torch has no allocator of its own on the CPU.
"""

import ctypes
from collections.abc import Callable
from weakref import finalize

import torch
from torch import Tensor

LARGE = 1 << 22  # bytes: malloc itself reuses the pages of smaller tensors
MOST = 1 << 27  # bytes kept for later: a peak of memory may be higher by this much

_kept: dict[int, Tensor] = {}  # unused memory by its address, the latest last


def leased(like: Tensor, prepare: Callable[[Tensor], object]) -> Tensor:
    """A tensor to be filled: `like` itself or, if it is large, one of its kind in memory that will be reused.

    `prepare` is called with new memory, before its first use. The storage cannot be resized.
    """
    size = like.nbytes
    if size < LARGE:
        return like
    memory = _taken(size)
    if memory is None:
        memory = like.new_empty(size, dtype=torch.uint8)
        prepare(memory)
    # The storage holds the lease, and the lease's end returns the memory.
    lease = (ctypes.c_char * size).from_address(memory.data_ptr())
    finalize(lease, _return, memory).atexit = False
    storage = torch.frombuffer(lease, dtype=like.dtype).untyped_storage()
    empty = like.new_empty(0)
    return empty.set_(storage, 0, like.shape, like.stride())  # no view: those refuse changes in place


# A result may be freed by another thread or the garbage collector between any two lines here.


def _taken(size: int) -> Tensor | None:
    """Kept memory of this size, or up to an eighth more; None if there is none."""
    for at in reversed(list(_kept)):
        memory = _kept.get(at)
        fits = memory is not None and size <= memory.nbytes <= size + size // 8
        if fits and _kept.pop(at, None) is not None:
            return memory
    return None


def _return(memory: Tensor) -> None:
    if memory.nbytes > MOST:
        return
    _kept[memory.data_ptr()] = memory
    for at in list(_kept):  # the oldest goes: no result may ever have its size again
        if held() <= MOST:
            break
        _kept.pop(at, None)


def held() -> int:
    """The bytes that are kept for later."""
    return sum(memory.nbytes for memory in list(_kept.values()))


def clear() -> None:
    """Return what is kept to the system."""
    _kept.clear()
