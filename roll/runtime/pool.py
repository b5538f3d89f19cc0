"""Parts of every pool of processes: slots whose process can be replaced, and tasks that end with the pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from roll.runtime.workers import ProcessHandle

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Handle = TypeVar("Handle", bound="ProcessHandle")


class Slot(Generic[Handle]):
    """A slot for one process, which is started when it is needed and replaced after it was lost.

    A process starts once its predecessor is gone, so the memory and the devices of that one are free.
    """

    def __init__(self, build: Callable[[], Handle], start: Callable[[Handle], Awaitable[None]]) -> None:
        """Leave the slot empty. ``build`` makes a process, and ``start`` waits until it can work."""
        self.process: Handle | None = None
        self.calls = 0
        """Number of calls in the slot, which the pool counts."""
        self._build = build
        self._start = start
        self._changing = asyncio.Lock()

    async def filled(self) -> Handle:
        """Return the process, starting one if there is none. Raises what ``start`` raises, and leaves nothing then."""
        async with self._changing:
            if self.process is None:
                self.process = self._build()
                try:
                    await self._start(self.process)
                except Exception:
                    await self._end()
                    raise
                except BaseException:
                    self.process.kill()
                    self.process = None
                    raise
            return self.process

    async def lose(self, lost: Handle) -> bool:
        """End a process that cannot be used any more. Return False if another caller already did."""
        async with self._changing:
            if self.process is not lost:
                return False
            await self._end()
            return True

    async def close(self) -> None:
        """End the process if there is one."""
        if self.process is not None:
            await self.lose(self.process)

    async def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            await process.end()


def log_failure(error: BaseException) -> None:
    """Log what a task raised, for tasks for which nobody waits."""
    logger.error("a background task failed", exc_info=error)


def ignore_failure(error: BaseException) -> None:
    """Ignore what a task raised, for tasks whose callers wait for them and so see the error."""


class Tasks:
    """Tasks that run beside their callers, until they end or are cancelled together."""

    def __init__(self, on_failure: Callable[[BaseException], None] = log_failure) -> None:
        """Begin without tasks. ``on_failure`` gets what a task raises besides its cancellation."""
        self._on_failure = on_failure
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run this beside the caller."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self) -> None:
        """Wait until none is left."""
        while self._running:
            await asyncio.wait(self._running)

    async def cancel(self) -> None:
        """Cancel all, also those that start meanwhile, and wait until they have ended."""
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)


async def all_or_none(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all calls. If one fails, cancel the others and wait for their end before raising its error."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
