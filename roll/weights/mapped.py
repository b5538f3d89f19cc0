"""Memory of another process of this host, mapped once and kept for later weight updates; and page-locked memory.

A GPU copies to and from page-locked ("pinned") memory by itself. Other memory it reaches through a small page-locked
buffer, which one core fills or empties; that is several times slower.
"""

from __future__ import annotations

import logging
import os

import numpy as np
import torch

from roll.weights.buckets import BucketLocation, map_file

logger = logging.getLogger(__name__)


class MappedMemory:
    """The weight buffers of a trainer on this host, read-only, and page-locked if this process uses CUDA."""

    def __init__(self) -> None:
        self._files: dict[int, np.ndarray] = {}
        """Inode -> the whole file."""
        self._locked: dict[int, dict[int, np.ndarray]] = {}
        """Inode -> offset of each page-locked part -> that part."""
        self._owner = ""

    def read(self, location: BucketLocation, size: int, inode: int | None = None) -> np.ndarray:
        """Return ``size`` bytes of a file, as uint8. Its region, if it has one, is page-locked.

        Raises ``OSError`` if the file does not exist, is too short, or does not have this ``inode``.
        """
        owner = os.path.dirname(location.path)
        if owner != self._owner:  # the earlier files belong to a trainer that has ended
            for each in list(self._files):
                self._forget(each)
            self._owner = owner
        status = os.stat(location.path)
        memory, length = self._files.get(status.st_ino), max(status.st_size, location.offset + size)
        if memory is None or len(memory) < length or inode not in (None, status.st_ino):
            whole = map_file(location.path, 0, length, inode, lockable=torch.cuda.is_initialized())
            self._forget(status.st_ino)
            memory = self._files[status.st_ino] = whole
        locked = self._locked.setdefault(status.st_ino, {})
        if location.region is not None:
            start, length = location.region
            lock_grown(locked, start, memory[start : start + length])
        return memory[location.offset : location.offset + size]

    def _forget(self, inode: int) -> None:
        self._files.pop(inode, None)
        for part in self._locked.pop(inode, {}).values():
            unlock_pages(part)


def lock_grown(locked: dict[int, np.ndarray], key: int, memory: np.ndarray) -> None:
    """Page-lock memory that is noted in ``locked`` under ``key``, unless at least as much of it is locked already."""
    earlier = locked.get(key)
    if earlier is None or len(earlier) < len(memory):
        if earlier is not None:
            unlock_pages(earlier)
        locked[key] = lock_pages(memory)


def lock_pages(memory: np.ndarray) -> np.ndarray:
    """Lock memory (uint8) into RAM for CUDA, if this process uses CUDA, and return it.

    If CUDA refuses, log a warning: copies are slower then, but right.
    """
    if torch.cuda.is_initialized() and len(memory):
        failure = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, len(memory), 0)
        if int(failure):
            _take_last_error()
            logger.warning(
                "%.0f MiB of weights cannot be page-locked (CUDA error %s), so copies of them are slower",
                len(memory) / 1024**2,
                failure,
            )
    return memory


def unlock_pages(memory: np.ndarray) -> None:
    """Undo `lock_pages`, before the memory is unmapped."""
    if torch.cuda.is_initialized() and len(memory) and int(torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)):
        _take_last_error()


def _take_last_error() -> None:
    """Launch a kernel, because the next one would report CUDA's last error as its own."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        logger.debug("CUDA's last error was that of page-locking: %s", error)
