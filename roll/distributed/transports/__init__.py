"""Transports of weight updates. A new transport is one file next to these and one line below."""

from __future__ import annotations

from roll.distributed.transports.base import WeightReceiver, WeightSender, WeightTransport
from roll.distributed.transports.checkpoint import CheckpointReceiver, CheckpointSender
from roll.distributed.transports.object_store import ObjectStoreReceiver, ObjectStoreSender
from roll.distributed.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender

TRANSPORTS: dict[str, WeightTransport] = {
    "shared_memory": WeightTransport(lambda spec: SharedMemorySender(lasting=spec.halves > 1), SharedMemoryReceiver),
    "object_store": WeightTransport(lambda spec: ObjectStoreSender(), ObjectStoreReceiver),
    "checkpoint": WeightTransport(lambda spec: CheckpointSender(spec.directory), CheckpointReceiver),
}
"""Transports by their name in `weight_update.transport`."""

__all__ = ["TRANSPORTS", "WeightReceiver", "WeightSender", "WeightTransport"]
