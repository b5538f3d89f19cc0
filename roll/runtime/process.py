"""Process-wide settings: folders, objects passed from Python, memory allocator, garbage collection, injected faults.

All processes of a run use the working folder and the import path of the driver. So they find the same modules, and
relative paths mean the same, even if Ray was started in another folder.

glibc's allocator can keep freed memory for the next tensor, or return it to the system. New memory from the system is
slow: each page takes some microseconds. A training step allocates and frees its activations again and again, so
returning them made the steps of small models two to three times slower (benchmarks/README.md). Keeping them costs
memory: tensors of many sizes leave fragments too small for other tensors, and two FSDP2 ranks with a model of 99
million parameters grew by half. The wider a model, the less new pages cost relative to the arithmetic on them; the
larger a model, the more memory is lost in fragments. So processes with small models keep freed memory, and those with
large models return it. See mallopt(3). Other C libraries are left unchanged.

A full garbage collection of Python visits every object. This takes a second if tens of thousands of requests are in
flight, so full collections are rare here; nearly all objects are freed without one, because they are in no cycle. Young
objects are collected more often than usual. Python counts new objects minus freed ones, old ones included: where about
as many begin as end, hundreds of thousands pass before there are 700 more, and visiting them takes 0.1 to 0.3 seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from roll.configs.given import given_pickles, receive
from roll.configs.plugins import working_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DriverFolders:
    """Working folder, import path and passed objects of the driver process, for its workers."""

    work: str | None = None
    """Working folder; None if it was deleted, or if the worker stays in its own."""
    imports: tuple[str, ...] = ()
    """Import path."""
    given: Mapping[str, bytes] = field(default_factory=dict)
    """Pickled objects passed from Python; see `roll.configs.given`."""

    def enter(self) -> None:
        """Apply all of them to this process. Its own other import folders come last."""
        # A new list, so that an import in another thread can finish its loop over the old one.
        sys.path = [*self.imports, *(entry for entry in sys.path if entry not in self.imports)]
        if self.work is not None:
            with suppress(OSError):  # the folder does not exist on another host
                os.chdir(self.work)
        receive(self.given)


def driver_folders() -> DriverFolders:
    """Return the `DriverFolders` of this process. The working folder is appended to the import path if missing."""
    work = working_folder()
    if work is None:
        logger.warning("the working folder has been deleted: relative paths have no meaning, here and in workers")
        return DriverFolders(None, tuple(dict.fromkeys(filter(None, sys.path))), given_pickles())
    entries = (
        os.path.abspath(entry) if os.path.exists(os.path.join(work, entry)) else entry  # or the key of a path hook
        for entry in (*sys.path, work)
    )
    return DriverFolders(work, tuple(dict.fromkeys(entries)), given_pickles())


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""`mallopt` parameters, as defined in malloc.h."""
SMALL_MODEL = 32_000_000
"""Parameter count below which a model is small."""
RETURNED_FROM = 4 * 2**20
"""Smallest block, in bytes, that a process with a large model returns as soon as it is freed."""
KEPT_AT_END = 32 * 2**20
"""Number of free bytes at the end of the heap that a process with a large model keeps."""
EVERYTHING = 2**31 - 1
"""Number of free bytes at the end of the heap that a process with a small model keeps."""
HEAP_BYTES = 64 * 2**20
"""Size of the heaps that glibc creates for threads other than the first. As padding (``M_TOP_PAD``) it makes glibc keep
such a heap when it is empty."""
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables with which a user may have configured the allocator."""


def return_large_blocks() -> bool:
    """Set the allocator of this process to return freed blocks of `RETURNED_FROM` bytes or more to the system at once.

    Returns True if the setting took effect. It has no effect with another C library or allocator, or if environment
    variables already configure glibc's.
    """
    return _set({M_MMAP_THRESHOLD: RETURNED_FROM, M_TRIM_THRESHOLD: KEPT_AT_END})


def keep_blocks_of(parameters: int) -> bool:
    """Set the allocator to keep freed blocks if a model with this many parameters is small. For CPU processes.

    Memory that was freed while the model was loaded is returned first. Returns True if blocks are kept from now on; see
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


SHORTEST_WAIT_SECONDS = 600.0
LONGEST_WAIT_SECONDS = 3600.0
LARGEST_SHARE = 0.001
"""Largest share of time spent on full collections, as long as the wait between two is below the longest one."""
YOUNG = 100
"""Surplus of new objects at which young objects are collected. It costs no more in all than Python's 700."""
NEVER = 2**30


async def collect_rarely(clock: Callable[[], float] = time.perf_counter) -> None:
    """Run full garbage collections until cancelled; the longer they take, the rarer they are. Meanwhile those of young
    objects are short and frequent.

    Objects that exist now, mostly from imports, are never visited again: they live until the process ends, and visiting
    them takes most of a second. ``clock`` returns seconds, to measure a collection.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, before[1], NEVER)
    try:
        wait = SHORTEST_WAIT_SECONDS
        while True:
            await asyncio.sleep(wait)
            began = clock()
            gc.collect()
            wait = min(LONGEST_WAIT_SECONDS, max(SHORTEST_WAIT_SECONDS, (clock() - began) / LARGEST_SHARE))
    finally:
        gc.set_threshold(*before)


def freeze_at_exit() -> None:
    """Skip the last garbage collection of this process, which would scan all imports, for up to two seconds.

    If Triton is loaded, nothing is skipped, because it would report every remaining object.
    """
    if "triton" not in sys.modules:
        gc.freeze()


Fault = Literal["kill", "freeze", "fill_disk"]
FULL_DISK_BYTES = 2**14
"""Largest file that a process with a full disk can write. Small files, such as a run's summary, still fit."""


def inject_fault(fault: Fault, seconds: float | None) -> None:
    """Kill this process, stop it for ``seconds`` (None: for ever), or limit its file sizes as if the disk were full.

    Only used if the configuration enables `chaos`.
    """
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "freeze":
        if seconds is not None:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
