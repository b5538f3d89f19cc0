"""Deadlines that pause while the engines sleep: a request is not charged for time when another role has the devices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StoppableDeadlines:
    """Any number of deadlines that are stopped and resumed together."""

    def __init__(self) -> None:
        self._stopped = False
        self._seconds_left: dict[asyncio.Timeout, float] = {}
        """Seconds left at the last stop, or the initial limit."""

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Raise `TimeoutError` if the block runs longer than ``seconds``. Time during stops does not count.

        Used like `asyncio.timeout`.
        """
        async with asyncio.timeout(None if self._stopped else seconds) as deadline:
            self._seconds_left[deadline] = seconds
            try:
                yield deadline
            finally:
                del self._seconds_left[deadline]

    def stop(self) -> None:
        """Stop the clock of all deadlines. Calling it twice is harmless."""
        if self._stopped:
            return
        self._stopped = True
        now = asyncio.get_running_loop().time()
        for deadline in self._running():
            ends = deadline.when()
            if ends is not None:
                self._seconds_left[deadline] = ends - now
            deadline.reschedule(None)

    def resume(self) -> None:
        """Undo `stop`. Calling it twice is harmless."""
        if not self._stopped:
            return
        self._stopped = False
        now = asyncio.get_running_loop().time()
        for deadline in self._running():
            deadline.reschedule(now + self._seconds_left[deadline])

    def _running(self) -> list[asyncio.Timeout]:
        return [deadline for deadline in self._seconds_left if not deadline.expired()]
