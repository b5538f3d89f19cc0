"""Settings of a process of a run: its folders, the objects that its caller gave, its memory allocator, its garbage
collection; and the faults that tests inject into it.

All processes of a run find the same modules, and relative paths mean the same to them, even if their Ray was started
elsewhere: they use the working folder and the import path of the driver.

Settings of glibc's allocator keep freed memory for the next tensor, or return it to the system. The system hands out
new memory page by page, and filling a page takes some microseconds. A training step frees and takes its activations
again and again, so returning them made steps of small models two to three times slower (benchmarks/README.md). Keeping
them costs memory: tensors of many sizes leave fragments that fit none of them, and two ranks of FSDP2 with a model of
99 million parameters grew by half. The cost of new pages, relative to the arithmetic on them, falls with the width of
the model. The cost of fragments grows with its size. Small models therefore keep their blocks and large ones return
them. See mallopt(3); other C libraries are left unchanged.

Python visits every object when it looks for cycles among the old ones: a second if tens of thousands of requests are in
flight. So old objects are looked through rarely here. Nearly all objects are freed without it, because they are in no
cycle; the young ones are collected as always.
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
    """Working folder and import path of the driver process, and the objects given to it, for its workers."""

    work: str | None = None
    """None if the folder does not exist any more, or if a worker stays in its own."""
    imports: tuple[str, ...] = ()
    given: Mapping[str, bytes] = field(default_factory=dict)
    """See `roll.configs.given`."""

    def enter(self) -> None:
        """Give this process all of it. Folders that only this process searches come last."""
        # A new list: an import that runs in another thread goes through the old one, and misses nothing.
        sys.path = [*self.imports, *(entry for entry in sys.path if entry not in self.imports)]
        if self.work is not None:
            with suppress(OSError):  # the folder does not exist on another host
                os.chdir(self.work)
        receive(self.given)


def driver_folders() -> DriverFolders:
    """Return those of this process, with the working folder added at the end of the import path if missing."""
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


SHORTEST_WAIT_SECONDS = 600.0
LONGEST_WAIT_SECONDS = 3600.0
LARGEST_SHARE = 0.001
"""Largest share of the time that is spent on old objects, unless they would wait for longer than the longest wait."""
NEVER = 2**30


async def collect_rarely(clock: Callable[[], float] = time.perf_counter) -> None:
    """Collect old objects as rarely as they cost, until cancelled.

    Objects that are there now, mostly what imports made, are left out for good: nothing frees them before the process
    ends, and looking through them once takes most of a second. ``clock``: seconds, to measure a collection.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*before[:2], NEVER)
    try:
        wait = SHORTEST_WAIT_SECONDS
        while True:
            await asyncio.sleep(wait)
            began = clock()
            gc.collect()
            wait = min(LONGEST_WAIT_SECONDS, max(SHORTEST_WAIT_SECONDS, (clock() - began) / LARGEST_SHARE))
    finally:
        gc.set_threshold(*before)


Fault = Literal["kill", "freeze", "fill_disk"]
FULL_DISK_BYTES = 2**14
"""Largest file that a process with a full disk can write. Small files, such as a run's summary, still fit."""


def inject_fault(fault: Fault, seconds: float | None) -> None:
    """Kill this process, stop it for ``seconds`` (None: for good), or limit its files as a full disk would.

    Only reachable through the configuration's `chaos`, which must be switched on.
    """
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "freeze":
        if seconds is not None:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
