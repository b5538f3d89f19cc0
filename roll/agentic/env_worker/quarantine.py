"""Quarantine for suspects: one process that holds one session at a time, first come, first served.

The process is started when it is first needed, and again when the last one died or was not left clean. A session waits
for its turn here first and then for a slot of the pool, so waiting sessions hold no slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roll.agentic.env_worker.places import Places
from roll.agentic.env_worker.process import EnvProcess
from roll.agentic.env_worker.records import EnvPoolClosed


class Quarantine:
    """The turn and the process."""

    def __init__(self, order_process: Callable[[], None]) -> None:
        """Prepare without starting. ``order_process`` must lead to a call of `admit` or of `close`."""
        self._order_process = order_process
        self._turn = Places(1)
        self._process: EnvProcess | None = None
        self._is_ordered = False
        self._news = asyncio.Event()
        self._closed_because: str | None = None

    @property
    def waiting(self) -> int:
        """Number of sessions that wait for their turn."""
        return self._turn.waiting

    async def enter(self) -> None:
        """Wait for the turn. A cancelled call has not entered. Raises `EnvPoolClosed`."""
        await self._turn.take()

    def leave(self) -> None:
        """End the turn."""
        self._turn.give_back()

    async def process(self) -> EnvProcess:
        """Return the process. Only the holder of the turn may call this. Raises `EnvPoolClosed`."""
        while self._process is None or not self._process.takes_sessions:
            if self._closed_because is not None:
                raise EnvPoolClosed(self._closed_because)
            self._news.clear()
            if not self._is_ordered:
                self._is_ordered = True
                self._order_process()
            await self._news.wait()
        return self._process

    def admit(self, process: EnvProcess) -> None:
        """Accept a new process."""
        self._process = process
        self._is_ordered = False
        self._news.set()

    def close(self, because: str) -> None:
        """Make all waiting raise `EnvPoolClosed`."""
        self._closed_because = because
        self._turn.close(because)
        self._news.set()
