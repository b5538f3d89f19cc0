"""An event loop in virtual time: hours of rollouts run in milliseconds, with the same result every time.

When no callback is ready, the loop sets its clock to the next timer at once. When there is no timer either, nothing can
ever happen again, and it raises `Deadlock` with the waiting tasks. It is for tests and simulation on one thread:
`run_in_executor` runs its function at once. Waiting for a socket takes no virtual time; if all tasks wait only for
sockets, that is a deadlock.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LONGEST_RUN_SECONDS = 2**23
"""97 days. At later times, floats cannot resolve the nanosecond that asyncio adds when it checks if a timer is due."""


class Deadlock(RuntimeError):
    """No task can run and no timer is set. The message lists the pending tasks and the place where each one waits."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that never blocks: instead of sleeping, it reports how long it would have slept, and returns."""

    def __init__(self, skip: Callable[[float | None], None]) -> None:
        super().__init__()
        self._skip = skip

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and (timeout is None or timeout > 0):
            self._skip(timeout)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop in virtual time, which starts at 0 seconds. `asyncio.sleep`, `timeout` and `call_later`
    work as usual."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._virtual_now = 0.0
        super().__init__(_JumpingSelector(self._skip))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual_now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Call the function at once, in this thread, and return a future that is already done."""
        outcome: asyncio.Future[T] = self.create_future()
        try:
            outcome.set_result(func(*args))
        except Exception as error:
            outcome.set_exception(error)
        return outcome

    def advance(self, seconds: float) -> None:
        """Advance the clock without running any callback, as if the process had been stopped for this time."""
        self._virtual_now += seconds

    def idle_until(self) -> float:
        """Return the time of the next event: now if a callback is ready, else the time of the next timer, or infinity
        if there is none."""
        if self._ready:
            return self._virtual_now
        return self._scheduled[0].when() if self._scheduled else math.inf

    def _skip(self, seconds: float | None) -> None:
        if seconds is None:
            tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
            lines = [f"  {task.get_name()}: {_where(task)}" for task in tasks]
            raise Deadlock("\n".join(["nothing can run and no timer is set; pending tasks:", *lines]))
        if self._virtual_now > LONGEST_RUN_SECONDS:
            raise OverflowError(f"virtual time passed {LONGEST_RUN_SECONDS} s; does a timer set itself again for ever?")
        self._virtual_now += seconds


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a fresh `VirtualTimeLoop` and return its result.

    Raises `Deadlock` if everything waits for something that cannot happen, and whatever ``main`` raises.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def _where(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    while inspect.iscoroutine(coroutine) and inspect.iscoroutine(coroutine.cr_await):
        coroutine = coroutine.cr_await
    if not inspect.iscoroutine(coroutine) or coroutine.cr_frame is None:
        return "waits outside of a coroutine"
    return f"waits in {coroutine.cr_code.co_qualname} (line {coroutine.cr_frame.f_lineno})"
