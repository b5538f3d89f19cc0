"""Transports of weight updates: shared memory, Ray's object store, checkpoints on disk. `TRANSPORTS` lists them.

A transport has two ends: a sender, with memory that the trainer gathers into, and a receiver, with buckets that the
engine loads. A sender lives as long as its trainer and has separate memory for each weight buffer. The memory is
allocated once and reused, because writing to new pages costs several times as much as the copy itself.
`roll.weights.buffers` decides which buffer is free.

`shared_memory`: anonymous memory of one host (`memfd_create`), read in place. The kernel frees it when the last process
that has it open ends for any reason. A buffer is one file that only grows. Its first page has the version of the data,
so that an outdated handle raises an error. `object_store` works everywhere, but needs two more copies; each further
host gets one copy from the first. `checkpoint`: one folder of safetensors files per version, for hosts that share only
a file system. A folder appears complete, by one rename, and is deleted when its version is released. An engine that has
a file open can still read it after that.

Each trainer process writes checkpoints into a folder of its own. So it never mixes with the files of an earlier process
that was killed, or that is still ending on another host. The next process of the run deletes those files first:
everything in the run's own folder, and with `weight_update.checkpoint_dir` the folder named in a note in the run's
folder.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray
from safetensors.torch import save_file

from roll.tracking.files import write_atomically
from roll.tracking.run_directory import RunDirectory
from roll.weights.buckets import (
    SAFETENSORS_CODES,
    BucketLocation,
    WeightBucket,
    WeightContent,
    WeightMismatch,
    dtype_name,
    fresh_memory,
    map_file,
    views,
)
from roll.weights.mapped import MappedMemory, lock_grown

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransportSpec:
    """Settings with which a trainer builds its sender."""

    name: str
    buffers: int
    directory: Path
    """Folder for the transport's files, if it writes any."""
    bucket_bytes: int = 256 * 1024**2
    """Size of the transfer buffer for a push, in bytes."""
    timeout_seconds: float = 600.0
    """Longest wait for one call to an engine during a push."""
    content: WeightContent = "full"
    full_every: int = 0
    """Number of deltas and whole publications of which one is whole; 0: only the first one."""
    corrupted_versions: frozenset[int] = frozenset()
    """Versions in which one byte is corrupted on purpose (`chaos`)."""


class WeightSender:
    """The trainer's end of a transport. Buckets are in ordinary memory of its process unless a subclass has its own."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int], np.ndarray] = {}

    def begin(self, buffer: int) -> None:
        """Invalidate the version in this buffer, before it is overwritten."""

    def allocate(self, buffer: int, index: int, size: int) -> np.ndarray:
        """Return memory for bucket ``index``: uint8, at least ``size`` bytes; the same memory at each update."""
        memory = self._memory.get((buffer, index))
        if memory is None or len(memory) < size:
            memory = self._memory[buffer, index] = fresh_memory(index, size)
        return memory

    def send(self, buffer: int, version: int, buckets: Sequence[WeightBucket]) -> list[Any]:
        """Make the buckets in a buffer available to receivers, and return one handle per bucket, in order."""
        raise NotImplementedError

    def release(self, version: int) -> None:
        """Release a version that no receiver needs any more."""


class WeightReceiver(Protocol):
    """The engine's end of a transport. It lives as long as the engine's process."""

    def receive(self, handles: Sequence[Any], version: int) -> Iterator[WeightBucket]:
        """Yield the buckets of a version. Raises `WeightMismatch` if the handles lead to another version."""


@dataclass(frozen=True)
class WeightTransport:
    """The two ends of one transport."""

    sender: Callable[[TransportSpec], WeightSender]
    receiver: Callable[[], WeightReceiver]
    one_copy_per_host: bool = False
    """True if all engines on a host map the same memory, so that one of them can verify it for all."""


_NAMES = {code: dtype_name(dtype) for dtype, code in SAFETENSORS_CODES.items()}
"""Dtype code in safetensors files -> dtype name."""


class CheckpointSender(WeightSender):
    """A sender that writes each version into a folder of its own. Its handles are the paths of the files."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def send(self, buffer: int, version: int, buckets: Sequence[WeightBucket]) -> list[str]:
        """Write the version's files. The folder gets its final name when it is complete."""
        folder = self._folder(version)
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        names = [f"bucket-{index:05d}.safetensors" for index in range(len(buckets))]
        for name, bucket in zip(names, buckets, strict=True):
            save_file(dict(views(bucket)), unfinished / name, metadata={"version": str(version)})
        if folder.exists():  # left by an earlier process that published this version and was killed
            shutil.rmtree(folder)
        unfinished.rename(folder)
        return [str(folder / name) for name in names]

    def release(self, version: int) -> None:
        """Delete the version's folder; log a warning if that fails."""
        folder = self._folder(version)
        try:
            shutil.rmtree(folder)
        except OSError as error:
            logger.warning("cannot delete the weights of version %d in %s: %s", version, folder, error)

    def _folder(self, version: int) -> Path:
        return self._directory.absolute() / f"version-{version:06d}"


class CheckpointReceiver(WeightReceiver):
    """A receiver that maps the safetensors files of a version read-only."""

    def receive(self, handles: Sequence[str], version: int) -> Iterator[WeightBucket]:
        for path in handles:
            try:
                memory = map_file(path, 0, os.path.getsize(path))
                start = 8 + int(memory[:8].view("<u8")[0])
                header = json.loads(memory[8:start].tobytes())
                found = header.pop("__metadata__")["version"]
                entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
                tensors = [
                    (name, _NAMES[entry["dtype"]], tuple(entry["shape"]), int(entry["data_offsets"][0]))
                    for name, entry in entries
                ]
            except (OSError, ValueError, KeyError, IndexError) as error:
                raise WeightMismatch(f"cannot read {path}, weights of version {version}: {error!r}") from error
            if found != str(version):
                raise WeightMismatch(f"{path} holds version {found}, expected {version}: the weights are stale")
            yield WeightBucket(tensors, memory[start:], BucketLocation(path, start))


_WRITTEN = ("version-*", ".version-*.unfinished")
"""Patterns of the folders that `CheckpointSender` writes. Nothing else is deleted, because a user may have other files
beside them."""


def claim_weight_folder(run: RunDirectory, shared: str | None, label: str) -> Path:
    """Return the path of a new folder for this process alone, and delete what earlier processes of the run left.

    The folder is not created yet. It is under ``shared`` (`weight_update.checkpoint_dir`) if given, else in the run's
    folder. The caller must hold the lock of the run.
    """
    clear_weight_folder(run)
    own = uuid.uuid4().hex[:8]
    if shared is None:
        return run.weights.absolute() / own
    folder = Path(shared).absolute() / f"{label.replace('/', '-')}-{run.root.absolute().name}-{own}"
    write_atomically(run.weights_note, json.dumps({"run": str(run.root.absolute()), "folder": str(folder)}))
    return folder


def clear_weight_folder(run: RunDirectory) -> None:
    """Delete all weights that the run has written for its engines."""
    shutil.rmtree(run.weights, ignore_errors=True)
    folder = _noted_folder(run)
    if folder is not None:
        for pattern in _WRITTEN:
            for path in folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("published weights stay in %s: %s", folder, error)
    try:
        run.weights_note.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be removed, though its folder is gone: %s", run.weights_note, error)


def _noted_folder(run: RunDirectory) -> Path | None:
    """Return the folder named in the run's note; None without a readable note, or if it is the note of another run."""
    try:
        note = json.loads(run.weights_note.read_text())
        return Path(note["folder"]) if note["run"] == str(run.root.absolute()) else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as damage:
        logger.warning("%s is damaged, so weights of an earlier process may stay behind: %r", run.weights_note, damage)
        return None


@dataclass(frozen=True)
class StoredBucket:
    """A bucket in the object store."""

    version: int
    reference: Any


class ObjectStoreSender(WeightSender):
    """A sender that puts each bucket into the object store of the trainer's host."""

    def send(self, buffer: int, version: int, buckets: Sequence[WeightBucket]) -> list[StoredBucket]:
        return [StoredBucket(version, ray.put(bucket)) for bucket in buckets]


class ObjectStoreReceiver(WeightReceiver):
    """A receiver that reads buckets from the object store of its own host."""

    def receive(self, handles: Sequence[StoredBucket], version: int) -> Iterator[WeightBucket]:
        for handle in handles:
            if handle.version != version:
                raise WeightMismatch(f"the object store holds version {handle.version}, expected {version}")
            yield ray.get(handle.reference)


_MAGIC = 0x726F6C6C77656967
_NOTHING = -1
"""Version stamp of memory that is being written."""
_REMEDY = "engines and trainer must run on one host as one user; set `weight_update.transport: object_store`"


@dataclass(frozen=True)
class MemoryHandle:
    """A bucket in the memory of another process."""

    path: str
    """Path at which other processes of this host open the memory."""
    inode: int
    """Inode of the memory file; needed because process ids and file descriptors are reused."""
    version: int
    offset: int
    length: int
    reused: bool
    """True if these bytes are written again in later updates, and worth page-locking."""
    tensors: list[tuple[str, str, tuple[int, ...], int]]
    lasting: bool


class Segment:
    """One weight buffer in the trainer's process: a file in memory with the version stamp, then the buckets.

    It grows by doubling, because each mapping takes a file descriptor; pages that are never written take no memory.
    """

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(name)
        self._region = np.empty(0, dtype=np.uint8)
        self.size = self._used = 0
        self._extents: list[tuple[int, np.ndarray]] = []
        self._locked: dict[int, np.ndarray] = {}
        """Bucket -> the part of its memory that is page-locked."""
        self._stamp = self._reserve(16)[1].view(np.int64)
        self._stamp[:] = (_MAGIC, _NOTHING)

    def extent(self, index: int, size: int) -> np.ndarray:
        """Return the memory of bucket ``index``, at least ``size`` bytes.

        Raises ``RuntimeError`` if this bucket was smaller in an earlier update, or if an earlier bucket is missing.
        """
        if index == len(self._extents):
            self._extents.append(self._reserve(size))
        if index not in range(len(self._extents)) or len(self._extents[index][1]) < size:
            raise RuntimeError(f"bucket {index} of {size} bytes does not fit the memory of earlier weight updates")
        return self._extents[index][1]

    def offset(self, index: int) -> int:
        """Return the offset of bucket ``index`` in the file."""
        return self._extents[index][0]

    def lock(self, index: int, size: int) -> None:
        """Page-lock the first ``size`` bytes of bucket ``index`` for later updates.

        Its other bytes stay as they are: most buckets are not full, and locked pages take memory though nothing was
        written there.
        """
        lock_grown(self._locked, index, self._extents[index][1][:size])

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


class SharedMemorySender(WeightSender):
    """A sender that gathers directly into shared memory, so `send` copies nothing."""

    def __init__(self, lasting: bool) -> None:
        super().__init__()
        self._lasting = lasting
        self._segments: dict[int, Segment] = {}

    def begin(self, buffer: int) -> None:
        if buffer not in self._segments:
            self._segments[buffer] = Segment(f"roll-weights-{buffer}")
        self._segments[buffer].stamp(_NOTHING)

    def allocate(self, buffer: int, index: int, size: int) -> np.ndarray:
        return self._segments[buffer].extent(index, size)

    def send(self, buffer: int, version: int, buckets: Sequence[WeightBucket]) -> list[MemoryHandle]:
        """Write the version stamp, and return the handles of the buckets."""
        segment, reused = self._segments[buffer], buffer >= 0  # a delta (negative) is of another size in each update
        for index, bucket in enumerate(buckets if reused else ()):
            segment.lock(index, len(bucket.data))
        segment.stamp(version)
        inode = os.fstat(segment.fd).st_ino
        return [
            MemoryHandle(
                path=f"/proc/{os.getpid()}/fd/{segment.fd}",
                inode=inode,
                version=version,
                offset=segment.offset(index),
                length=len(bucket.data),
                reused=reused,
                tensors=bucket.tensors,
                lasting=self._lasting,
            )
            for index, bucket in enumerate(buckets)
        ]


class SharedMemoryReceiver(WeightReceiver):
    """A receiver that maps each buffer once and keeps the mapping for later versions."""

    def __init__(self) -> None:
        self._memory = MappedMemory()

    def receive(self, handles: Sequence[MemoryHandle], version: int) -> Iterator[WeightBucket]:
        for handle in handles:
            region = (handle.offset, handle.length) if handle.reused else None
            location = BucketLocation(handle.path, handle.offset, region)
            try:
                stamp = self._memory.read(BucketLocation(handle.path, 0), 16, handle.inode)
                data = self._memory.read(location, handle.length, handle.inode)
            except OSError as error:
                message = f"cannot open the shared weights of version {handle.version}: {error}; {_REMEDY}"
                raise WeightMismatch(message) from error
            magic, found = stamp.view(np.int64).tolist()
            if magic != _MAGIC or found != version or handle.version != version:
                holds = "no finished version" if found == _NOTHING else f"version {found}"
                raise WeightMismatch(
                    f"the shared memory {handle.path} holds {holds}, expected {version}: the weights are stale"
                )
            yield WeightBucket(handle.tensors, data, location, handle.lasting)


TRANSPORTS: dict[str, WeightTransport] = {
    "shared_memory": WeightTransport(
        lambda spec: SharedMemorySender(lasting=spec.buffers > 1), SharedMemoryReceiver, one_copy_per_host=True
    ),
    "object_store": WeightTransport(lambda spec: ObjectStoreSender(), ObjectStoreReceiver),
    "checkpoint": WeightTransport(
        lambda spec: CheckpointSender(spec.directory), CheckpointReceiver, one_copy_per_host=True
    ),
}
"""Name in `weight_update.transport` -> transport."""
