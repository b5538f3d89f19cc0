"""Old objects are looked through rarely: never by chance, and less often the longer it takes."""

import asyncio
import gc
import weakref
from collections import deque

from roll.rollout.clock import run_virtual
from roll.runtime.process import LARGEST_SHARE, SHORTEST_WAIT_SECONDS, collect_rarely


class Cycle:
    def __init__(self):
        self.itself = self


class Thing:
    pass


def full_collections():
    return gc.get_stats()[2]["collections"]


def test_old_objects_are_looked_through_at_times_and_never_in_between():
    async def scenario():
        ticks = iter([0.0, 0.0, 10.0, 12.0])
        task = asyncio.create_task(collect_rarely(lambda: next(ticks)))
        await asyncio.sleep(1)
        cycle = Cycle()
        gc.collect(1)  # now it is old
        gone, before = weakref.ref(cycle), full_collections()
        del cycle
        kept = [[number] for number in range(200_000)]  # enough for several collections by the usual thresholds
        assert full_collections() == before and gone() is not None
        await asyncio.sleep(SHORTEST_WAIT_SECONDS)
        assert full_collections() == before + 1 and gone() is None
        await asyncio.sleep(SHORTEST_WAIT_SECONDS)
        assert full_collections() == before + 2
        await asyncio.sleep(2 / LARGEST_SHARE - SHORTEST_WAIT_SECONDS)
        assert full_collections() == before + 2, "that one took two seconds"
        task.cancel()
        await asyncio.wait([task])
        return len(kept)

    usual = gc.get_threshold()
    run_virtual(scenario())
    assert gc.get_threshold() == usual


def test_young_objects_are_looked_through_before_they_are_many():
    """As many objects end as begin, in waves of 150."""

    def young_collections():
        return gc.get_stats()[0]["collections"]

    async def scenario():
        task = asyncio.create_task(collect_rarely())
        await asyncio.sleep(1)
        held, before = deque(Thing() for _ in range(1000)), young_collections()
        for _ in range(50):
            held.extend([Thing() for _ in range(150)])
            for _ in range(150):
                held.popleft()
        made = young_collections() - before
        task.cancel()
        await asyncio.wait([task])
        return made

    assert run_virtual(scenario()) >= 25, "one in each wave, or nearly; with the usual threshold there is none"


def test_what_an_earlier_run_left_behind_is_collected_by_the_next_one_of_the_process():
    """And that costs next to nothing: imports are not looked through again."""

    async def run():
        task = asyncio.create_task(collect_rarely())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])

    run_virtual(run())
    frozen = gc.get_freeze_count()
    cycle = Cycle()
    gone = weakref.ref(cycle)
    gc.collect(1)
    del cycle
    run_virtual(run())
    assert gone() is None and frozen > 10_000 and gc.get_freeze_count() - frozen < frozen / 10
