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


def test_calls_never_wait_for_each_other():
    meeting = threading.Barrier(60)

    async def use(threads: CallThreads) -> int:
        for _ in range(2):  # with threads that are started, and with those that are there
            await asyncio.gather(*(call(threads, lambda: meeting.wait(LONG)) for _ in range(60)))
        return threads.count

    assert run(use) == 60


def test_short_calls_share_threads():
    async def use(threads: CallThreads) -> None:
        values = await asyncio.gather(*(call(threads, lambda number=number: number) for number in range(400)))
        assert values == list(range(400))
        assert threads.count < 200

    run(use)


def test_a_call_begins_while_all_others_compute():
    came = threading.Event()

    def compute() -> bool:
        end = time.perf_counter() + LONG
        while not came.is_set() and time.perf_counter() < end:
            pass
        return came.is_set()

    async def use(threads: CallThreads) -> None:
        computing = [asyncio.ensure_future(call(threads, compute, None)) for _ in range(30)]
        await call(threads, came.set, None)
        assert all(await asyncio.gather(*computing))

    run(use)


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_a_value_that_comes_with_the_cancellation_is_told_once(cancelled_first):
    late: list[Any] = []

    async def use(threads: CallThreads) -> None:
        task = asyncio.ensure_future(call(threads, lambda: "value", on_late=late.append))
        await asyncio.sleep(0)
        while not threads._returned:  # the event loop has not looked at it
            time.sleep(0.001)
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
        while threads.stuck:
            await asyncio.sleep(0.01)
        assert late == ["value", "value"]

    run(use)


def test_a_thread_that_cannot_start_fails_the_call_and_no_other(monkeypatch):
    async def use(threads: CallThreads) -> None:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no room")))
            with pytest.raises(NoThread, match="no room"):
                await call(threads, lambda: 1)
        assert threads.count == 0 and await call(threads, lambda: 2) == 2

    run(use)
