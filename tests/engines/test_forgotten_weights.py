"""Replicas whose trainer goes back to an earlier step: they take no request before they have its weights, whatever they
held before under the same version, and whatever they were doing.
"""

import asyncio

import pytest

from roll.rollout.clock import run_virtual
from tests.runtime.local_engines import LOAD_SECONDS, START_SECONDS, LocalPool, publication, request


async def cancel(task):
    task.cancel()
    await asyncio.wait([task])


def loads(local):
    return [handle.calls["load_weights"] for handle in local.handles]


@pytest.mark.parametrize("published", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"dual_buffer": False, "in_place": False}, {"pull_after_seconds": 5.0}])
def test_a_version_that_replicas_had_is_loaded_again_and_serves_from_then_on(monkeypatch, published, settings):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, **settings) as local, asyncio.timeout(500):
            oldest = []
            local.pool.on_oldest = oldest.append
            for version in range(1, published + 1):
                await local.publish(version)
                await asyncio.sleep(20)
            before, buffers = loads(local), local.pool.buffers
            await local.pool.forget_weights()
            assert local.pool.buffers is not buffers and not local.pool.buffers.holders()
            waiting = asyncio.create_task(local.pool.generate(request(), min_version=0))
            await asyncio.sleep(20)
            assert not waiting.done() and not any(handle.engine.running for handle in local.handles)
            await local.publish(1)
            assert (await waiting).versions.tolist() == [1] * 4
            assert loads(local) == [count + 1 for count in before]
            await local.publish(2)
            await asyncio.sleep(20)
            assert [handle.engine.version for handle in local.handles] == [2, 2]
            assert len(local.handles) == 2 and local.pool.restarts == 0
            if "pull_after_seconds" in settings:
                assert oldest[-1] == 2

    run_virtual(scenario())


@pytest.mark.parametrize("after", [0.25, LOAD_SECONDS / 2, LOAD_SECONDS - 0.25, LOAD_SECONDS + 0.25])
def test_a_load_that_is_under_way_ends_before_the_next_one_begins(monkeypatch, after):
    """The caller was cancelled; the engine does not know."""

    async def scenario():
        async with LocalPool(monkeypatch, replicas=2) as local, asyncio.timeout(500):
            publishing = asyncio.create_task(local.publish(1))
            await asyncio.sleep(after)
            await cancel(publishing)
            await local.pool.forget_weights()
            await local.publish(0)
            assert (await local.pool.generate(request())).versions.tolist() == [0] * 4
            assert [handle.engine.version for handle in local.handles] == [0, 0]

    run_virtual(scenario())


@pytest.mark.parametrize("after", [0.5, START_SECONDS - 0.5, START_SECONDS + LOAD_SECONDS / 2])
def test_a_replica_that_is_being_replaced_meanwhile_gets_the_new_weights_only(monkeypatch, after):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2) as local, asyncio.timeout(500):
            await local.publish(1)
            local.handles[1].kill()
            await asyncio.sleep(after)
            await local.pool.forget_weights()
            await asyncio.sleep(20)
            assert not local.pool._router.state("actor_infer/1").live
            await local.publish(1)
            requests = [local.pool.generate(request(f"r{index}")) for index in range(4)]
            assert {tuple(each.versions.tolist()) for each in await asyncio.gather(*requests)} == {(1,) * 4}
            assert local.pool.restarts == 1

    run_virtual(scenario())


def test_replicas_that_kept_a_version_for_a_validation_are_free_again(monkeypatch):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, pinned_replicas=1) as local, asyncio.timeout(500):
            await local.publish(1)
            local.pool.pin()
            await local.publish(2)
            await local.pool.forget_weights()
            await local.publish(1)
            requests = [local.pool.generate(request(f"r{index}")) for index in range(4)]
            await asyncio.gather(*requests)
            assert all(handle.engine.seen for handle in local.handles)
            local.pool.pin()

    run_virtual(scenario())


@pytest.mark.parametrize("after", [0.0, 0.25, LOAD_SECONDS])
@pytest.mark.parametrize("discards", [False, True])
def test_a_pool_that_falls_asleep_or_wakes_meanwhile_serves_in_the_end(monkeypatch, after, discards):
    async def scenario():
        async with LocalPool(monkeypatch, replicas=2, discards=discards) as local, asyncio.timeout(500):
            await local.publish(1)
            await local.pool.buffers.acquire(2)  # so that weights may be discarded
            moving = asyncio.create_task(local.pool.offload_states())
            await asyncio.sleep(after)
            await cancel(moving)
            await local.pool.forget_weights()
            await local.pool.offload_states()
            await local.pool.buffers.acquire(1)
            again = publication(1)
            local.pool.announce(again)
            await local.pool.load_states()
            await local.pool.publish(again)
            assert (await local.pool.generate(request())).versions.tolist() == [1] * 4

    run_virtual(scenario())
