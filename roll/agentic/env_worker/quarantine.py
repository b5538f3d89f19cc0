"""Where a suspect plays alone: one process that holds one session at a time, first come, first served.

The process is started when it is first needed, and again when the last one died or was not left clean. A session first
waits for its turn here, then for a place of the pool, so those that wait keep no place from others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roll.agentic.env_worker.places import Places
from roll.agentic.env_worker.process import EnvProcess
from roll.agentic.env_worker.records import EnvPoolClosed


class Quarantine:
    """The turn, and the process."""

    def __init__(self, order_process: Callable[[], None]) -> None:
        """``order_process`` sees to it that a new process comes by `admit`, or else that `close` is called."""
        self._order_process = order_process
        self._turn = Places(1)
        self._process: EnvProcess | None = None
        self._is_ordered = False
        self._news = asyncio.Event()
        self._closed_because: str | None = None

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return self._turn.waiting

    async def enter(self) -> None:
        """Wait for one's turn. A call that is cancelled has not entered. Raises `EnvPoolClosed`."""
        await self._turn.take()

    def leave(self) -> None:
        """The turn is over."""
        self._turn.give_back()

    async def process(self) -> EnvProcess:
        """The process, for who has the turn. Raises `EnvPoolClosed`."""
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
        """Here is the process."""
        self._process = process
        self._is_ordered = False
        self._news.set()

    def close(self, because: str) -> None:
        """End all waiting."""
        self._closed_because = because
        self._turn.close(because)
        self._news.set()
