"""Shared memory of one host: the trainer gathers into it, and engines read it in place.

The memory is anonymous (`memfd_create`) and reached through `/proc/<pid>/fd/<fd>`. It has no name that could be left
behind, the kernel frees it when the last process that has it open ends, however it ends, and the size of `/dev/shm`
does not bound it. A buffer is one file that only grows. Its first page holds the version of the data behind it, so an
outdated handle is detected instead of read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from roll.strategies.infer.base import BucketLocation, WeightBucket, WeightMismatch

_MAGIC = 0x726F6C6C77656967
_NOTHING = -1
"""The version stamp of memory that is being written."""
_REMEDY = "engines and trainer must run on one host as one user; set `weight_update.transport: object_store`"


@dataclass(frozen=True)
class MemoryHandle:
    """A bucket in the memory of another process."""

    pid: int
    fd: int
    inode: int
    """Inode of the memory file; needed because process ids and file descriptors are reused."""
    size: int
    """Size of the whole buffer in bytes."""
    version: int
    offset: int
    length: int
    tensors: list[tuple[str, str, tuple[int, ...], int]]
    lasting: bool

    @property
    def path(self) -> str:
        """Path at which other processes of this host open the memory."""
        return f"/proc/{self.pid}/fd/{self.fd}"


class Segment:
    """One buffer in the trainer's process: a file in memory that holds the version stamp and then the buckets.

    It grows by doubling, because each mapping costs a file number; pages that are never written take no memory.
    """

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(name)
        self._region = np.empty(0, dtype=np.uint8)
        self.size = self._used = 0
        self._extents: list[tuple[int, np.ndarray]] = []
        self._stamp = self._reserve(16)[1].view(np.int64)
        self._stamp[:] = (_MAGIC, _NOTHING)

    def extent(self, index: int, size: int) -> np.ndarray:
        """Return the memory of bucket ``index``, at least ``size`` bytes.

        Raises ``RuntimeError`` if the bucket was smaller before (the model has changed its layout) or comes out of
        order.
        """
        if index == len(self._extents):
            self._extents.append(self._reserve(size))
        if index not in range(len(self._extents)) or len(self._extents[index][1]) < size:
            raise RuntimeError(f"bucket {index} of {size} bytes does not fit the memory of earlier publications")
        return self._extents[index][1]

    def offset(self, index: int) -> int:
        """Return the offset of bucket ``index`` in the file."""
        return self._extents[index][0]

    def stamp(self, version: int) -> None:
        """Write the version stamp."""
        self._stamp[1] = version

    def _reserve(self, size: int) -> tuple[int, np.ndarray]:
        """Return the file offset of new page-aligned memory, and the memory."""
        pages = max(size + -size % mmap.PAGESIZE, mmap.PAGESIZE)
        if self._used + pages > len(self._region):
            length = max(pages, self.size)
            os.ftruncate(self.fd, self.size + length)
            self._region = np.frombuffer(mmap.mmap(self.fd, length, offset=self.size), dtype=np.uint8)
            self.size += length
            self._used = 0
        start = self._used
        self._used += pages
        return self.size - len(self._region) + start, self._region[start : start + size]


class SharedMemorySender:
    """A sender that gathers directly into shared memory; sending means telling engines where it is."""

    def __init__(self, lasting: bool) -> None:
        self._lasting = lasting
        self._segments: dict[int, Segment] = {}

    def begin(self, half: int) -> None:
        """See `WeightSender.begin`."""
        if half not in self._segments:
            self._segments[half] = Segment(f"roll-weights-{half}")
        self._segments[half].stamp(_NOTHING)

    def allocate(self, half: int, index: int, size: int) -> np.ndarray:
        """See `WeightSender.allocate`."""
        return self._segments[half].extent(index, size)

    def send(self, half: int, version: int, buckets: Sequence[WeightBucket]) -> list[MemoryHandle]:
        """See `WeightSender.send`; writes the version stamp."""
        segment = self._segments[half]
        segment.stamp(version)
        inode = os.fstat(segment.fd).st_ino
        return [
            MemoryHandle(
                pid=os.getpid(),
                fd=segment.fd,
                inode=inode,
                size=segment.size,
                version=version,
                offset=segment.offset(index),
                length=len(bucket.data),
                tensors=bucket.tensors,
                lasting=self._lasting,
            )
            for index, bucket in enumerate(buckets)
        ]

    def release(self, version: int) -> None:
        """Do nothing: the next version reuses the memory."""


class SharedMemoryReceiver:
    """A receiver that maps a buffer once and keeps the mapping for later versions."""

    def __init__(self) -> None:
        self._mappings: dict[int, np.ndarray] = {}

    def receive(self, handles: Sequence[MemoryHandle], version: int) -> Iterator[WeightBucket]:
        """See `WeightReceiver.receive`."""
        for handle in handles:
            memory = self._memory(handle)
            magic, found = memory[:16].view(np.int64).tolist()
            if magic != _MAGIC or found != version or handle.version != version:
                holds = "no finished version" if found == _NOTHING else f"version {found}"
                raise WeightMismatch(
                    f"the shared memory {handle.path} holds {holds}, expected {version}: the publication is stale"
                )
            data = memory[handle.offset : handle.offset + handle.length]
            yield WeightBucket(handle.tensors, data, BucketLocation(handle.path, handle.offset), handle.lasting)

    def _memory(self, handle: MemoryHandle) -> np.ndarray:
        known = self._mappings.get(handle.inode)
        if known is None or len(known) < handle.size:
            known = self._mappings[handle.inode] = _map(handle)
        return known


def _map(handle: MemoryHandle) -> np.ndarray:
    """Map the whole buffer read-only. Raises `WeightMismatch` if it cannot be opened or is other memory by now."""
    try:
        fd = os.open(handle.path, os.O_RDONLY)
    except OSError as error:
        message = f"cannot open the shared weights of version {handle.version}: {error}; {_REMEDY}"
        raise WeightMismatch(message) from error
    try:
        status = os.fstat(fd)
        if status.st_ino != handle.inode or status.st_size < handle.size:
            raise WeightMismatch(
                f"{handle.path} is not the memory of version {handle.version} any more (inode {status.st_ino} with "
                f"{status.st_size} bytes, expected {handle.inode} with {handle.size}); {_REMEDY}"
            )
        return np.frombuffer(mmap.mmap(fd, handle.size, prot=mmap.PROT_READ), dtype=np.uint8)
    finally:
        os.close(fd)
