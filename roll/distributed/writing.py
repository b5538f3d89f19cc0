"""What a worker writes beside training, and how far it has come.

How long a checkpoint takes to reach the disk depends on its size and on a file system that others use too, so there is
no deadline that fits. Instead whoever waits looks at what moves: bytes in the file, blocks that it has, and bytes that
are known to be on the disk.
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
"""Hears how many bytes have reached the disk."""


@dataclass(frozen=True)
class WritingProgress:
    """Of something that is not on the disk yet; two looks between which nothing moved are equal."""

    path: str
    """A file, or a folder whose files count."""
    size: int
    """Bytes."""
    allocated: int
    """Bytes of the disk's blocks."""
    synced: int
    """Bytes known to be on the disk."""

    def __str__(self) -> str:
        return f"{self.path} has {self.size / GIB:.3f} GiB, {self.synced / GIB:.3f} of them on the disk"


class Writing:
    """Something on its way to the disk, in a thread of its own."""

    def __init__(self, folder: str, path: Path, work: Callable[[Synced], object]) -> None:
        """``work`` writes to ``path``, and says what is on the disk. ``folder``: as it was asked for."""
        self.folder = folder
        self._path = path
        self._synced = 0
        self.task = asyncio.create_task(asyncio.to_thread(work, self._count))

    def progress(self) -> WritingProgress:
        """As of now."""
        size = allocated = 0
        for file in self._path.iterdir() if self._path.is_dir() else (self._path,):
            with suppress(FileNotFoundError, NotADirectoryError):  # not begun, or it got another name meanwhile
                facts = file.stat()
                if S_ISREG(facts.st_mode):
                    size, allocated = size + facts.st_size, allocated + 512 * facts.st_blocks
        return WritingProgress(str(self._path), size, allocated, self._synced)

    def _count(self, synced: int) -> None:
        self._synced += synced
