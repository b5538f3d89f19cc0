import asyncio
from types import SimpleNamespace

import pytest

from roll.pipeline.stage import Channel, ChannelClosed
from roll.rollout.clock import run_virtual


def test_a_full_channel_makes_the_producer_wait_until_something_is_taken():
    async def scenario():
        channel = Channel("c")
        await channel.put(1)
        second = asyncio.create_task(channel.put(2))
        await asyncio.sleep(1)
        assert not second.done()
        assert await anext(channel) == 1
        await second
        assert await anext(channel) == 2

    run_virtual(scenario())


def test_items_put_before_close_are_still_delivered_and_then_the_iteration_ends():
    async def scenario():
        channel = Channel("c")
        await channel.put("last")
        await channel.close()
        assert await anext(channel) == "last"
        assert [item async for item in channel] == []
        with pytest.raises(ChannelClosed):
            await channel.put("too late")

    run_virtual(scenario())


def test_none_is_an_item_like_any_other():
    async def scenario():
        channel = Channel("c")
        await channel.put(None)
        assert await anext(channel) is None

    run_virtual(scenario())


def test_a_cancelled_put_leaves_nothing_behind():
    async def scenario():
        channel = Channel("c")
        await channel.put(1)
        blocked = asyncio.create_task(channel.put(2))
        await asyncio.sleep(1)
        blocked.cancel()
        await asyncio.wait([blocked])
        assert await anext(channel) == 1
        assert len(channel) == 0

    run_virtual(scenario())


def part(name, complete=False):
    return SimpleNamespace(name=name, complete=complete)


def test_the_parts_of_one_item_have_room_and_the_next_item_has_to_wait():
    async def scenario():
        channel = Channel("c", 3)
        for each in (part("a1"), part("a2"), part("a3", complete=True)):
            await channel.put(each)
        following = asyncio.create_task(channel.put(part("b1")))
        await asyncio.sleep(1)
        assert not following.done() and len(channel) == 3
        assert [(await anext(channel)).name for _ in range(3)] == ["a1", "a2", "a3"]
        await following

    run_virtual(scenario())


def test_more_parts_than_its_capacity_have_to_wait():
    async def scenario():
        channel = Channel("c", 2)
        await channel.put(part("a1"))
        await channel.put(part("a2"))
        third = asyncio.create_task(channel.put(part("a3")))
        await asyncio.sleep(1)
        assert not third.done()
        third.cancel()

    run_virtual(scenario())
