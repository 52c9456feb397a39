"""The memory of a training process: kept from step to step.

A step frees what the next one needs again. glibc returns the largest tensors, and the end of its heap, to the
system at once, which then has to clear and map every page anew.
"""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's names in malloc.h: M_...
LARGEST = 2**30  # bytes of a block that is kept


def keep_memory() -> None:
    """Have glibc keep what is freed, in this process from now on; elsewhere it changes nothing.

    For commands, whose process is their own: a library must not decide this for its user.
    """
    if sys.platform == "linux" and hasattr(c := ctypes.CDLL(None), "mallopt"):
        c.mallopt(MMAP_THRESHOLD, LARGEST)
        c.mallopt(TRIM_THRESHOLD, 2 * LARGEST - 1)
