"""The bounded channel between two stages.

One producer, one consumer. A full channel makes the producer wait, which is how back-pressure reaches the rollout. The
end of the data is said by `close`, never by a sentinel item, so a crash cannot be mistaken for a normal end: a
producer that fails leaves its channel open, and the graph cancels the consumer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from roll.tracking.waits import waiting

Item = TypeVar("Item")


class ChannelClosed(Exception):
    """Nothing more will come, or nothing more may be put."""


class Channel(Generic[Item]):
    """First in, first out, at most ``capacity`` items."""

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
        """Whether `put` would wait."""
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
        """Say that nothing more comes; items already put are still delivered."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
