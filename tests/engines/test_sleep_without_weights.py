"""Engines that drop their weights in a sleep, because new ones follow: never a token without weights, never a load that
the next one overwrites at once, and never dropped where nothing could bring them back."""

import asyncio

import pytest

from roll.rollout.clock import run_virtual
from tests.runtime.local_engines import LOAD_SECONDS, START_SECONDS, LocalPool, publication, request


def sleeping_pool(monkeypatch, replicas=2, **settings):
    return LocalPool(monkeypatch, replicas=replicas, discards=True, **settings)


def loads(local):
    return [handle.calls["load_weights"] for handle in local.handles]


def without_weights(local):
    return [handle.engine.without_weights for handle in local.handles]


def test_an_engine_that_wakes_for_a_new_version_loads_that_one_and_no_other(monkeypatch):
    async def scenario():
        async with sleeping_pool(monkeypatch) as local:
            await local.pool.buffers.acquire(1)  # as the trainer does before it takes the devices
            await local.pool.offload_states()
            assert without_weights(local) == [True, True]
            new = publication(1)
            local.pool.announce(new)
            await local.pool.load_states()
            loaded = await local.pool.publish(new)
            assert loads(local) == [2, 2], "versions 0 and 1"
            assert loaded.seconds["load"] > 0
            assert (await local.pool.generate(request())).versions.tolist() == [1] * 4

    run_virtual(scenario())


def test_an_engine_that_is_woken_while_the_new_version_is_sent_waits_for_it(monkeypatch):
    async def scenario():
        async with sleeping_pool(monkeypatch) as local:
            await local.pool.buffers.acquire(1)
            await local.pool.offload_states()
            answer = asyncio.create_task(local.pool.generate(request()))
            local.pool.expect_weights()
            waking = asyncio.create_task(local.pool.load_states())
            await asyncio.sleep(20)
            assert not waking.done() and not answer.done()
            local.pool.announce(publication(1))
            await waking
            assert (await answer).versions.tolist() == [1] * 4
            assert loads(local) == [2, 2]

    run_virtual(scenario())


def test_an_engine_that_is_woken_before_loads_the_version_that_it_had(monkeypatch):
    async def scenario():
        async with sleeping_pool(monkeypatch) as local:
            await local.pool.buffers.acquire(1)
            await local.pool.offload_states()
            await local.pool.load_states()
            assert (await local.pool.generate(request())).versions.tolist() == [0] * 4
            await local.pool.publish(publication(1))
            assert (await local.pool.generate(request())).versions.tolist() == [1] * 4
            assert loads(local) == [3, 3]

    run_virtual(scenario())


@pytest.mark.parametrize(("follows", "dual_buffer"), [(False, True), (True, False)])
def test_weights_are_kept_if_none_follow_or_these_could_not_come_back(monkeypatch, follows, dual_buffer):
    async def scenario():
        async with sleeping_pool(monkeypatch, dual_buffer=dual_buffer, in_place=False) as local:
            if follows:
                await local.pool.buffers.acquire(1)
            await local.pool.offload_states()
            assert without_weights(local) == [False, False]
            await local.pool.load_states()
            assert loads(local) == [1, 1]
            assert (await local.pool.generate(request())).versions.tolist() == [0] * 4

    run_virtual(scenario())


def test_weights_that_are_pushed_are_kept(monkeypatch):
    class Source:
        async def push(self, version, target):
            await target.actor.call("transfer_step", "update", version)

        def disconnect(self, name):
            """No connection is kept."""

    async def scenario():
        async with sleeping_pool(monkeypatch) as local:
            local.pool.weight_source = Source()
            pushed = publication(1)
            pushed.layout = {}
            await local.pool.buffers.acquire(1)
            await local.pool.publish(pushed)
            await local.pool.buffers.acquire(2)
            await local.pool.offload_states()
            assert without_weights(local) == [False, False]

    run_virtual(scenario())


@pytest.mark.parametrize("dies_at", ["wake", "load_weights"])
@pytest.mark.parametrize("in_flight", ["keep", "resume", "drain"])
def test_requests_outlive_a_sleep_without_weights_and_a_replica_that_dies_in_it(monkeypatch, dies_at, in_flight):
    async def scenario():
        async with sleeping_pool(monkeypatch, in_flight=in_flight) as local, asyncio.timeout(500):
            answers = [asyncio.create_task(local.pool.generate(request(f"r{n}", 12))) for n in range(6)]
            await asyncio.sleep(3.5)
            await local.pool.buffers.acquire(1)
            await local.pool.offload_states()
            local.handles[0].dies_at = dies_at
            new = publication(1)
            local.pool.announce(new)
            await local.pool.load_states()
            await local.pool.publish(new)
            for answer in answers:
                completion = await answer
                assert completion.token_ids.tolist() == list(range(12))
                assert sorted(completion.versions.tolist()) == completion.versions.tolist()
                assert completion.versions[0] == 0 and completion.versions[-1] == 1
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 1)
            assert [handle.engine.version for handle in local.handles[1:]] == [1, 1]

    run_virtual(scenario())


@pytest.mark.parametrize("dual_buffer", [False, True])
def test_a_replica_that_restarted_while_the_next_version_was_written_wakes_without_weights(monkeypatch, dual_buffer):
    """With a single buffer its version is gone: it waits for the next one, and others serve meanwhile."""

    async def scenario():
        settings = {"dual_buffer": dual_buffer, "in_place": False}
        async with LocalPool(monkeypatch, replicas=2, **settings) as local, asyncio.timeout(500):
            await local.pool.buffers.acquire(1)
            local.handles[0].kill()
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 3)
            await local.pool.offload_states()
            await local.pool.load_states()
            assert (await local.pool.generate(request())).versions.tolist() == [0] * 4
            await local.publish(1)
            assert (await local.pool.generate(request("next"))).versions.tolist() == [1] * 4

    run_virtual(scenario())
