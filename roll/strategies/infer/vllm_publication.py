"""A publication on its way into vLLM: that it is complete and fits, and where its bytes lie.

Everything here is decided before the engine is paused, and without vLLM.
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
    """A publication that fits, waiting to be loaded."""

    version: int
    buckets: list[WeightBucket]
    receipt: WeightReceipt
    layout: Layout
    staging: MemoryFile | None = None
    """Where the bytes were put that no other process could have read."""


def prepare(buckets: list[WeightBucket], version: int, shapes: dict[str, tuple[int, ...]]) -> Prepared:
    """Check that a publication is complete and fits. Raises ``WeightMismatch`` naming the tensor."""
    layout = check_layout([entry[:3] for bucket in buckets for entry in bucket.tensors], shapes)
    parameter_count, checksums = manifest(buckets)
    located, staging = locate(buckets)
    return Prepared(version, located, WeightReceipt(version, parameter_count, checksums), layout, staging)


def locate(buckets: list[WeightBucket]) -> tuple[list[WeightBucket], MemoryFile | None]:
    """The buckets where vLLM's processes can read them: as they are, or copied into shared memory."""
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
    """What vLLM's processes are told of a bucket: where its bytes are, and the tensors in it. ``ValueError`` for one
    that is nowhere they can read; `locate` gives it a place."""
    if bucket.location is None:
        raise ValueError("this bucket is in no file, so other processes cannot read it")
    return {
        "path": bucket.location.path,
        "offset": bucket.location.offset,
        "size": len(bucket.data),
        "tensors": bucket.tensors,
    }
