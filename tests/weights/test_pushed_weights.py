"""Weights that the trainer pushes into each replica: paused meanwhile, verified after, and none that has died is waited
for."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from local_engines import LOAD_SECONDS, START_SECONDS, LocalPool, publication, request

from roll.rollout.clock import run_virtual
from roll.runtime.workers import WorkerFailed


class Trainer:
    """Pushes by one call of the engine. A push into a replica that has died never ends, until it is disconnected."""

    def __init__(self) -> None:
        self.pushes: list[tuple[str, int]] = []
        self.open: dict[str, asyncio.Event] = {}
        self.fails_for: str | None = None
        self.error_type = "EngineCallFailed"

    async def push(self, version, target):
        self.pushes.append((target.name, version))
        if target.name == self.fails_for:
            self.fails_for = None
            raise WorkerFailed("actor_train/0", "push", "the transfer broke", self.error_type)
        closed = self.open[target.name] = asyncio.Event()
        await target.actor.worker.transfer_step("update", version)
        if target.actor._death.done():
            await closed.wait()

    def disconnect(self, name):
        self.open[name].set()


def pushed(version):
    return replace(publication(version), layout={})


class PushingPool(LocalPool):
    async def __aenter__(self):
        self.trainer = self.pool.weight_source = Trainer()
        return await super().__aenter__()

    async def publish(self, version, canaries=None):
        await self.pool.buffers.acquire(version)
        return await self.pool.publish(pushed(version), canaries)


def test_each_replica_is_pushed_to_once_while_it_is_paused_and_goes_on(monkeypatch):
    async def scenario():
        async with PushingPool(monkeypatch, replicas=2) as local:
            running = [asyncio.create_task(local.pool.generate(request(f"r{i}", 12))) for i in range(4)]
            await asyncio.sleep(3.5)
            await local.publish(1)
            assert local.trainer.pushes == [(f"actor_infer/{i}", version) for version in (0, 1) for i in (0, 1)]
            for completion in await asyncio.gather(*running):
                assert sorted(set(completion.versions)) == [0, 1] and len(completion.token_ids) == 12

    run_virtual(scenario())


def test_a_replica_that_dies_while_it_is_pushed_to_is_disconnected_and_comes_back_with_the_version(monkeypatch):
    async def scenario():
        async with PushingPool(monkeypatch, replicas=2) as local:
            running = [asyncio.create_task(local.pool.generate(request(f"r{i}", 10))) for i in range(4)]
            publishing = asyncio.create_task(local.publish(1))
            await asyncio.sleep(LOAD_SECONDS / 2)
            local.handles[0].kill()
            await asyncio.wait_for(publishing, START_SECONDS)
            assert local.trainer.open["actor_infer/0"].is_set()
            for completion in await asyncio.gather(*running):
                assert len(completion.token_ids) == 10
            await asyncio.sleep(START_SECONDS + 2 * LOAD_SECONDS)
            assert local.pool.restarts == 1 and local.handles[2].engine.version == 1
            late = await asyncio.gather(*(local.pool.generate(request(f"l{i}"), min_version=1) for i in range(4)))
            assert all(set(completion.versions) == {1} for completion in late)

    run_virtual(scenario())


def test_a_fault_of_the_trainer_ends_the_run_and_no_replica(monkeypatch):
    async def scenario():
        async with PushingPool(monkeypatch) as local:
            local.trainer.fails_for, local.trainer.error_type = "actor_infer/0", "OutOfMemoryError"
            with pytest.raises(WorkerFailed, match="the transfer broke"):
                await local.publish(1)
            assert local.pool.restarts == 0

    run_virtual(scenario())


def test_a_push_that_its_engine_does_not_take_replaces_the_replica(monkeypatch):
    async def scenario():
        async with PushingPool(monkeypatch) as local:
            local.trainer.fails_for = "actor_infer/0"
            await local.publish(1)
            completion = await local.pool.generate(request(), min_version=1)
            assert set(completion.versions) == {1}
            assert "the transfer broke" in local.events[0]

    run_virtual(scenario())


def test_a_push_that_does_not_end_is_given_up_at_its_deadline(monkeypatch):
    async def scenario():
        async with PushingPool(monkeypatch, publish_timeout_seconds=20.0) as local:
            engine = local.handles[0].engine

            async def hang(step, payload):
                await asyncio.Event().wait()

            engine.transfer_step = hang
            started = asyncio.get_running_loop().time()
            await local.publish(1)
            assert asyncio.get_running_loop().time() - started == pytest.approx(20.0)
            assert set((await local.pool.generate(request(), min_version=1)).versions) == {1}
            assert "no push of weights ended within 20 s" in local.events[0]

    run_virtual(scenario())
