"""Slots hold one process at a time, whoever asks, fails, loses or is cancelled; tasks end together."""

from __future__ import annotations

import asyncio

import pytest

from roll.rollout.clock import run_virtual
from roll.runtime.pool import Slot, Tasks, all_or_none, ignore_failure

START_SECONDS = 5.0


class Process:
    """A process that takes a second to be gone after its end."""

    def __init__(self, alive: list[Process]) -> None:
        assert not alive, "the one before is gone"
        self.alive = alive
        alive.append(self)

    def kill(self) -> None:
        if self in self.alive:
            self.alive.remove(self)

    async def end(self) -> None:
        await asyncio.sleep(1.0)
        self.kill()


def slot_with(failures: int = 0) -> tuple[Slot[Process], list[Process]]:
    """A slot whose first starts fail, and its living processes."""
    alive: list[Process] = []
    left = [failures]

    async def start(process: Process) -> None:
        await asyncio.sleep(START_SECONDS)
        if left[0]:
            left[0] -= 1
            raise OSError("no licence")

    return Slot(lambda: Process(alive), start), alive


def test_a_process_starts_once_for_all_who_ask_and_its_successor_when_it_is_gone():
    async def use():
        slot, alive = slot_with()
        first, same = await asyncio.gather(slot.filled(), slot.filled())
        assert first is same and alive == [first]
        assert await asyncio.gather(slot.lose(first), slot.lose(first)) == [True, False]
        second = await slot.filled()
        assert not await slot.lose(first) and alive == [second] != [first]
        await slot.close()
        await slot.close()
        assert alive == [] and slot.process is None

    run_virtual(use())


def test_a_start_that_fails_or_is_cancelled_leaves_nothing_and_the_next_one_starts_anew():
    async def use():
        slot, alive = slot_with(failures=1)
        with pytest.raises(OSError, match="no licence"):
            await slot.filled()
        assert alive == [] and slot.process is None
        starting = asyncio.create_task(slot.filled())
        await asyncio.sleep(START_SECONDS / 2)
        assert alive == [slot.process], "whoever looks sees the process that starts"
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled() and alive == [] and slot.process is None
        assert alive == [] and await slot.filled() in alive

    run_virtual(use())


def test_tasks_end_together_and_tell_of_their_failures():
    async def use():
        failures: list[BaseException] = []
        tasks = Tasks(failures.append)
        failed = tasks.start(failing_in(1.0))
        for seconds in (2.0, 3.0):
            tasks.start(asyncio.sleep(seconds))
        await asyncio.sleep(1.5)
        assert len(tasks) == 2 and failures == [failed.exception()]
        await tasks.wait()
        assert asyncio.get_running_loop().time() == pytest.approx(3.0, abs=0.1)
        tasks.start(asyncio.sleep(100.0))
        await tasks.cancel()
        await tasks.cancel()
        assert len(tasks) == 0 and len(failures) == 1
        assert asyncio.get_running_loop().time() < 4.0

    run_virtual(use())


def test_a_task_that_starts_during_the_cancellation_is_cancelled_too():
    async def use():
        tasks = Tasks()

        async def cleaning_up_with_another() -> None:
            try:
                await asyncio.sleep(100.0)
            finally:
                tasks.start(asyncio.sleep(100.0))

        tasks.start(cleaning_up_with_another())
        await asyncio.sleep(0.1)
        await tasks.cancel()
        assert len(tasks) == 0 and asyncio.get_running_loop().time() < 1.0

    run_virtual(use())


def test_the_failure_of_a_task_is_logged_unless_its_caller_sees_it(caplog):
    async def use():
        for tasks in (Tasks(), Tasks(on_failure=ignore_failure)):
            tasks.start(failing_in(1.0))
            await tasks.wait()
        await asyncio.sleep(0)

    run_virtual(use())
    (record,) = caplog.records
    assert "after 1 s" in str(record.exc_info[1])


async def failing_in(seconds: float) -> None:
    await asyncio.sleep(seconds)
    raise OSError(f"after {seconds:g} s")


def test_the_first_failure_ends_the_others_before_it_is_raised():
    async def use():
        ended = []

        async def slow() -> None:
            try:
                await asyncio.sleep(100.0)
            finally:
                await asyncio.sleep(1.0)
                ended.append("slow")

        with pytest.raises(OSError, match="after 1 s"):
            await all_or_none([slow(), failing_in(1.0)])
        assert ended == ["slow"]
        assert await all_or_none(asyncio.sleep(0, number) for number in range(3)) == [0, 1, 2]

    run_virtual(use())
