"""Checkpoints on disk: one folder of safetensors files per version, for hosts that share only a file system.

A folder appears complete, by one rename, and is deleted when its version is released. Readers map the files; an engine
can keep reading a file after it was deleted.
"""

from __future__ import annotations

import json
import logging
import mmap
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import save_file

from roll.distributed.transports.base import HostMemory
from roll.strategies.infer.base import BucketLocation, WeightBucket, WeightMismatch
from roll.strategies.weights import views

logger = logging.getLogger(__name__)

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Torch dtype name by the name in safetensors files."""


@dataclass(frozen=True)
class FileHandle:
    """A bucket on disk."""

    path: str


class CheckpointSender:
    """A sender that writes each version into its own folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._memory = HostMemory()

    def begin(self, half: int) -> None:
        """Do nothing: the files do not depend on the memory that they were written from."""

    def allocate(self, half: int, index: int, size: int) -> np.ndarray:
        """See `WeightSender.allocate`."""
        return self._memory.allocate(half, index, size)

    def send(self, half: int, version: int, buckets: Sequence[WeightBucket]) -> list[FileHandle]:
        """See `WeightSender.send`; a folder under its final name is complete."""
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
        return [FileHandle(str(folder / name)) for name in names]

    def release(self, version: int) -> None:
        """See `WeightSender.release`; files that cannot be deleted are logged."""
        folder = self._folder(version)
        try:
            shutil.rmtree(folder)
        except OSError as error:
            logger.warning("cannot delete the weights of version %d in %s: %s", version, folder, error)

    def _folder(self, version: int) -> Path:
        return self._directory.absolute() / f"version-{version:06d}"


class CheckpointReceiver:
    """A receiver that maps the files of a version."""

    def receive(self, handles: Sequence[FileHandle], version: int) -> Iterator[WeightBucket]:
        """See `WeightReceiver.receive`."""
        for handle in handles:
            yield read_file(Path(handle.path), version)


def read_file(path: Path, version: int) -> WeightBucket:
    """Map a safetensors file read-only and return its tensors as a bucket.

    Raises `WeightMismatch` for a file that cannot be read or holds another version.
    """
    try:
        with open(path, "rb") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=np.uint8)
        start = 8 + int(memory[:8].view("<u8")[0])
        header = json.loads(memory[8:start].tobytes())
        found = header.pop("__metadata__")["version"]
        entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
        tensors = [
            (name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), int(entry["data_offsets"][0]))
            for name, entry in entries
        ]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise WeightMismatch(f"cannot read {path}, weights of version {version}: {error!r}") from error
    if found != str(version):
        raise WeightMismatch(f"{path} holds version {found}, expected {version}: the publication is stale")
    return WeightBucket(tensors, memory[start:], BucketLocation(str(path), start))
