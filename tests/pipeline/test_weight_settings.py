"""Settings of the weight update, as trainer and engines then have them: the real roles, pool, transport and worker of
an engine, on this event loop in place of processes.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_config

from roll.configs import derived
from roll.configs.loader import config_from_tree
from roll.engines import worker as infer_worker
from roll.engines.worker import InferWorker
from roll.pipeline import roles
from roll.pipeline.preflight import Prepared
from roll.pipeline.roles import Roles
from roll.rollout.clock import run_virtual
from roll.runtime.locks import build_device_locks
from roll.runtime.placement import Placement
from roll.tracking.run_directory import RunDirectory
from roll.trainers.worker import TrainWorker
from roll.weights.buckets import HeldWeights, manifest
from roll.weights.publisher import build_publisher
from tests.runtime.local_engines import LocalHandle, ScriptedEngine

WEIGHTS = [(f"layer.{number}.weight", torch.full((100, 1024), float(number))) for number in range(8)]
"""0.39 MiB each."""
MEBIBYTE = 1024**2


class Engine(ScriptedEngine):
    """Takes publications in, and notes in what sizes they come."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sizes: list[int] = []

    async def prepare_weights(self, buckets, version):
        self.preparing = version
        taken = list(buckets)
        self.sizes = [bucket.data.nbytes for bucket in taken]
        self.taken = HeldWeights(version, *manifest(taken), in_place=True)
        return self.taken

    async def load_weights(self, version):
        self.version = version
        return self.taken


class TrainerProcess:
    """The `WorkerHandle` of a trainer rank whose weights are `WEIGHTS`; its publisher is the real one."""

    host, port, name = "here", 0, "actor_train/0"

    async def create(self, timeout):
        pass

    async def call(self, method, *arguments, timeout=None):
        return getattr(self, method)(*arguments)

    def tell(self, method, *arguments):
        getattr(self, method)(*arguments)

    def start(self, spec, address, port):
        self.spec = spec
        self.publisher = build_publisher(spec.transport, rank=0, host=address)

    def gather(self, version, buffer, dtype, bucket_bytes):
        self.bucket_bytes = bucket_bytes
        self.publisher.gather(version, buffer, iter(WEIGHTS), getattr(torch, dtype), bucket_bytes)

    def send(self, version):
        return self.publisher.send(version)

    def release(self, version):
        self.publisher.release(version)

    def kill(self):
        pass


class Started:
    """The roles of a run, with these settings under ``weight_update``."""

    def __init__(self, folder, monkeypatch, **weight_update) -> None:
        update = {"transport": "shared_memory", **weight_update}
        self.config = config_from_tree(tiny_config(folder, weight_update=update))
        nothing = dict.fromkeys(
            ("tokenizer", "rollouts", "source", "objective", "value_objective", "advantages", "correction")
        )
        prepared = Prepared(config=self.config, stages=[], worker_classes={}, **nothing)
        monkeypatch.setattr(infer_worker, "strategy_class", lambda kind, name, own: Engine)
        monkeypatch.setattr(roles, "start_worker", self._start_worker)
        self._prepared, self._run = prepared, RunDirectory.create(str(folder / "run"), "tiny")

    def _start_worker(self, worker_class, placement, *, rank, **_):
        if issubclass(worker_class, InferWorker):
            self.engine = LocalHandle(rank)
            return self.engine
        assert issubclass(worker_class, TrainWorker)
        self.trainer = TrainerProcess()
        return self.trainer

    async def __aenter__(self) -> Started:
        async def nothing():
            pass

        workers = SimpleNamespace(start=nothing, shutdown=nothing)
        locks = build_device_locks({"actor_train": [0], "actor_infer": [1]})
        self.roles = Roles(self._prepared, Placement(self.config.cluster), locks, workers, self._run, print)
        await self.roles.start()
        return self

    async def __aexit__(self, *_) -> None:
        await self.roles.shutdown()

    async def publish(self, version: int) -> None:
        pool, trainer = self.roles.pool, self.roles.trainer
        buffer = await pool.buffers.acquire(version)
        await trainer.gather(version, buffer, pool.dtype, derived.gather_bucket_bytes(self.config))
        await pool.publish(await trainer.send(version))


@pytest.mark.parametrize(
    ("load", "gather", "sizes"),
    [(4, 4, 1), (1, 4, 4), (0.5, 4, 8), (4, 1, 4), (0.0001, 0.0001, 8)],
)
def test_engines_take_weights_in_buckets_of_the_configured_size(tmp_path, monkeypatch, load, gather, sizes):
    async def scenario():
        settings = {"param_update_load_bucket_size_mb": load, "param_update_gather_bucket_size_mb": gather}
        async with Started(tmp_path, monkeypatch, **settings) as started:
            await started.publish(0)
            found = started.engine.engine.sizes
            assert len(found) == sizes and sum(found) == sum(weight.nbytes for _, weight in WEIGHTS)
            # A tensor is never split: a smaller bucket holds one.
            assert max(found) <= max(min(load, gather) * MEBIBYTE, WEIGHTS[0][1].nbytes)
            assert started.trainer.spec.transport.bucket_bytes == int(load * MEBIBYTE)

    run_virtual(scenario())


@pytest.mark.parametrize("dual", [True, False])
def test_the_next_version_is_gathered_while_the_last_one_travels_only_with_a_second_buffer(tmp_path, monkeypatch, dual):
    async def scenario():
        async with Started(tmp_path, monkeypatch, dual_buffer=dual) as started:
            assert started.trainer.spec.transport.buffers == (2 if dual else 1)
            buffers = started.roles.pool.buffers
            assert await buffers.acquire(0) == 0
            ahead = asyncio.create_task(buffers.acquire(1))
            await asyncio.sleep(0)
            assert ahead.done() == dual
            ahead.cancel()

    run_virtual(scenario())
