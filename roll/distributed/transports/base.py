"""What a transport offers: memory to gather into on the trainer's side, buckets to load from on the engine's.

A sender lives as long as its trainer and keeps one set of memory per half of the double buffer: touching memory for
the first time costs as much as copying into it several times over, so it is touched once. Which half is free is
decided elsewhere (`roll.distributed.weight_buffers`); a sender writes where it is told.
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
    """What a trainer needs to know to build its sender."""

    name: str
    halves: int
    directory: Path
    """Where files go, if any are written."""
    bucket_bytes: int = 256 * 1024**2
    """Bytes on the way at a time, where the engine library sends them."""
    timeout_seconds: float = 600.0
    """Longest wait for one call of an engine while it is sent to."""
    spoiled_versions: frozenset[int] = frozenset()
    """Of these a byte is changed on the way (`chaos`)."""


class WeightSender(Protocol):
    """The trainer's side."""

    def begin(self, half: int) -> None:
        """What was published from this half is gone from here on."""

    def allocate(self, half: int, index: int, size: int) -> np.ndarray:
        """Memory for bucket ``index`` of this half: uint8, at least ``size`` bytes, the same at each publication."""

    def send(self, half: int, version: int, buckets: Sequence[WeightBucket]) -> list[Any]:
        """Hand the half's buckets over; what the receiver needs, bucket by bucket."""

    def release(self, version: int) -> None:
        """Nobody will ask for this version again."""


class WeightReceiver(Protocol):
    """The engine's side. Lives as long as the engine's process."""

    def receive(self, handles: Sequence[Any], version: int) -> Iterator[WeightBucket]:
        """The buckets of a version. Raises `WeightMismatch` naming the version found if it is another one."""


@dataclass(frozen=True)
class WeightTransport:
    """Both ends of one way to travel."""

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
