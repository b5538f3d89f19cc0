"""Model weights as bytes: how a trainer packs one publication into buckets and an engine reads them back.

Promises: a tensor is never split, the bytes arrive unchanged in any dtype, and both sides compute the same checksum of
the same tensor. Weights travel as raw bytes with a header, never as pickles.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from roll.strategies.infer.base import WeightBucket, WeightMismatch

_ALIGNMENT = 64
"""Tensors start at multiples of this many bytes, so that every dtype can be viewed in place."""

_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def pack_buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Pack tensors, in order, into buckets of at most ``bucket_bytes`` bytes.

    A tensor larger than that gets a bucket of its own. Each tensor is copied to the host before the next one is drawn
    (a trainer may reuse the memory of the last one). Raises ``ValueError`` for a size below 1, a dtype that cannot
    travel, or a name that comes twice.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket needs at least one byte")
    seen: set[str] = set()
    header: list[tuple[str, str, tuple[int, ...], int]] = []
    parts: list[np.ndarray] = []
    filled = 0
    for name, tensor in named_tensors:
        if name in seen:
            raise ValueError(f"tensor {name!r} comes twice in one publication")
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}, which cannot be sent")
        seen.add(name)
        data = tensor_bytes(tensor)
        offset = filled + -filled % _ALIGNMENT
        if header and offset + len(data) > bucket_bytes:
            yield WeightBucket(header, np.concatenate(parts))
            header, parts, filled, offset = [], [], 0, 0
        header.append((name, _NAMES[tensor.dtype], tuple(tensor.shape), offset))
        parts += [np.zeros(offset - filled, dtype=np.uint8), data.copy()]
        filled = offset + len(data)
    if header:
        yield WeightBucket(header, np.concatenate(parts))


def unpack(bucket: WeightBucket) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, each a copy of its own in memory that torch allocated.

    The bucket's memory may be reused afterwards, and kernels whose sums depend on the alignment of their operands see
    the same alignment at every load.
    Raises ``WeightMismatch`` naming the tensor if its dtype is unknown or its bytes lie outside the bucket.
    """
    for name, dtype_name, shape, offset in bucket.tensors:
        if dtype_name not in _DTYPES:
            raise WeightMismatch(f"tensor {name!r}: unknown dtype {dtype_name!r}; known: {', '.join(_DTYPES)}")
        dtype = _DTYPES[dtype_name]
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if offset < 0 or offset + size > len(bucket.data):
            raise WeightMismatch(
                f"tensor {name!r}: bytes {offset} to {offset + size} lie outside its bucket of {len(bucket.data)} bytes"
            )
        tensor = torch.empty(shape, dtype=dtype)
        tensor_bytes(tensor)[:] = bucket.data[offset : offset + size]
        yield name, tensor


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's elements in row-major order as uint8 ``[bytes]`` on the host (a view where that is possible)."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def tensor_checksum(tensor: torch.Tensor) -> int:
    """``zlib.crc32`` of the tensor's bytes; equal on every machine for equal dtype, shape and values."""
    return zlib.crc32(tensor_bytes(tensor))
