"""A weight update as a checkpoint that SGLang reads, in memory instead of on a disk.

SGLang takes weights over HTTP in several ways. This one needs no pickles (DESIGN §12) and splits tensors over GPUs by
itself. The files are anonymous shared memory; a folder of links gives them names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from roll.strategies.infer.base import WeightBucket, WeightReceipt
from roll.strategies.infer.mapped_memory import MemoryFile
from roll.strategies.infer.publication import Layout, check_layout, sample_of
from roll.strategies.weights import DTYPES, manifest, tensor_checksum, tensor_spans

_SAFETENSORS_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_READ_BACK_ELEMENTS = 8192
"""Number of elements of the largest tensor that is read back: its elements travel as text."""
_READ_BACK_TENSORS = 8
"""Most tensors that are read back after an update."""


class MemoryCheckpoint:
    """A folder of safetensors files whose bytes are in memory. It is removed with the object."""

    def __init__(self, buckets: list[WeightBucket]) -> None:
        self._folder = TemporaryDirectory(prefix="roll-weights-")
        self._files: list[MemoryFile] = []
        for number, bucket in enumerate(buckets):
            file = _safetensors_file(bucket)
            (Path(self.path) / f"model-{number:05d}.safetensors").symlink_to(file.path)
            self._files.append(file)

    @property
    def path(self) -> str:
        """The folder."""
        return self._folder.name

    def close(self) -> None:
        """Free the memory. Harmless to repeat."""
        self._folder.cleanup()
        self._files.clear()


@dataclass
class Prepared:
    """A weight update that fits, waiting to be loaded."""

    version: int
    receipt: WeightReceipt
    layout: Layout
    checkpoint: MemoryCheckpoint


def prepare(buckets: list[WeightBucket], version: int, shapes: dict[str, tuple[int, ...]]) -> Prepared:
    """Check that a weight update is complete and fits, and write it down. Raises ``WeightMismatch`` naming the
    tensor."""
    layout = check_layout([entry[:3] for bucket in buckets for entry in bucket.tensors], shapes)
    parameter_count, checksums = manifest(buckets)
    checkpoint = MemoryCheckpoint(buckets)
    return Prepared(version, WeightReceipt(version, parameter_count, checksums), layout, checkpoint)


def fingerprint(checksums: Mapping[str, int | None]) -> str:
    """Return one string that stands for the contents of a weight update."""
    return hashlib.sha256(json.dumps(sorted(checksums.items())).encode()).hexdigest()


def names_to_read(layout: Layout, version: int) -> list[str]:
    """Return names of some small tensors. They differ from version to version."""
    small = {
        name: torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        for name, (dtype, shape) in layout.items()
        if shape and int(np.prod(shape)) <= _READ_BACK_ELEMENTS
    }
    return sample_of(small, version)[:_READ_BACK_TENSORS]


def checksum_of_values(values: list[float] | list[list[float]], dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return the checksum of a tensor given as numbers; None if they are only a part of the tensor (one GPU's)."""
    tensor = torch.tensor(values, dtype=torch.float32).to(DTYPES[dtype])
    return tensor_checksum(tensor) if tuple(tensor.shape) == tuple(shape) else None


def _safetensors_file(bucket: WeightBucket) -> MemoryFile:
    """Write the bucket's tensors one after the other, without the gaps that a bucket has and the format forbids."""
    spans = tensor_spans(bucket)
    entries, offset = {}, 0
    for (name, dtype, shape, _), (start, end) in zip(bucket.tensors, spans, strict=True):
        entry = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(shape)}
        entries[name] = entry | {"data_offsets": [offset, offset + end - start]}
        offset += end - start
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    file = MemoryFile(8 + len(header) + offset)
    file.data[:8] = np.frombuffer(len(header).to_bytes(8, "little"), dtype=np.uint8)
    place = 8 + len(header)
    file.data[8:place] = np.frombuffer(header, dtype=np.uint8)
    for start, end in spans:
        file.data[place : place + end - start] = bucket.data[start:end]
        place += end - start
    return file
