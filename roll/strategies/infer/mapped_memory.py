"""Memory shared by processes of one host: one writes it, others map it, and it is gone when the last one has ended.

The memory has no name in any file system. Other processes open it through the owner's ``/proc`` entry, so a killed
process leaves nothing behind, and the size of a container's ``/dev/shm`` does not matter. Linux only.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import threading
import weakref

import numpy as np


class MemoryFile:
    """Anonymous shared memory of this process. It is released with the object; mappings in other processes stay
    valid."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._descriptor = os.memfd_create("roll")
        os.ftruncate(self._descriptor, size)
        self._memory = mmap.mmap(self._descriptor, size)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def path(self) -> str:
        """Path at which other processes of the same user open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def data(self) -> np.ndarray:
        """uint8 ``[size]``, writable."""
        return np.frombuffer(self._memory, dtype=np.uint8)


def map_file(path: str, offset: int, size: int) -> np.ndarray:
    """Map ``size`` bytes of a file from ``offset`` on, read-only, as uint8. Raises ``OSError`` if they do not exist."""
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < offset + size:
            raise OSError(f"{path} ends before byte {offset + size}")
        memory = mmap.mmap(file.fileno(), offset - start + size, offset=start, access=mmap.ACCESS_READ)
    return np.frombuffer(memory, dtype=np.uint8)[offset - start :]


def end_with(owner_pid: int) -> None:
    """Kill this process as soon as the process ``owner_pid`` of this host has ended, for whatever reason."""
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait() -> None:
        select.select([owner], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end with owner", daemon=True).start()
