"""The count of places is exact under every schedule of taking, giving back and cancelling."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agentic.pool import Places
from roll.agentic.worker import EnvPoolClosed


def test_places_are_given_first_come_first_served():
    async def main() -> list[int]:
        places, order = Places(2), []

        async def use(number: int) -> None:
            await places.take()
            order.append(number)
            await asyncio.sleep(0)
            places.give_back()

        await asyncio.gather(*(use(number) for number in range(8)))
        assert (places.taken, places.waiting) == (0, 0)
        return order

    assert asyncio.run(main()) == list(range(8))


def test_a_cancelled_wait_has_no_turn():
    async def main() -> None:
        places = Places(1)
        await places.take()
        first, second = (asyncio.create_task(places.take()) for _ in range(2))
        await asyncio.sleep(0)
        assert places.waiting == 2
        first.cancel()
        places.give_back()
        await second
        assert (places.taken, places.waiting) == (1, 0)

    asyncio.run(main())


def test_a_place_that_comes_with_the_cancellation_goes_to_the_next():
    async def main() -> None:
        places = Places(1)
        await places.take()
        first, second = (asyncio.create_task(places.take()) for _ in range(2))
        await asyncio.sleep(0)
        places.give_back()
        first.cancel()
        await second
        assert first.cancelled() and places.taken == 1

    asyncio.run(main())


def test_closing_ends_all_waiting_now_and_later():
    async def main() -> None:
        places = Places(1)
        await places.take()
        waiting = [asyncio.create_task(places.take()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        places.close("no more")
        with pytest.raises(EnvPoolClosed, match="no more"):
            await waiting[1]
        await asyncio.wait(waiting)
        with pytest.raises(EnvPoolClosed, match="no more"):
            await places.take()
        places.give_back()
        assert places.taken == 0

    asyncio.run(main())


@given(
    count=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["take", "give", "cancel", "turn"]), st.integers(0, 9)), max_size=60),
)
def test_no_schedule_loses_or_invents_a_place(count, steps):
    async def main() -> None:
        places = Places(count)
        holding: set[int] = set()
        tasks: dict[int, asyncio.Task[None]] = {}

        async def take(number: int) -> None:
            await places.take()
            holding.add(number)

        for number, (what, which) in enumerate(steps):
            waiting = [task for key, task in tasks.items() if not task.done()]
            if what == "take":
                tasks[number] = asyncio.create_task(take(number))
            elif what == "give" and holding:
                holding.remove(sorted(holding)[which % len(holding)])
                places.give_back()
            elif what == "cancel" and waiting:
                waiting[which % len(waiting)].cancel()
            elif what == "turn":
                await asyncio.sleep(0)
            assert places.taken <= count
        for _ in range(3):
            await asyncio.sleep(0)
        assert places.taken == len(holding)
        assert places.waiting == sum(not task.done() for task in tasks.values())
        assert places.waiting == 0 or places.taken == count
        while holding or places.waiting:
            holding.pop()
            places.give_back()
            for _ in range(3):
                await asyncio.sleep(0)
        assert (places.taken, places.waiting) == (0, 0)

    asyncio.run(main())
