"""Ray's object store: works everywhere, at the price of two more copies (into the store and out of it).

Objects live as long as their weight update is referenced. Each further host gets one copy from the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from roll.distributed.transports.base import HostMemory
from roll.strategies.infer.base import WeightBucket, WeightMismatch


@dataclass(frozen=True)
class StoredBucket:
    """A bucket in the object store."""

    version: int
    reference: Any


class ObjectStoreSender:
    """A sender that puts each bucket into the store of the trainer's host."""

    def __init__(self) -> None:
        self._memory = HostMemory()

    def begin(self, half: int) -> None:
        """Do nothing: the store has its own copies."""

    def allocate(self, half: int, index: int, size: int) -> np.ndarray:
        """See `WeightSender.allocate`."""
        return self._memory.allocate(half, index, size)

    def send(self, half: int, version: int, buckets: Sequence[WeightBucket]) -> list[StoredBucket]:
        """See `WeightSender.send`."""
        return [StoredBucket(version, ray.put(bucket)) for bucket in buckets]

    def release(self, version: int) -> None:
        """Do nothing: the store counts references."""


class ObjectStoreReceiver:
    """A receiver that reads buckets from the store in its host's memory."""

    def receive(self, handles: Sequence[StoredBucket], version: int) -> Iterator[WeightBucket]:
        """See `WeightReceiver.receive`."""
        for handle in handles:
            if handle.version != version:
                raise WeightMismatch(f"the object store holds version {handle.version}, expected {version}")
            yield ray.get(handle.reference)
