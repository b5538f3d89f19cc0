"""A publication on its way into vLLM: that it is complete and fits, where its bytes lie, and what is read back of it.

Everything here is decided before the engine is paused, and without vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roll.data.seeds import derive_seed
from roll.strategies.infer.base import BucketLocation, WeightBucket, WeightMismatch, WeightReceipt
from roll.strategies.infer.mapped_memory import MemoryFile
from roll.strategies.weights import ALIGNMENT, manifest

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Hugging Face name of each tensor -> (dtype name, shape)."""

_INSPECTED_BYTES = 64 * 1024**2
"""Most bytes of weights read back from the engine after an update."""


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


def check_layout(entries: list[tuple[str, str, tuple[int, ...]]], shapes: dict[str, tuple[int, ...]]) -> Layout:
    """What was sent. Raises ``WeightMismatch`` naming a tensor that does not fit, or is missing."""
    layout: Layout = {}
    for name, dtype, shape in entries:
        if name not in shapes:
            raise WeightMismatch(f"tensor {name!r} is not in the engine's model")
        if name in layout:
            raise WeightMismatch(f"tensor {name!r} came twice")
        if not _is_float(dtype):
            raise WeightMismatch(f"tensor {name!r} has dtype {dtype}, the engine's is a floating-point one")
        if tuple(shape) != shapes[name]:
            raise WeightMismatch(f"tensor {name!r} has shape {tuple(shape)}, the engine's has {shapes[name]}")
        layout[name] = (dtype, tuple(shape))
    missing = [name for name in shapes if name not in layout]
    if missing:
        raise WeightMismatch(f"tensor {missing[0]!r} is missing from the publication ({len(missing)} missing in all)")
    return layout


def _is_float(dtype_name: str) -> bool:
    return dtype_name.startswith(("float", "bfloat"))


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
    return {
        "path": bucket.location.path,
        "offset": bucket.location.offset,
        "size": len(bucket.data),
        "tensors": bucket.tensors,
    }


def sample_of(tensors: Mapping[str, torch.Tensor], version: int) -> list[str]:
    """Names of some tensors to read back, other ones at each version, together at most `_INSPECTED_BYTES` (or one)."""
    sample: list[str] = []
    size = 0
    for name in sorted(tensors, key=lambda name: derive_seed(version, name)):
        size += tensors[name].nbytes
        if sample and size > _INSPECTED_BYTES:
            break
        sample.append(name)
    return sample
