"""The count of slots is exact under every schedule of taking, giving back and cancelling."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from roll.agentic.pool import Slots


def test_slots_are_given_first_come_first_served():
    async def main() -> list[int]:
        slots, order = Slots(2), []

        async def use(number: int) -> None:
            await slots.acquire()
            order.append(number)
            await asyncio.sleep(0)
            slots.release()

        await asyncio.gather(*(use(number) for number in range(8)))
        assert (slots.taken, slots.waiting) == (0, 0)
        return order

    assert asyncio.run(main()) == list(range(8))


def test_a_cancelled_wait_has_no_turn():
    async def main() -> None:
        slots = Slots(1)
        await slots.acquire()
        first, second = (asyncio.create_task(slots.acquire()) for _ in range(2))
        await asyncio.sleep(0)
        assert slots.waiting == 2
        first.cancel()
        slots.release()
        await second
        assert (slots.taken, slots.waiting) == (1, 0)

    asyncio.run(main())


def test_a_slot_that_comes_with_the_cancellation_goes_to_the_next():
    async def main() -> None:
        slots = Slots(1)
        await slots.acquire()
        first, second = (asyncio.create_task(slots.acquire()) for _ in range(2))
        await asyncio.sleep(0)
        slots.release()
        first.cancel()
        await second
        assert first.cancelled() and slots.taken == 1

    asyncio.run(main())


@given(
    count=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["take", "give", "cancel", "turn"]), st.integers(0, 9)), max_size=60),
)
def test_no_schedule_loses_or_invents_a_slot(count, steps):
    async def main() -> None:
        slots = Slots(count)
        holding: set[int] = set()
        tasks: dict[int, asyncio.Task[None]] = {}

        async def take(number: int) -> None:
            await slots.acquire()
            holding.add(number)

        for number, (what, which) in enumerate(steps):
            waiting = [task for key, task in tasks.items() if not task.done()]
            if what == "take":
                tasks[number] = asyncio.create_task(take(number))
            elif what == "give" and holding:
                holding.remove(sorted(holding)[which % len(holding)])
                slots.release()
            elif what == "cancel" and waiting:
                waiting[which % len(waiting)].cancel()
            elif what == "turn":
                await asyncio.sleep(0)
            assert slots.taken <= count
        for _ in range(3):
            await asyncio.sleep(0)
        assert slots.taken == len(holding)
        assert slots.waiting == sum(not task.done() for task in tasks.values())
        assert slots.waiting == 0 or slots.taken == count
        while holding or slots.waiting:
            holding.pop()
            slots.release()
            for _ in range(3):
                await asyncio.sleep(0)
        assert (slots.taken, slots.waiting) == (0, 0)

    asyncio.run(main())
