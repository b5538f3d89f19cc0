"""Background writes of a worker, and their progress.

The time a checkpoint takes to reach the disk depends on its size and on a file system that others use too, so no fixed
deadline fits. A waiting caller checks for movement instead: bytes in the file, allocated disk blocks, and bytes known
to be on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from roll.configs.memory.records import GIB

Synced = Callable[[int], None]
"""Callback that receives how many more bytes have reached the disk."""


@dataclass(frozen=True)
class WritingProgress:
    """Progress of a write that is not complete. Two looks are equal if nothing moved between them."""

    path: str
    """A file, or a folder whose files are summed."""
    size: int
    """Size in bytes."""
    allocated: int
    """Bytes of the allocated disk blocks."""
    synced: int
    """Bytes known to be on the disk."""

    def __str__(self) -> str:
        return f"{self.path} has {self.size / GIB:.3f} GiB, {self.synced / GIB:.3f} of them on the disk"


class Writing:
    """A write in progress, in its own thread."""

    def __init__(self, folder: str, path: Path, work: Callable[[Synced], object]) -> None:
        """Start ``work``, which writes to ``path`` and reports synced bytes. ``folder`` is the one the caller named."""
        self.folder = folder
        self._path = path
        self._synced = 0
        self.task = asyncio.create_task(asyncio.to_thread(work, self._count))

    def progress(self) -> WritingProgress:
        """Return the current progress."""
        size = allocated = 0
        for file in self._path.iterdir() if self._path.is_dir() else (self._path,):
            with suppress(FileNotFoundError, NotADirectoryError):  # not created yet, or renamed in the meantime
                facts = file.stat()
                if S_ISREG(facts.st_mode):
                    size, allocated = size + facts.st_size, allocated + 512 * facts.st_blocks
        return WritingProgress(str(self._path), size, allocated, self._synced)

    def _count(self, synced: int) -> None:
        self._synced += synced
