"""A fixed number of places, first come, first served, whose count stays exact whoever is cancelled when."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from roll.agentic.env_worker.records import EnvPoolClosed


class Places:
    """Like a semaphore that can be closed. Wherever a place is free, nobody waits."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._queue: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._closed_because: str | None = None

    @property
    def taken(self) -> int:
        """Places given away."""
        return self.count - self._free

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return sum(not turn.done() for turn in self._queue)

    async def take(self) -> None:
        """Wait for a place. A call that is cancelled has taken none. Raises `EnvPoolClosed`."""
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
                self.give_back()  # the place came in the same moment as the cancellation
            raise

    def give_back(self) -> None:
        """A place is free again; who waits longest has it."""
        self._free += 1
        while self._free and self._queue:
            turn, _ = self._queue.popitem(last=False)
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def close(self, because: str) -> None:
        """End all waiting, and whatever is asked later."""
        self._closed_because = because
        while self._queue:
            turn, _ = self._queue.popitem(last=False)
            if not turn.done():
                turn.set_exception(EnvPoolClosed(because))
