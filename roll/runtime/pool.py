"""Building blocks of process pools: slots whose process can be replaced, tasks that end with the pool, and a pace."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from roll.runtime.workers import ProcessHandle

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Handle = TypeVar("Handle", bound="ProcessHandle")


class Slot(Generic[Handle]):
    """A slot for one process. The process is started when it is needed, and replaced after it was lost.

    A new process starts only after its predecessor is gone, so that memory and devices are free.
    """

    def __init__(self, build: Callable[[], Handle], start: Callable[[Handle], Awaitable[None]]) -> None:
        """Create an empty slot. ``build`` creates a process, and ``start`` waits until it is ready."""
        self.process: Handle | None = None
        self.calls = 0
        """Number of calls in progress, counted by the pool."""
        self._build = build
        self._start = start
        self._changing = asyncio.Lock()

    async def filled(self) -> Handle:
        """Return the process; start one if there is none. If ``start`` fails, end the process and raise the error."""
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
        """End a process that cannot be used any more. Return False if another caller has already done so."""
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
    """Log the error of a task that no caller waits for."""
    logger.error("a background task failed", exc_info=error)


def ignore_failure(error: BaseException) -> None:
    """Ignore the error of a task whose caller waits for it and so sees the error."""


class Tasks:
    """A set of background tasks that can be awaited or cancelled together."""

    def __init__(self, on_failure: Callable[[BaseException], None] = log_failure) -> None:
        """Begin without tasks. ``on_failure`` is called with each error of a task, except for its cancellation."""
        self._on_failure = on_failure
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a background task and return it."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self) -> None:
        """Wait until all tasks have ended."""
        while self._running:
            await asyncio.wait(self._running)

    async def cancel(self) -> None:
        """Cancel all tasks, including those that start meanwhile, and wait until they have ended."""
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)


class Pace:
    """Limits how many tasks go on per turn of the event loop, where thousands may be ready at once.

    They go on in the order in which they call `turn`.
    """

    def __init__(self, most: int) -> None:
        """Allow at most ``most`` tasks per turn."""
        self._most = most
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait for a turn of the event loop with a free place."""
        loop = asyncio.get_running_loop()
        if self._taken == 0:
            loop.call_soon(self._next_turn)
        elif self._taken >= self._most:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        self._taken += 1

    def _next_turn(self) -> None:
        self._taken = 0
        while self._waiting and self._taken < self._most:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._taken += 1
        if self._taken:
            asyncio.get_running_loop().call_soon(self._next_turn)


async def all_or_none(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all calls and return their results. If one fails, cancel the others, wait for their end, raise its error."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
