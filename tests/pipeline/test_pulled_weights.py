"""Replicas that take new weights when they choose to: the real stages, scheduler and pool, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from test_publication_schedule import Run

from roll.rollout.clock import run_virtual
from tests.runtime.local_engines import LOAD_SECONDS, START_SECONDS, LocalPool, request


def versions(local) -> list[int]:
    return [handle.engine.version for handle in local.handles]


@pytest.mark.parametrize("after", [0.0, 10.0])
def test_a_replica_pulls_between_requests_or_after_the_time_and_groups_follow_the_oldest(monkeypatch, after):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, pull_after_seconds=after) as local, asyncio.timeout(500):
            told: list[int] = []
            local.pool.on_oldest = told.append
            busy = asyncio.create_task(local.pool.generate(request("busy", 50)))
            await asyncio.sleep(1)
            loaded = await local.publish(1)
            assert loaded.seconds["load"] == 0 and versions(local) == [0, 0], "nobody waits for the replicas"
            await asyncio.sleep(LOAD_SECONDS + 0.1)
            first = 1 if after == 0 and local.handles[0].engine.version == 1 else 0
            assert versions(local) == [first, 1]  # one at a time: the share of `max_unavailable`
            assert told == ([1] if first else [])
            # A second version does not begin the time anew.
            await asyncio.sleep(3)
            await local.publish(2)
            await asyncio.sleep(after + 3 * LOAD_SECONDS)
            assert versions(local) == [2, 2] and told[-1] == 2 and told == sorted(set(told))
            assert len(set((await busy).versions.tolist())) >= 2
            assert (await local.publish(3)).seconds["load"] > 0, "what was pulled is told at the next publication"

    run_virtual(scenario())


def test_an_outdated_replica_holds_its_memory_for_the_configured_time_only(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, pull_after_seconds=20.0) as local, asyncio.timeout(500):
            running = [asyncio.create_task(local.pool.generate(request(f"r{index}", 60))) for index in range(2)]
            await asyncio.sleep(1)
            await local.publish(1)
            clock = asyncio.get_running_loop().time
            began = clock()
            await local.pool.buffers.acquire(2)
            assert 20 <= clock() - began <= 20 + 2 * LOAD_SECONDS + 0.1
            await asyncio.gather(*running)

    run_virtual(scenario())


def test_a_replica_that_is_behind_and_dies_comes_back_with_the_newest_version(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, pull_after_seconds=100.0) as local, asyncio.timeout(500):
            told: list[int] = []
            local.pool.on_oldest = told.append
            busy = asyncio.create_task(local.pool.generate(request("busy", 40)))
            await asyncio.sleep(1)
            await local.publish(1)
            await asyncio.sleep(5)
            assert versions(local) == [0, 1] and not told
            local.handles[0].kill()
            assert (await busy).finish_reason == "length"
            assert local.pool._replicas["actor_infer/0"].version == 1 and told == [1]

    run_virtual(scenario())


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_a_run_that_pulls_keeps_the_bound_and_no_publication_waits_for_an_engine(tmp_path, monkeypatch, ratio):
    run = Run(tmp_path, monkeypatch, max_steps=8, async_generation_ratio=ratio, rollout_batch_size=3)
    local = run.local
    run.local = lambda: local(replicas=3, in_place=False, pull_after_seconds=5.0)
    done = run.run()
    seconds = [done.recorder.steps[step]["time/param_update"] for step in range(1, 9)]
    assert max(seconds) == 0
    for step, trained in enumerate(done.trainer.trained_on):
        assert min(trained) >= step - ratio
    assert done.scheduler.ledger.consumed == 24
    if ratio == 0:
        assert done.trainer.trained_on == [{step} for step in range(8)]


def test_groups_do_not_wait_for_the_successor_of_a_dead_replica_that_was_behind(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, pull_after_seconds=1000.0) as local, asyncio.timeout(5000):
            clock, told = asyncio.get_running_loop().time, {}
            local.pool.on_oldest = lambda version: told.setdefault(version, clock())
            busy = asyncio.create_task(local.pool.generate(request("busy", 60)))
            await asyncio.sleep(1)
            await local.publish(1)
            await asyncio.sleep(5)
            assert 1 not in told
            killed = clock()
            local.handles[0].kill()
            await busy
            assert told[1] - killed < START_SECONDS

    run_virtual(scenario())
