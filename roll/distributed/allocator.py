"""How a worker's process gives freed memory back to the system.

glibc learns from each large block that is freed to keep the next one of that size (up to 32 MiB), and in a thread that
is not the first one it keeps them in pieces that are seldom whole again. A trainer's tensors have many sizes, so its
process grows far beyond what it holds: by half on two ranks of FSDP2 (benchmarks/README.md, memory). A fixed threshold
ends the learning; see mallopt(3).
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of `mallopt`'s parameters in malloc.h."""
RETURNED_FROM = 4 * 2**20
"""Bytes of a block from which it goes back when it is freed. Smaller ones are used again: to fetch them anew each time
made tiny models half as fast."""
KEPT = 32 * 2**20
"""Bytes that may stay at the end of a heap."""
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""What a user may have said in the environment."""


def return_large_blocks() -> bool:
    """Give freed blocks of `RETURNED_FROM` bytes and more back at once, from now on in the whole process.

    Returns whether it does: not with another C library or allocator, or where the environment says how glibc is to do.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SETTINGS):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, RETURNED_FROM)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))
