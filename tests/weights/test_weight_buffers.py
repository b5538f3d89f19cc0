"""Who holds which version: a buffer that somebody needs is never given out, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rollout.clock import run_virtual
from roll.weights.buffers import WeightBuffers
from tests.tiers import examples


def buffers_with(count: int = 2, spare: int = 0):
    buffers, freed = WeightBuffers(count, spare), []
    buffers.on_free = freed.append
    return buffers, freed


async def publish(buffers: WeightBuffers, version: int, replicas=(), in_place: bool = True) -> None:
    """The whole life of a publication."""
    await buffers.acquire(version)
    buffers.publishing(version)
    for replica in replicas:
        buffers.hold(version, replica)
        buffers.keep_only(replica, version if in_place else None)
    buffers.published(version)


async def waits(task: asyncio.Task) -> bool:
    await asyncio.sleep(1)
    return not task.done()


def test_versions_take_turns_and_the_older_one_is_freed_when_the_last_replica_has_left_it():
    async def scenario():
        buffers, freed = buffers_with()
        await publish(buffers, 0, ["a", "b"])
        assert await buffers.acquire(1) == 1
        buffers.publishing(1)
        buffers.hold(1, "a")
        buffers.keep_only("a", 1)
        third = asyncio.create_task(buffers.acquire(2))
        assert await waits(third) and not freed
        buffers.hold(1, "b")
        assert await waits(third)  # it loads 1 and still computes with 0
        buffers.keep_only("b", 1)
        assert await third == 0
        assert freed == [0]
        assert not buffers.has(0) and buffers.has(1) and buffers.has(2)
        assert buffers.holders().keys() == {1, 2}

    run_virtual(scenario())


def test_a_publication_under_way_keeps_its_half_whoever_has_loaded_it():
    async def scenario():
        buffers, _ = buffers_with()
        await publish(buffers, 0, ["a"], in_place=False)
        await buffers.acquire(1)
        second = asyncio.create_task(buffers.acquire(2))
        assert await waits(second)  # 0 is what a restarting replica would load, 1 is under way
        buffers.publishing(1)
        assert await second == 0
        third = asyncio.create_task(buffers.acquire(3))
        assert await waits(third)  # two publications are outstanding
        buffers.published(1)
        assert await waits(third)  # 1 is the newest one that is complete
        buffers.publishing(2)
        assert await third == 1

    run_virtual(scenario())


def test_a_replica_that_dies_while_loading_lets_both_versions_go():
    async def scenario():
        buffers, freed = buffers_with()
        await publish(buffers, 0, ["a"])
        await buffers.acquire(1)
        buffers.publishing(1)
        buffers.hold(1, "a")
        buffers.keep_only("a", None)
        assert freed == [0]
        buffers.published(1)
        assert buffers.has(1)  # its successor will load it
        await publish(buffers, 2)
        assert freed == [0, 1]

    run_virtual(scenario())


def test_a_successor_that_loads_holds_the_newest_version_beyond_the_next_publication():
    async def scenario():
        buffers, freed = buffers_with()
        await publish(buffers, 0)
        buffers.hold(0, "successor")
        await publish(buffers, 1, ["b"])
        waiting = asyncio.create_task(buffers.acquire(2))
        assert await waits(waiting) and not freed
        buffers.keep_only("successor", 0)
        assert await waits(waiting)
        buffers.hold(1, "successor")
        buffers.keep_only("successor", 1)
        assert await waiting == 0

    run_virtual(scenario())


def test_a_single_half_is_there_for_restarts_until_it_is_given_out_again():
    async def scenario():
        buffers, freed = buffers_with(count=1)
        await publish(buffers, 0, ["a"], in_place=False)
        assert buffers.has(0) and not freed
        buffers.hold(0, "restarted")
        waiting = asyncio.create_task(buffers.acquire(1))
        assert await waits(waiting)
        buffers.keep_only("restarted", None)
        assert await waiting == 0
        assert freed == [0] and not buffers.has(0)
        with pytest.raises(KeyError, match="no buffer has version 0"):
            buffers.hold(0, "late")

    run_virtual(scenario())


@pytest.mark.parametrize("count", [1, 2])
def test_a_version_that_is_kept_delays_no_later_one(count):
    async def scenario():
        buffers, _ = buffers_with(count, spare=1)
        replica = ["a"] if count == 2 else []
        await publish(buffers, 0, ["a", "keeper"], in_place=count == 2)
        buffers.hold(0, "keeper")
        for version in range(1, 6):
            async with asyncio.timeout(1):
                await publish(buffers, version, ["a"], in_place=count == 2)
            assert buffers.has(0) and buffers.has(version)
        buffers.release(0, "keeper")
        await publish(buffers, 6, replica)
        assert buffers.has(6) and (count == 2 or buffers.has(5)), "the oldest version is written over"

    run_virtual(scenario())


def test_asking_again_for_a_version_gives_the_same_half_and_no_second_one():
    async def scenario():
        buffers, _ = buffers_with()
        assert await buffers.acquire(0) == await buffers.acquire(0)
        assert await buffers.acquire(1) != buffers.buffer_of(0)

    run_virtual(scenario())


@pytest.mark.parametrize("granted", [False, True])
def test_a_cancelled_wait_leaves_nothing_behind(granted):
    async def scenario():
        buffers, freed = buffers_with(count=1)
        await buffers.acquire(0)
        waiting = asyncio.create_task(buffers.acquire(1))
        await asyncio.sleep(1)
        if granted:
            buffers.published(0)  # the buffer is given out, but the waiter has not run yet
        waiting.cancel()
        await asyncio.wait([waiting])
        buffers.published(0)
        async with asyncio.timeout(10):
            await buffers.acquire(2)
        assert 1 not in freed or granted

    run_virtual(scenario())


def test_those_who_wait_are_served_in_order():
    async def scenario():
        buffers, _ = buffers_with(count=1)
        await buffers.acquire(0)
        served = []

        async def take(version):
            await buffers.acquire(version)
            served.append(version)
            await asyncio.sleep(1)
            buffers.published(version)

        tasks = [asyncio.create_task(take(version)) for version in (1, 2, 3)]
        await asyncio.sleep(1)
        buffers.published(0)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert served == [1, 2, 3]

    run_virtual(scenario())


@settings(max_examples=examples(200))
@given(
    count=st.integers(1, 2),
    in_place=st.booleans(),
    kept=st.sets(st.integers(0, 7)),
    fates=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(["dies", "dies loading", "restarts", "slow"])), max_size=12
    ),
)
def test_whatever_replicas_do_no_buffer_is_written_under_them_and_every_version_gets_one(count, in_place, kept, fates):
    """A model of trainer, publisher and two replicas; ``written`` is what the buffers would hold. A third replica keeps
    some versions for a while, one at a time, and nobody waits for it."""
    in_place = in_place and count == 2

    async def scenario():
        buffers, _ = buffers_with(count, spare=1 if kept else 0)
        written: dict[int, int] = {}
        using: dict[str, int | None] = {"a": None, "b": None}
        newest: list[int] = []
        changing = {"a": asyncio.Lock(), "b": asyncio.Lock()}

        def intact(version):
            assert written[buffers.buffer_of(version)] == version

        async def load(replica, choose, dies=False):
            async with changing[replica]:
                version, held = choose(), using[replica]
                if version is None or (held is not None and held >= version and in_place):
                    return
                buffers.hold(version, replica)
                for _ in range(3):
                    intact(version)
                    if in_place and held is not None:
                        intact(held)
                    await asyncio.sleep(1)
                using[replica] = None if dies else version
                buffers.keep_only(replica, version if in_place and not dies else None)

        def for_a_restart():
            return newest[-1] if newest and buffers.has(newest[-1]) else None

        async def train():
            for version in range(8):
                buffer = await buffers.acquire(version)
                written[buffer] = version
                await to_publish.put(version)
                await asyncio.sleep(2)

        async def publisher():
            for _ in range(8):
                version = await to_publish.get()
                newest.append(version)
                buffers.publishing(version)
                for replica in ("a", "b"):
                    await load(replica, lambda: newest[-1])
                buffers.published(version)
                if version in kept and not keeping:
                    buffers.hold(version, "keeper")
                    keeping[version] = asyncio.create_task(keep(version))

        async def keep(version):
            for _ in range(40):
                intact(version)
                await asyncio.sleep(1)
            buffers.release(version, "keeper")
            del keeping[version]

        async def trouble():
            for replica, fate in fates:
                await asyncio.sleep(1.5)
                if fate == "dies":
                    async with changing[replica]:
                        using[replica] = None
                        buffers.keep_only(replica, None)
                elif fate != "slow":
                    await load(replica, for_a_restart, dies=fate == "dies loading")

        to_publish: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        keeping: dict[int, asyncio.Task] = {}
        async with asyncio.timeout(1000):
            await asyncio.gather(train(), publisher(), trouble())
            await asyncio.gather(*keeping.values())

    run_virtual(scenario())
