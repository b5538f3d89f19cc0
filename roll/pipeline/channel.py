"""The bounded channel between two stages.

It has one producer and one consumer. A full channel makes the producer wait; this is how back-pressure reaches the
rollout. `close` marks the end of the data, never a sentinel item, so a crash cannot be mistaken for a normal end. A
producer that fails leaves its channel open, and the graph cancels the consumer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from roll.tracking.waits import waiting

Item = TypeVar("Item")


class ChannelClosed(Exception):
    """The channel was closed: it has no more items, or accepts no more."""


class Channel(Generic[Item]):
    """A first-in, first-out channel of at most ``capacity`` items."""

    def __init__(self, name: str, capacity: int = 1) -> None:
        if capacity < 1:
            raise ValueError(f"channel {name!r} needs a capacity of at least 1, not {capacity}")
        self.name = name
        self.capacity = capacity
        self._items: deque[Item] = deque()
        self._closed = False
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        """True if `put` would wait."""
        return len(self._items) >= self.capacity

    async def put(self, item: Item) -> None:
        """Wait for room and append. Raises `ChannelClosed` after `close`."""
        async with self._changed:
            with waiting(f"room/{self.name}", "room for an item"):
                await self._changed.wait_for(lambda: self._closed or not self.full)
            if self._closed:
                raise ChannelClosed(f"channel {self.name!r} is closed")
            self._items.append(item)
            self._changed.notify_all()

    async def get(self) -> Item:
        """Wait for an item. Raises `ChannelClosed` once the channel is closed and empty."""
        async with self._changed:
            with waiting(f"items/{self.name}", "an item"):
                await self._changed.wait_for(lambda: self._closed or self._items)
            if not self._items:
                raise ChannelClosed(f"channel {self.name!r} is closed")
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    async def close(self) -> None:
        """Close the channel to new items. Items already put are still delivered."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
