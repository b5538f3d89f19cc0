"""Time jumps to the next timer, in order, and a deadlock is an error that names who waits."""

import asyncio
import time

import pytest

from roll.rollout.clock import Deadlock, VirtualTimeLoop, run_virtual


def test_an_hour_of_sleep_takes_no_real_time():
    async def main():
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    started = time.perf_counter()
    assert run_virtual(main()) == pytest.approx(3600)
    assert time.perf_counter() - started < 5


def test_timers_fire_in_order_of_virtual_time():
    async def main():
        seen = []

        async def wait(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, asyncio.get_running_loop().time()))

        await asyncio.gather(wait(3), wait(1), wait(100_000), wait(2))
        return seen

    assert run_virtual(main()) == [(1, 1), (2, 2), (3, 3), (100_000, 100_000)]


def test_timeouts_work_in_virtual_time():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(50)


def test_timers_are_met_for_months():
    async def main():
        await asyncio.sleep(8e6)
        for _ in range(1000):
            await asyncio.sleep(0.1)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(8e6 + 100, abs=0.01)


def test_a_simulation_that_never_ends_is_an_error():
    async def main():
        while True:
            await asyncio.sleep(3600)

    with pytest.raises(OverflowError, match="virtual time passed"):
        run_virtual(main())


def test_a_deadlock_names_the_pending_tasks():
    async def wait_for_nothing():
        await asyncio.Event().wait()

    async def outer():
        await wait_for_nothing()

    async def main():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(outer(), name="the-stuck-one")

    with pytest.raises(Deadlock, match="the-stuck-one: waits in Event.wait"):
        run_virtual(main())


def test_a_call_from_a_thread_wakes_a_loop_that_still_has_something_to_do():
    async def main():
        loop = asyncio.get_running_loop()
        called = asyncio.Event()
        loop.call_soon_threadsafe(called.set)
        await called.wait()
        return isinstance(loop, VirtualTimeLoop)

    assert run_virtual(main())
