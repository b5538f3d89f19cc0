"""Settings of glibc's allocator: keep freed memory for the next tensor, or return it to the system.

The system hands out new memory page by page, and filling a page takes some microseconds. A training step frees and
takes its activations again and again, so returning them made steps of small models two to three times slower
(benchmarks/README.md). Keeping them costs memory: tensors of many sizes leave fragments that fit none of them, and two
ranks of FSDP2 with a model of 99 million parameters grew by half. The cost of new pages, relative to the arithmetic on
them, falls with the width of the model. The cost of fragments grows with its size. Small models therefore keep their
blocks and large ones return them. See mallopt(3); other C libraries are left unchanged.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""`mallopt` parameters, as defined in malloc.h."""
SMALL_MODEL = 32_000_000
"""Parameter count below which a model is small."""
RETURNED_FROM = 4 * 2**20
"""Smallest block, in bytes, that a large model returns as soon as it is freed."""
KEPT_AT_END = 32 * 2**20
"""Bytes that may stay free at the end of a large model's heap."""
EVERYTHING = 2**31 - 1
"""Bytes that may stay free at the end of a small model's heap."""
HEAP_BYTES = 64 * 2**20
"""Size of the heaps that glibc creates for threads other than the first. glibc returns such a heap as soon as it is
empty, unless the padding at the end asks for room for one more."""
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables with which a user may have configured the allocator."""


def return_large_blocks() -> bool:
    """Return freed blocks of `RETURNED_FROM` bytes or more to the system at once, from now on in the whole process.

    Returns True if the setting took effect. It does not with another C library or allocator, or if the environment
    already configures glibc's.
    """
    return _set({M_MMAP_THRESHOLD: RETURNED_FROM, M_TRIM_THRESHOLD: KEPT_AT_END})


def keep_blocks_of(parameters: int) -> bool:
    """Keep freed blocks from now on if a model of ``parameters`` parameters is small. For CPU processes.

    The memory that loading the model has freed is returned first. Returns True if blocks are kept from now on; see
    `return_large_blocks`.
    """
    if parameters >= SMALL_MODEL:
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    kept = _set({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: EVERYTHING, M_TOP_PAD: HEAP_BYTES})
    if kept and trim is not None:
        trim(0)
    return kept


def _set(values: dict[int, int]) -> bool:
    """Pass the values to glibc. Return True if it accepted all of them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SETTINGS):
        return False
    return all(mallopt(parameter, value) for parameter, value in values.items())
