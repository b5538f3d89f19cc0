"""Model weights as bytes: a trainer packs a weight update into buckets, and engines read the tensors back.

Promises: a tensor is never split, the bytes arrive unchanged in any dtype, and both sides compute the same checksum of
the same tensor. Packing copies each tensor once, with its cast, directly into the given memory. Weights are sent as raw
bytes with a header, never as pickles.

`MemoryFile` is memory shared by processes of one host: one process writes it, others map it. It has no name in any file
system; other processes open it through the owner's ``/proc`` entry. So a killed process leaves nothing behind, and the
size of a container's ``/dev/shm`` does not matter. Linux only.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np
import torch
import xxhash


class MemoryFile:
    """Anonymous shared memory, released with the object; mappings in other processes stay valid."""

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


def map_file(path: str, offset: int, size: int, inode: int | None = None, lockable: bool = False) -> np.ndarray:
    """Map ``size`` bytes of a file from ``offset`` on, as uint8 that cannot be written.

    ``lockable``: map them so that CUDA can page-lock them, which needs permission to write to the file. Raises
    ``OSError`` if they do not exist, or if the file is not the one with this ``inode``.
    """
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with open(path, "r+b" if lockable else "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size < offset + size:
            raise OSError(f"{path} ends before byte {offset + size}")
        if inode not in (None, status.st_ino):
            raise OSError(f"{path} is another file by now (inode {status.st_ino}, expected {inode})")
        access = mmap.ACCESS_WRITE if lockable else mmap.ACCESS_READ
        memory = np.frombuffer(
            mmap.mmap(file.fileno(), offset - start + size, offset=start, access=access), dtype=np.uint8
        )
    memory.flags.writeable = False
    return memory[offset - start :]


def end_with(owner_pid: int) -> None:
    """Kill this process as soon as the process ``owner_pid`` on this host ends, for any reason."""
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait() -> None:
        select.select([owner], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end with owner", daemon=True).start()


ALIGNMENT = 64
"""Alignment of tensors in a bucket, in bytes. Every dtype can then be viewed in place. It is also the alignment of
torch's own memory, so kernels whose rounding depends on alignment give the same bits."""
MOST_HASHING_THREADS = 8
"""Maximum number of threads that compute checksums. They are then limited by memory."""
_CHUNK = 512 * 1024
"""Number of bytes to copy before hashing them, so that they are still in the processor's cache."""

SAFETENSORS_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes that can be sent -> their names in safetensors files."""
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_CODES}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""Name of a dtype in a bucket, such as ``float32`` -> dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a bucket. Raises ``KeyError`` for a dtype that cannot be sent."""
    return _NAMES[dtype]


Data = TypeVar("Data", np.ndarray, torch.Tensor)

Allocate = Callable[[int, int], np.ndarray]
"""Function ``(bucket index, size) -> uint8 [at least size bytes]`` that is writable and aligned to `ALIGNMENT`."""


def fresh_memory(_: int, size: int) -> np.ndarray:
    """Allocate new memory for a bucket."""
    return torch.empty(size, dtype=torch.uint8).numpy()


def pack_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    *,
    float_dtype: torch.dtype | None = None,
    uncast: Collection[str] = (),
    allocate: Allocate = fresh_memory,
) -> Iterator[WeightBucket]:
    """Pack tensors, in order, into buckets of at most ``bucket_bytes`` bytes.

    A larger tensor gets a bucket of its own. Floating-point tensors are cast to ``float_dtype`` (None: no cast), except
    for those named in ``uncast``. Each tensor is copied before the next one is requested, because a trainer may reuse
    its memory. Raises ``ValueError`` for a ``bucket_bytes`` below 1, a dtype that cannot be sent, or a duplicate name.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket needs at least one byte")
    seen: set[str] = set()
    index, filled = 0, 0
    bucket: WeightBucket | None = None
    for name, tensor in named_tensors:
        if name in seen:
            raise ValueError(f"tensor {name!r} occurs twice in one weight update")
        seen.add(name)
        casts = float_dtype is not None and tensor.is_floating_point() and name not in uncast
        dtype = float_dtype if casts else tensor.dtype
        if dtype not in _NAMES:
            raise ValueError(f"tensor {name!r} has dtype {dtype}, which cannot be sent")
        size = tensor.numel() * dtype.itemsize
        offset = filled + -filled % ALIGNMENT
        if bucket is not None and offset + size > bucket_bytes:
            yield replace(bucket, data=bucket.data[:filled])
            bucket, index, offset = None, index + 1, 0
        if bucket is None:
            bucket = WeightBucket([], allocate(index, max(bucket_bytes, size)))
        if offset:
            bucket.data[filled:offset] = 0
        source = tensor.detach()
        if source.device.type != "cpu":
            source = source.to(dtype)  # a copy to the host that casts as well passes through memory that is not locked
        _view(bucket.data[offset : offset + size], dtype, tuple(tensor.shape)).copy_(source)
        bucket.tensors.append((name, _NAMES[dtype], tuple(tensor.shape), offset))
        filled = offset + size
    if bucket is not None:
        yield replace(bucket, data=bucket.data[:filled])


def split_bucket(bucket: WeightBucket, most_bytes: int) -> Iterator[WeightBucket]:
    """Split a bucket into buckets of at most ``most_bytes``, without copying. A larger tensor gets one of its own.

    Raises ``WeightMismatch`` for the same reasons as `tensor_spans`.
    """
    spans = tensor_spans(bucket)
    first = 0
    for last in range(1, len(spans) + 1):
        start, end = spans[first][0], spans[last - 1][1]
        if last < len(spans) and spans[last][1] - start <= most_bytes:
            continue
        tensors = [(name, dtype, shape, offset - start) for name, dtype, shape, offset in bucket.tensors[first:last]]
        location = bucket.location
        if location is not None:
            location = replace(location, offset=location.offset + start)
        yield replace(bucket, tensors=tensors, data=bucket.data[start:end], location=location)
        first = last


def tensor_spans(bucket: WeightBucket) -> list[tuple[int, int]]:
    """Return the byte range ``(start, end)`` of each tensor in the bucket's data; ``end`` is exclusive.

    Raises ``WeightMismatch`` naming the tensor if its dtype is unknown or its bytes lie outside the bucket.
    """
    spans = []
    for name, dtype_name, shape, offset in bucket.tensors:
        if dtype_name not in DTYPES:
            raise WeightMismatch(f"tensor {name!r}: unknown dtype {dtype_name!r}; known: {', '.join(DTYPES)}")
        end = offset + math.prod(shape) * DTYPES[dtype_name].itemsize
        if offset < 0 or end > len(bucket.data):
            raise WeightMismatch(
                f"tensor {name!r}: bytes {offset} to {end} lie outside its bucket of {len(bucket.data)} bytes"
            )
        spans.append((offset, end))
    return spans


def views(bucket: WeightBucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a bucket in place, without copying. The caller must not write to them.

    A tensor that does not start at a multiple of its element size cannot be viewed and is copied. Raises
    ``WeightMismatch`` for the same reasons as `tensor_spans`.
    """
    for (name, dtype_name, shape, _), (start, end) in zip(bucket.tensors, tensor_spans(bucket), strict=True):
        yield name, _view(bucket.data[start:end], DTYPES[dtype_name], shape)


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's elements in row-major order as uint8 ``[bytes]`` on the host (a view if possible)."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def checksum(data: np.ndarray) -> int:
    """Return the ``xxh3_64`` hash of contiguous bytes. Hashing is about twice as fast as copying."""
    digest = xxhash.xxh3_64()
    digest.update(data.data)  # lets other threads run, unlike the function that does both
    return digest.intdigest()


def checksums(tensors: Mapping[str, Data], of_tensor: Callable[[Data], int]) -> dict[str, int]:
    """Return the checksum of each tensor, by ``of_tensor``. As many threads as torch computes with, up to 8, share the
    work."""
    threads = min(MOST_HASHING_THREADS, torch.get_num_threads())
    if threads == 1:
        return {name: of_tensor(data) for name, data in tensors.items()}
    with ThreadPoolExecutor(threads, "checksums") as pool:
        return dict(zip(tensors, pool.map(of_tensor, tensors.values()), strict=True))


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Return the checksum of the tensor's bytes, equal on every machine for equal dtype, shape and values."""
    return checksum(tensor_bytes(tensor))


def copy_with_checksum(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Copy a contiguous host tensor. Return the copy and the checksum of its bytes, in one pass over the memory."""
    copy = torch.empty_like(tensor)
    source, target = tensor_bytes(tensor), tensor_bytes(copy)
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        target[chunk] = source[chunk]
        digest.update(target[chunk].data)
    return copy, digest.intdigest()


def safetensors_file(buckets: Sequence[WeightBucket]) -> tuple[MemoryFile, dict[str, np.ndarray]]:
    """Write the tensors of buckets to a safetensors file in memory. Return the file and the bytes of each tensor in it.

    The format forbids gaps between tensors, which buckets have; so all data is copied.
    """
    entries, offset = {}, 0
    parts: dict[str, np.ndarray] = {}
    for bucket in buckets:
        for (name, dtype, shape, _), (start, end) in zip(bucket.tensors, tensor_spans(bucket), strict=True):
            code = SAFETENSORS_CODES[DTYPES[dtype]]
            entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + end - start]}
            parts[name] = bucket.data[start:end]
            offset += end - start
    names = json.dumps(entries).encode()
    names += b" " * (-len(names) % 8)
    header = len(names).to_bytes(8, "little") + names
    file, place = MemoryFile(len(header) + offset), len(header)
    file.data[:place] = np.frombuffer(header, dtype=np.uint8)
    for name, part in parts.items():
        own = file.data[place : place + len(part)]
        own[:] = part
        parts[name] = own
        place += len(own)
    return file, parts


def manifest(buckets: Iterable[WeightBucket]) -> tuple[int, dict[str, int]]:
    """Return the number of parameters, and the checksum of each tensor, taken from `WeightBucket.verified` if set."""
    parameter_count = 0
    found: dict[str, int] = {}
    unverified: dict[str, np.ndarray] = {}
    for bucket in buckets:
        for (name, _, shape, _), (start, end) in zip(bucket.tensors, tensor_spans(bucket), strict=True):
            parameter_count += math.prod(shape)
            if bucket.verified:
                found[name] = bucket.verified[name]
            else:
                unverified[name] = bucket.data[start:end]
    return parameter_count, found | checksums(unverified, checksum)


def _view(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return uint8 ``[bytes]`` as a tensor, in place if its alignment allows."""
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    if data.ctypes.data % dtype.itemsize:
        data = data.copy()
    if data.flags.writeable:
        return torch.from_numpy(data).view(dtype).view(shape)
    # torch has no read-only tensors and warns about each read-only array, so the memory is passed by its address. The
    # attribute keeps the array alive.
    memory = (ctypes.c_uint8 * len(data)).from_address(data.ctypes.data)
    memory.owner = data  # type: ignore[attr-defined]  # arrays of ctypes take any attribute
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


TransferStep = Literal["init", "start", "update", "finish"]
WeightContent = Literal["full", "adapter", "delta"]
"""What a publication has: all weights, the adapters (LoRA) alone (`roll.weights.adapters`), or all weights and what
changed in them (`roll.weights.delta`)."""


@dataclass(frozen=True)
class BucketLocation:
    """Location of a bucket's data for other processes of this host."""

    path: str
    """File to map read-only."""
    offset: int
    """Offset of the data's first byte in the file."""
    region: tuple[int, int] | None = None
    """Start and length of the part of the file that holds the whole bucket, also in later updates; None if these use
    other files or sizes. It begins with a page."""


@dataclass
class WeightBucket:
    """Some tensors of one weight update, as bytes.

    ``tensors`` holds (name in a checkpoint, dtype name such as ``float32``, shape, byte offset). ``data`` is uint8
    ``[bytes]``. A tensor is never split over buckets.
    """

    tensors: list[tuple[str, str, tuple[int, ...], int]]
    data: np.ndarray
    location: BucketLocation | None = None
    """None if the bytes are in no file."""
    lasting: bool = False
    """True if ``data`` stays unchanged until the engine has loaded the next version. If False, it may change as soon as
    `InferStrategy.load_weights` has returned."""
    verified: Mapping[str, int] | None = None
    """Checksums of the tensors, if another process on this host has already verified these same bytes; else None."""


@dataclass
class HeldWeights:
    """Description of the weights that an engine holds or is about to use, to be compared with the trainer's."""

    version: int
    parameter_count: int
    """Number of elements of all named parameters; tied ones count once."""
    checksums: Mapping[str, int | None] = field(default_factory=dict)
    """Tensor name -> xxh3_64 of its bytes in the engine; None for a tensor that cannot be read back."""
    in_place: bool = False
    """True if the engine computes with the weight update's own memory, which must then stay unchanged."""
    healed: Sequence[str] = ()
    """Tensors whose delta did not fit, and which were fetched whole."""


class WeightMismatch(ValueError):
    """The weight update does not fit the engine's model. The message names the tensor."""
