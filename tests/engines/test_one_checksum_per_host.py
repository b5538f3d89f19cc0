"""Replicas of a node that map the same bytes verify them once, before any of them loads; no damage slips through."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch

from roll.engines import worker as infer_worker
from roll.rollout.clock import run_virtual
from roll.runtime.workers import WorkerFailed
from roll.weights import buckets as weight_buckets
from roll.weights.buckets import HeldWeights, manifest, pack_buckets
from roll.weights.publisher import Publication
from roll.weights.transports import TRANSPORTS, WeightTransport
from tests.runtime.local_engines import (
    LOAD_SECONDS,
    START_SECONDS,
    LocalPool,
    NothingToCarry,
    ScriptedEngine,
    nothing_to_send,
)

NODES = ("a", "a", "b", "b", "b", "c")
"""Node of each replica."""


class CheckingEngine(ScriptedEngine):
    """A scripted engine that looks at the bytes as real ones do."""

    async def prepare_weights(self, buckets, version):
        self.preparing, self.held = version, HeldWeights(version, *manifest(buckets))
        await asyncio.sleep(LOAD_SECONDS / 2)
        return self.held

    def receipt(self, version):
        return self.held


class MappedPool(LocalPool):
    """Replicas on several nodes, over a transport whose bytes all processes of a node map."""

    def __init__(self, monkeypatch, nodes=NODES, one_copy_per_host=True, **settings):
        super().__init__(monkeypatch, replicas=len(nodes), **settings)
        monkeypatch.setattr(infer_worker, "strategy_class", lambda kind, name, own: CheckingEngine)
        transport = WeightTransport(nothing_to_send, NothingToCarry, one_copy_per_host=one_copy_per_host)
        monkeypatch.setitem(TRANSPORTS, "nothing", transport)
        self.hashed: Counter[str] = Counter()
        checksum = weight_buckets.checksum

        def counted(data):
            self.hashed[data.tobytes().decode("latin-1")] += 1
            return checksum(data)

        monkeypatch.setattr(weight_buckets, "checksum", counted)

        def take_place(handle):
            handle.node = nodes[int(handle.name.rpartition("/")[2])]

        self.prepare_next = take_place

    async def publish_tensors(self, version, damage=False):
        """Publish two tensors, whose bytes are their names, with or without one that changes on the way."""
        tensors = [(name, torch.tensor(list(name.encode()), dtype=torch.uint8)) for name in ("left", "right")]
        sent = list(pack_buckets(tensors, 1))
        publication = Publication(version, sent, *manifest(sent), total_bytes=9)
        if damage:
            sent[1].data[0] = ord("t")
        self.hashed.clear()
        await self.pool.buffers.acquire(version)
        return await self.pool.publish(publication)

    def versions(self):
        return [handle.engine.version for handle in self.handles]


def test_each_tensor_is_read_once_on_every_node(monkeypatch):
    async def scenario():
        async with MappedPool(monkeypatch) as local:
            await local.publish_tensors(1)
            assert local.versions() == [1] * 6
            assert local.hashed == {"left": 3, "right": 3}
            calls: Counter[str] = Counter()
            for handle in local.handles:
                calls[handle.node] += handle.calls["verify_weights"]
            assert calls == {"a": 2, "b": 2, "c": 0}, "at version 0 and 1, where there is more than one replica"

    run_virtual(scenario())


def test_where_bytes_are_copied_for_each_replica_each_verifies_its_own(monkeypatch):
    async def scenario():
        async with MappedPool(monkeypatch, one_copy_per_host=False) as local:
            await local.publish_tensors(1)
            assert local.hashed == {"left": 6, "right": 6}

    run_virtual(scenario())


@pytest.mark.parametrize("nodes", [NODES, ("a",), ("a", "a")])
def test_damaged_bytes_stop_the_run_by_name_before_any_engine_switches(monkeypatch, nodes):
    async def scenario():
        async with MappedPool(monkeypatch, nodes, max_unavailable=1.0) as local:
            loaded = [handle.calls["load_weights"] for handle in local.handles]
            with pytest.raises(WorkerFailed, match="WeightsDiffer.*the content of 'right' differs"):
                await local.publish_tensors(1, damage=True)
            assert local.versions() == [0] * len(nodes)
            if len(nodes) > 1:
                assert [handle.calls["load_weights"] for handle in local.handles] == loaded

    run_virtual(scenario())


def test_another_replica_verifies_if_the_first_one_dies(monkeypatch):
    async def scenario():
        async with MappedPool(monkeypatch) as local, asyncio.timeout(500):
            first, second = (handle for handle in local.handles if handle.node == "a")
            if second.calls["verify_weights"]:
                first, second = second, first
            first.dies_at = "verify_weights"
            await local.publish_tensors(1)
            assert sorted(local.versions()[:6]) == [0, 1, 1, 1, 1, 1]
            assert second.calls["verify_weights"] == 1
            await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 1)
            assert local.versions()[6:] == [1]  # the new process
            assert local.hashed["left"] == 3 + 1, "once more by the one that died"

    run_virtual(scenario())


def test_verified_checksums_are_taken_as_they_are_and_others_computed():
    (bucket,) = pack_buckets([("a", torch.ones(3)), ("b", torch.zeros(2))], 1000)
    count, checksums = manifest([bucket])
    bucket.data[:] = np.arange(len(bucket.data)) % 7
    assert manifest([bucket]) != (count, checksums)
    bucket.verified = checksums
    assert manifest([bucket]) == (count, checksums)
