"""Simulated replicas against arithmetic: what a set of requests takes, with caches that grow and room that ends."""

from __future__ import annotations

import asyncio
import math

import pytest

from roll.rollout.clock import run_virtual
from roll.simulation.costs import EngineCosts
from roll.simulation.engines import Host, Replica, Request


def costs(running=8, step=1.0, request=0.0, cached=0.0, prefill=0.0, room=math.inf):
    times = [step + request * number for number in range(running + 1)]
    return EngineCosts(times, cached, prefill, running, room, 1.0)


def run(engine, lengths, cores=math.inf, context=0.0, during=None, alike=False):
    """Return the times at which requests end, and the replica."""

    async def main():
        loop = asyncio.get_running_loop()
        replica = Replica("engine", engine, Host(cores, loop))
        ends = {}
        ended = asyncio.Event()

        def end(request):
            ends[request.number] = loop.time()
            if len(ends) == len(lengths):
                ended.set()

        for number, tokens in enumerate(lengths):
            request = Numbered(tokens, context, context, 0 if alike else number)
            request.number, request.ended = number, end
            replica.submit(request)
        if during is not None:
            await during(replica)
        await ended.wait()
        return [ends[number] for number in range(len(lengths))], replica

    return run_virtual(main())


class Numbered(Request):
    """A request with a number."""


def test_requests_share_steps_and_a_step_takes_longer_with_more_of_them():
    ends, replica = run(costs(request=0.5), [10, 20, 20])
    assert ends == pytest.approx([10 * 2.5, 25 + 10 * 2, 25 + 10 * 2])
    assert replica.generated == pytest.approx(50) and replica.busy_seconds == pytest.approx(45)


def test_a_replica_is_busy_while_it_computes_and_not_while_it_is_paused():
    found = []

    async def during(replica):
        for change in (replica.pause, replica.resume, lambda: None):
            await asyncio.sleep(4)
            found.append(replica.busy_seconds)
            change()

    run(costs(), [10], during=during)
    assert found == pytest.approx([4, 4, 8])


def test_a_growing_cache_slows_steps_as_their_sum_says():
    ends, _ = run(costs(cached=0.01), [100, 100], context=30)
    steps = sum(1 + 0.01 * (60 + 2 * number) for number in range(100))
    assert ends == pytest.approx([steps] * 2, rel=0.01)


def test_requests_beyond_the_most_that_run_wait_for_a_place():
    ends, _ = run(costs(running=2), [5, 7, 4])
    assert ends == pytest.approx([5, 7, 9])


def test_a_prompt_is_computed_once_for_those_that_share_it():
    apart, _ = run(costs(prefill=0.1), [5, 5, 5], context=20)
    shared, _ = run(costs(prefill=0.1), [5, 5, 5], context=20, alike=True)
    assert apart == pytest.approx([6 + 5] * 3) and shared == pytest.approx([2 + 5] * 3)


def test_without_room_the_last_request_computes_its_cache_again():
    ends, replica = run(costs(prefill=0.1, room=100), [60, 60], context=10)
    # Both have 50 tokens cached after 40 steps; the first goes on alone, then the second computes 50 again.
    assert ends[0] == pytest.approx(2 + 60, abs=0.01)
    assert ends[1] == pytest.approx(2 + 60 + 5 + 20, abs=0.01)
    assert replica.recomputed == pytest.approx(50, abs=0.01)


def test_tokens_keep_the_version_that_sampled_them():
    spans = []

    async def during(replica):
        spans.append(replica)
        await asyncio.sleep(4)
        replica.pause()
        await asyncio.sleep(3)
        replica.set_version(5)
        replica.resume()

    async def main():
        loop = asyncio.get_running_loop()
        replica = Replica("engine", costs(), Host(math.inf, loop))
        done = loop.create_future()
        request = Request(10, 0, 0, 0)
        request.ended = done.set_result
        replica.submit(request)
        await during(replica)
        await done
        return request.spans, loop.time()

    found, end = run_virtual(main())
    assert end == pytest.approx(13)
    assert [version for version, _ in found] == [0, 5] and [each for _, each in found] == pytest.approx([4, 6])


def test_who_shares_a_core_takes_twice_as_long_until_the_other_has_ended():
    async def main():
        loop = asyncio.get_running_loop()
        host = Host(1, loop)
        ends = []

        async def work(seconds):
            await host.work(seconds, 1)
            ends.append(loop.time())

        await asyncio.gather(work(2), work(5))
        return ends

    assert run_virtual(main()) == pytest.approx([4, 7])


@pytest.mark.parametrize(("threads", "seconds"), [(1, 1.0), (2, 1.1), (3, 1.2), (6, 2.4)])
def test_cores_slow_each_other_down_before_threads_share_them(threads, seconds):
    async def taken():
        loop = asyncio.get_running_loop()
        host, began = Host(3, loop, slowdown=0.2), loop.time()
        await asyncio.gather(*(host.work(1.0, 1) for _ in range(threads)))
        return loop.time() - began

    assert run_virtual(taken()) == pytest.approx(seconds)
