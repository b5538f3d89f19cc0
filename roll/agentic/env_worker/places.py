"""A fixed number of slots, first come, first served. The count stays exact whenever a waiter is cancelled."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from roll.agentic.env_worker.records import EnvPoolClosed


class Places:
    """A semaphore that can be closed. No caller waits while a slot is free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._queue: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._closed_because: str | None = None

    @property
    def taken(self) -> int:
        """Number of slots in use."""
        return self.count - self._free

    @property
    def waiting(self) -> int:
        """Number of callers that wait for a slot."""
        return sum(not turn.done() for turn in self._queue)

    async def take(self) -> None:
        """Wait for a slot. A cancelled call has taken none. Raises `EnvPoolClosed`."""
        if self._closed_because is not None:
            raise EnvPoolClosed(self._closed_because)
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            self._queue.pop(turn, None)
            if not turn.cancelled() and turn.exception() is None:
                self.give_back()  # the slot arrived at the same moment as the cancellation
            raise

    def give_back(self) -> None:
        """Free a slot; the longest waiting caller gets it."""
        self._free += 1
        while self._free and self._queue:
            turn, _ = self._queue.popitem(last=False)
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def close(self, because: str) -> None:
        """Make all waiting and all later calls raise `EnvPoolClosed`."""
        self._closed_because = because
        while self._queue:
            turn, _ = self._queue.popitem(last=False)
            if not turn.done():
                turn.set_exception(EnvPoolClosed(because))
