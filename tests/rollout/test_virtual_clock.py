"""Time jumps to the next timer, in order, and a deadlock is an error that names who waits."""

import asyncio
import math
import socket
import time
from collections.abc import Coroutine

import pytest

from roll.rollout.clock import LONGEST_RUN_SECONDS, Deadlock, VirtualTimeLoop, run_virtual


def test_an_hour_of_sleep_takes_no_real_time():
    async def main():
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    started = time.perf_counter()
    assert run_virtual(main()) == pytest.approx(3600)
    assert time.perf_counter() - started < 60


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


def test_what_has_arrived_is_read_before_time_jumps_to_a_timer():
    async def main():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop, arrived = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(ours, arrived.set)
            theirs.send(b"x")
            async with asyncio.timeout(100):
                await arrived.wait()
            loop.remove_reader(ours)
            return loop.time()

    assert run_virtual(main()) == 0


def test_time_that_is_skipped_by_hand_makes_timers_due():
    async def main():
        loop = asyncio.get_running_loop()
        sleeping = asyncio.create_task(asyncio.sleep(10))
        await asyncio.sleep(0)
        loop.advance(30)
        await sleeping
        return loop.time()

    assert run_virtual(main()) == 30


def test_no_timer_is_missed_as_long_as_a_run_may_take():
    """What asyncio takes for the clock's resolution must change a time."""
    resolution = time.get_clock_info("monotonic").resolution
    assert math.ulp(math.nextafter(LONGEST_RUN_SECONDS, 0)) < resolution


class Foreign(Coroutine):
    """A coroutine that some compiler made: it can be run, and says nothing of where it is."""

    def __init__(self, coroutine):
        self.send, self.throw, self.close = coroutine.send, coroutine.throw, coroutine.close

    send = throw = close = None

    def __await__(self):
        return self


def test_a_deadlock_is_told_of_tasks_whose_place_nobody_knows():
    async def wait_for_nothing():
        await asyncio.Event().wait()

    async def main():
        await asyncio.create_task(Foreign(wait_for_nothing()), name="foreign")

    with pytest.raises(Deadlock, match="foreign: waits outside of a coroutine"):
        run_virtual(main())
