"""Threads for calls: as many as there are calls that wait, and few for short ones; no value is lost or told twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from roll.agentic.worker import CallFailed, CallThreads, NoThread

T = TypeVar("T")
LONG = 30.0
"""Seconds after which a test gives up what should have happened at once."""


def run(use: Callable[[CallThreads], Awaitable[T]]) -> T:
    async def main() -> T:
        async with asyncio.timeout(2 * LONG):
            threads = CallThreads(2**20)
            try:
                return await use(threads)
            finally:
                threads.end()

    value = asyncio.run(main())
    for thread in threading.enumerate():
        if thread.name == "environment":
            thread.join(LONG)  # tests that count threads may follow
    return value


def call(threads: CallThreads, function: Callable[[], Any], seconds: float | None = LONG, **options: Any) -> Any:
    return threads.call(function, "it", "its_seconds", seconds, **options)


def block_until_returned(threads: CallThreads, number: int = 1) -> None:
    """Block the event loop until this many values wait for it."""
    end = time.monotonic() + LONG
    while len(threads._returned) < number:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_calls_never_wait_for_each_other():
    meeting = threading.Barrier(60)

    async def use(threads: CallThreads) -> int:
        for _ in range(2):  # with threads that are started, and with those that are there
            await asyncio.gather(*(call(threads, lambda: meeting.wait(LONG)) for _ in range(60)))
        return threads.count

    assert run(use) == 60


def test_short_calls_share_threads():
    async def use(threads: CallThreads) -> int:
        values = await asyncio.gather(*(call(threads, lambda number=number: number) for number in range(400)))
        assert values == list(range(400))
        return threads.count

    assert min(run(use) for _ in range(3)) < 200, "more are started after a moment in which the process had no core"


def test_a_call_begins_while_all_others_compute():
    came, computing = threading.Event(), list[None]()

    def compute() -> bool:
        computing.append(None)
        end = time.perf_counter() + LONG
        while not came.is_set() and time.perf_counter() < end:
            pass
        return came.is_set()

    async def use(threads: CallThreads) -> None:
        others = [asyncio.ensure_future(call(threads, compute, None)) for _ in range(8)]
        while len(computing) < len(others):
            await asyncio.sleep(0.001)
        await call(threads, came.set, None)
        assert all(await asyncio.gather(*others))

    run(use)


def test_threads_inherit_nothing_that_environments_set_on_their_own(monkeypatch):
    start, starters = threading.Thread.start, list[int]()

    def noted(thread: threading.Thread) -> None:
        starters.append(threading.get_ident())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    meeting = threading.Barrier(20)

    async def use(threads: CallThreads) -> None:
        await asyncio.gather(*(call(threads, lambda: meeting.wait(LONG)) for _ in range(20)))
        assert len(starters) == 20 and set(starters) == {threading.get_ident()}

    run(use)


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_a_value_that_comes_with_the_cancellation_is_told_once(cancelled_first):
    late: list[Any] = []

    async def use(threads: CallThreads) -> None:
        task = asyncio.ensure_future(call(threads, lambda: "value", on_late=late.append))
        await asyncio.sleep(0)
        block_until_returned(threads)
        if cancelled_first:
            task.cancel()
        else:
            asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert late == ["value"] and threads.stuck == 0

    run(use)


def test_a_late_value_is_told_once_and_its_thread_counts_as_stuck_until_then():
    free, late = threading.Event(), list[Any]()

    def work() -> str:
        free.wait(LONG)
        return "value"

    async def use(threads: CallThreads) -> None:
        for cancelled in (False, True):
            task = asyncio.ensure_future(call(threads, work, None if cancelled else 0.05, on_late=late.append))
            if cancelled:
                await asyncio.sleep(0.05)
                task.cancel()
            with pytest.raises(asyncio.CancelledError if cancelled else CallFailed):
                await task
        assert threads.stuck == 2 and late == []
        free.set()
        while threads.stuck or len(late) < 2:
            await asyncio.sleep(0.01)
        assert late == ["value", "value"]

    run(use)


def test_a_value_that_comes_with_both_limit_and_cancellation_is_told_once():
    free, late = threading.Event(), list[Any]()

    async def use(threads: CallThreads) -> None:
        def let_return() -> None:
            free.set()
            block_until_returned(threads)

        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(call(threads, lambda: free.wait(LONG), 0.2, on_late=late.append))
        await asyncio.sleep(0)
        loop.call_later(0.1, let_return)
        loop.call_later(0.3, task.cancel)
        time.sleep(0.4)  # these and the limit are due in the same turn of the event loop
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        assert late == [True] and threads.stuck == 0

    run(use)


def test_an_error_of_one_late_value_loses_no_other_value():
    both, errors = (threading.Event(), threading.Event()), list[Any]()

    def fail(value: Any) -> None:
        raise ArithmeticError

    async def use(threads: CallThreads) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context["exception"]))
        with pytest.raises(CallFailed):
            await call(threads, lambda: both[0].wait(LONG), 0.05, on_late=fail)
        other = asyncio.ensure_future(call(threads, lambda: both[1].wait(LONG)))
        await asyncio.sleep(0)
        for number, event in enumerate(both, 1):
            event.set()
            block_until_returned(threads, number)
        assert await other
        assert [type(error) for error in errors] == [ArithmeticError]

    run(use)


def test_a_thread_that_cannot_start_fails_the_call_and_no_other(monkeypatch):
    async def use(threads: CallThreads) -> None:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no room")))
            with pytest.raises(NoThread, match="no room"):
                await call(threads, lambda: 1)
            late: list[Any] = []
            cancelled = asyncio.ensure_future(call(threads, lambda: 1, on_late=late.append))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert late == [], "there is no value"
        assert threads.count == 0 and await call(threads, lambda: 2) == 2

    run(use)
