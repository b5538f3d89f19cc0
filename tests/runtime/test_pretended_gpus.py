"""A node whose GPUs Ray only believes in: they are reserved once, each process sees its own, and an engine of several
starts its own processes although it is inside a placement group."""

from __future__ import annotations

import asyncio
import os

import pytest
from ray.cluster_utils import Cluster

from roll.configs.run import ClusterConfig
from roll.runtime.placement import Placement, PlacementError, ray_session
from roll.runtime.workers import Worker, WorkerGroup, split_devices, start_group, start_worker
from tests import warm_workers
from tests.engines.test_vllm_options import arguments
from tests.ray_cluster import QUIET

pytestmark = pytest.mark.tier("all")


class GpuProbe(Worker):
    async def visible(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

    async def chosen_executor(self, settings):
        """What vLLM starts its processes with, in this one."""
        from vllm.config import ParallelConfig

        return ParallelConfig(**settings).distributed_executor_backend


@pytest.fixture(scope="module")
def eight_gpus(warm):
    node = {"num_cpus": 2, "num_gpus": 8, "setup_worker_path": warm_workers.__file__, **QUIET}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    config = ClusterConfig(device="cuda", num_devices_per_node=8, address=cluster.address, cpu_threads_per_device=1)
    with ray_session(config):
        yield config
    cluster.shutdown()


async def started(placement: Placement, role: str, devices: list[int], each: int) -> WorkerGroup:
    places = split_devices(devices, each)

    def build(rank):
        return start_worker(
            GpuProbe, placement, role=role, rank=rank, world_size=len(places), devices=places[rank], log_dir=None
        )

    return await start_group(build, len(places), 60)


def test_each_worker_sees_its_own_gpus_and_nobody_gets_them_a_second_time(eight_gpus):
    async def scenario():
        placement = Placement(eight_gpus)
        await placement.reserve()
        groups = []
        try:
            for role, devices, each, seen in [
                ("trainer", [0, 1, 2, 3], 2, ["0,1", "2,3"]),
                ("engine", [4, 5, 6], 1, ["4", "5", "6"]),
                ("reference", [0, 3], 1, ["0", "3"]),
            ]:
                groups.append(await started(placement, role, devices, each))
                assert await groups[-1].call_all("visible") == seen
            late = ClusterConfig(device="cuda", num_devices_per_node=8, worker_start_timeout_seconds=1)
            with pytest.raises(PlacementError, match="partly in use"):
                await Placement(late).reserve()
        finally:
            for group in groups:
                group.kill()
            placement.release()

    asyncio.run(scenario())


@pytest.mark.tier("soak")
@pytest.mark.needs("vllm")
def test_an_engine_of_two_gpus_does_not_choose_ray_inside_a_placement_group(eight_gpus):
    chosen = arguments(device="cuda", tensor_parallel_size=2)
    settings = {name: chosen[name] for name in ("tensor_parallel_size", "distributed_executor_backend")}

    async def scenario():
        placement = Placement(eight_gpus)
        await placement.reserve()
        group = await started(placement, "engine", [6, 7], 2)
        try:
            (worker,) = group.workers
            assert await worker.call("chosen_executor", {"tensor_parallel_size": 2}, timeout=120) == "ray"
            assert await worker.call("chosen_executor", settings, timeout=120) == "mp"
        finally:
            group.kill()
            placement.release()

    asyncio.run(scenario())
