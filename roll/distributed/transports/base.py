"""The two ends of a transport: memory that the trainer gathers into, and buckets that the engine loads from.

A sender lives as long as its trainer and keeps one set of memory per buffer of the double buffer. First touching memory
costs several times as much as copying into it, so it is allocated once and reused. `roll.distributed.weight_buffers`
decides which buffer is free; a sender writes where it is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from roll.strategies.infer.base import WeightBucket


@dataclass(frozen=True)
class TransportSpec:
    """Everything a trainer needs to build its sender."""

    name: str
    halves: int
    directory: Path
    """Folder for the transport's files, if it writes any."""
    bucket_bytes: int = 256 * 1024**2
    """Bytes in transit at a time where the engine library sends them."""
    timeout_seconds: float = 600.0
    """Longest wait for one call to an engine during a push."""
    spoiled_versions: frozenset[int] = frozenset()
    """Versions of which one byte is corrupted on the way (`chaos`)."""


class WeightSender(Protocol):
    """The trainer's end."""

    def begin(self, half: int) -> None:
        """Invalidate the version in this buffer, which is about to be overwritten."""

    def allocate(self, half: int, index: int, size: int) -> np.ndarray:
        """Return memory for bucket ``index``: uint8, at least ``size`` bytes, the same memory at each update."""

    def send(self, half: int, version: int, buckets: Sequence[WeightBucket]) -> list[Any]:
        """Hand over the buffer's buckets, and return what the receiver needs, bucket by bucket."""

    def release(self, version: int) -> None:
        """Release a version that nothing will ask for again."""


class WeightReceiver(Protocol):
    """The engine's end. Lives as long as the engine's process."""

    def receive(self, handles: Sequence[Any], version: int) -> Iterator[WeightBucket]:
        """Yield the buckets of a version. Raises `WeightMismatch` naming the version found if it is another one."""


@dataclass(frozen=True)
class WeightTransport:
    """The two ends of one transport."""

    sender: Callable[[TransportSpec], WeightSender]
    receiver: Callable[[], WeightReceiver]


class HostMemory:
    """Buckets in the trainer's own memory, for transports that copy them from there."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int], np.ndarray] = {}

    def allocate(self, half: int, index: int, size: int) -> np.ndarray:
        """See `WeightSender.allocate`."""
        memory = self._memory.get((half, index))
        if memory is None or len(memory) < size:
            memory = self._memory[half, index] = torch.empty(size, dtype=torch.uint8).numpy()
        return memory
