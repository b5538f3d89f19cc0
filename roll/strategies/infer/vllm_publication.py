"""A weight update on its way into vLLM: checks that it is complete and fits, and makes its bytes readable for vLLM.

All of this happens before the engine is paused, and without vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.strategies.infer.base import BucketLocation, WeightBucket, WeightReceipt
from roll.strategies.infer.mapped_memory import MemoryFile
from roll.strategies.infer.publication import Layout, check_layout
from roll.strategies.weights import ALIGNMENT, manifest


@dataclass
class Prepared:
    """A weight update that fits, waiting to be loaded."""

    version: int
    buckets: list[WeightBucket]
    receipt: WeightReceipt
    layout: Layout
    staging: MemoryFile | None = None
    """Shared memory with copies of those buckets that no other process could have read."""


def prepare(buckets: list[WeightBucket], version: int, shapes: dict[str, tuple[int, ...]]) -> Prepared:
    """Check that a weight update is complete and fits. Raises ``WeightMismatch`` naming the tensor."""
    layout = check_layout([entry[:3] for bucket in buckets for entry in bucket.tensors], shapes)
    parameter_count, checksums = manifest(buckets)
    located, staging = locate(buckets)
    return Prepared(version, located, WeightReceipt(version, parameter_count, checksums), layout, staging)


def locate(buckets: list[WeightBucket]) -> tuple[list[WeightBucket], MemoryFile | None]:
    """Return the buckets where vLLM's processes can read them: unchanged, or copied into shared memory."""
    homeless = [bucket for bucket in buckets if bucket.location is None]
    if not homeless:
        return buckets, None
    memory = MemoryFile(sum(_aligned(len(bucket.data)) for bucket in homeless))
    offset = 0
    located = []
    for bucket in buckets:
        if bucket.location is None:
            memory.data[offset : offset + len(bucket.data)] = bucket.data
            location = BucketLocation(memory.path, offset)
            bucket = WeightBucket(bucket.tensors, bucket.data, location)
            offset += _aligned(len(bucket.data))
        located.append(bucket)
    return located, memory


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def bucket_info(bucket: WeightBucket) -> dict[str, Any]:
    """Return the location and the tensors of a bucket, for vLLM's processes.

    Raises ``ValueError`` for a bucket that is in no file; `locate` copies it into one.
    """
    if bucket.location is None:
        raise ValueError("this bucket is in no file, so other processes cannot read it")
    return {
        "path": bucket.location.path,
        "offset": bucket.location.offset,
        "size": len(bucket.data),
        "tensors": bucket.tensors,
    }
