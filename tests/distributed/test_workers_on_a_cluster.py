"""Placement, calls and deaths on Ray's own two-node test cluster."""

import asyncio
import logging
import os
import signal
import time

import pytest
import ray
from ray.cluster_utils import Cluster

from roll.configs.schema import ClusterConfig
from roll.distributed.errors import PlacementError, WorkerDied, WorkerFailed, WorkerTimeout
from roll.distributed.group import start_group, start_worker
from roll.distributed.placement import Placement, RaySession, link_to_logs
from roll.distributed.worker import Worker, split_devices


class Probe(Worker):
    async def add(self, a, b):
        return a + b

    async def fail(self):
        raise ValueError("the probe was told to fail")

    async def time_out(self):
        raise TimeoutError("the store did not answer")

    async def fail_because_of_a_dying_peer(self):
        """Rank 1 dies; the others notice before anybody knows."""
        if self.identity.rank == 1:
            await asyncio.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("connection closed by peer")

    async def sleep_for_ever(self):
        await asyncio.Event().wait()

    async def chatter(self):
        print("printed")
        os.write(1, b"native\n")
        os.system("echo child error >&2")
        logging.getLogger("roll.probe").warning("worn out")

    async def parent_of_thread(self):
        return await self.in_thread(os.getpid)


@pytest.fixture(scope="module")
def two_nodes():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    config = ClusterConfig(
        num_devices_per_node=2, num_nodes=2, address=cluster.address, worker_start_timeout_seconds=60
    )
    with RaySession(config, local_cpus=1):
        yield config
    cluster.shutdown()


async def start_probes(config, placement, devices, per_worker=1, log_dir=None):
    places = split_devices(devices, per_worker)
    return await start_group(
        lambda rank: start_worker(
            Probe, placement, role="probe", rank=rank, world_size=len(places), devices=places[rank],
            log_dir=log_dir,
        ),
        len(places),
        config.worker_start_timeout_seconds,
    )


def test_devices_of_different_nodes_are_in_different_places_and_a_death_is_named(two_nodes):
    async def scenario():
        placement = Placement(two_nodes)
        await placement.reserve()
        group = await start_probes(two_nodes, placement, [0, 1, 2, 3])
        try:
            first, second, third, fourth = group.workers
            assert first.node == second.node != third.node == fourth.node
            assert len({worker.pid for worker in group.workers}) == 4
            assert await group.call_all("add", 1, 2) == [3, 3, 3, 3]
            with pytest.raises(WorkerFailed, match=r"probe/0\.fail failed: ValueError: the probe was told to fail"):
                await first.call("fail")
            with pytest.raises(WorkerFailed, match=r"probe/0\.time_out failed: TimeoutError: the store did not answer"):
                await first.call("time_out")
            with pytest.raises(WorkerTimeout, match=r"probe/0\.sleep_for_ever .* 0\.2 s"):
                await first.call("sleep_for_ever", timeout=0.2)

            watching = asyncio.create_task(group.watch())
            hanging = asyncio.create_task(third.call("sleep_for_ever"))
            await asyncio.sleep(0.2)
            os.kill(third.pid, signal.SIGKILL)
            killed_at = time.monotonic()
            with pytest.raises(WorkerDied, match=rf"worker probe/2 died: process {third.pid}"):
                await asyncio.wait_for(watching, 20)
            with pytest.raises(WorkerDied, match="probe/2"):
                await asyncio.wait_for(hanging, 20)
            with pytest.raises(WorkerDied, match="probe/2"):
                await group.call_all("add", 1, 2, timeout=20)
            assert time.monotonic() - killed_at < 20
        finally:
            group.kill()
            placement.release()

    asyncio.run(scenario())


def test_a_dead_rank_is_named_rather_than_the_peer_that_stumbled_over_it(two_nodes):
    async def scenario():
        placement = Placement(two_nodes)
        await placement.reserve()
        group = await start_probes(two_nodes, placement, [0, 1])
        try:
            with pytest.raises(WorkerDied, match="probe/1"):
                await group.call_all("fail_because_of_a_dying_peer", timeout=20)
        finally:
            group.kill()
            placement.release()

    asyncio.run(scenario())


def test_several_workers_share_one_device_and_a_worker_can_own_several(two_nodes):
    async def scenario():
        placement = Placement(two_nodes)
        await placement.reserve()
        owner = await start_probes(two_nodes, placement, [0, 1], per_worker=2)
        guest = await start_probes(two_nodes, placement, [1])
        try:
            assert owner.workers[0].node == guest.workers[0].node
            assert owner.workers[0].identity.place.local_devices == (0, 1)
            assert await guest.call_all("add", 1, 1) == [2]
        finally:
            owner.kill()
            guest.kill()
            placement.release()

    asyncio.run(scenario())


def test_devices_that_the_cluster_does_not_have_are_refused_at_once_with_what_it_has(two_nodes):
    async def scenario():
        with pytest.raises(PlacementError, match=r"needs 3 node\(s\).*2 node\(s\)"):
            await Placement(ClusterConfig(num_devices_per_node=2, num_nodes=3)).reserve()
        with pytest.raises(PlacementError, match="GPU"):
            await Placement(ClusterConfig(device="cuda", num_devices_per_node=1)).reserve()

    asyncio.run(scenario())


def test_devices_taken_by_another_run_end_in_an_error_at_the_deadline(two_nodes):
    async def scenario():
        first = Placement(two_nodes)
        await first.reserve()
        try:
            late = ClusterConfig(num_devices_per_node=2, num_nodes=2, worker_start_timeout_seconds=2)
            with pytest.raises(PlacementError, match="partly in use"):
                await Placement(late).reserve()
        finally:
            first.release()
        after = Placement(two_nodes)
        await after.reserve()  # nothing of the failed attempt waits in line
        after.release()

    asyncio.run(scenario())


def test_a_worker_never_spans_nodes(two_nodes):
    async def scenario():
        placement = Placement(two_nodes)
        await placement.reserve()
        try:
            with pytest.raises(PlacementError, match="several nodes"):
                placement.place([1, 2])
        finally:
            placement.release()

    asyncio.run(scenario())


def test_the_session_leaves_an_existing_cluster_running(two_nodes):
    assert ray.is_initialized()
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2


def test_what_a_worker_prints_is_in_a_file_of_its_own_and_not_on_the_drivers_console(two_nodes, tmp_path, capfd):
    async def scenario():
        placement = Placement(two_nodes)
        await placement.reserve()
        group = await start_probes(two_nodes, placement, [0, 1], log_dir=str(tmp_path))
        try:
            await group.workers[1].call("chatter")
        finally:
            group.kill()
            placement.release()

    asyncio.run(scenario())
    assert (tmp_path / "probe_1.out").read_text().splitlines() == ["printed", "native", "child error"]
    assert "WARNING roll.probe: worn out" in (tmp_path / "probe_1.log").read_text()
    assert (tmp_path / "probe_0.out").read_text() == ""
    assert capfd.readouterr() == ("", "")


def test_rays_own_logs_are_linked_to(two_nodes, tmp_path):
    link_to_logs(tmp_path / "ray")
    link_to_logs(tmp_path / "ray")
    assert (tmp_path / "ray").is_symlink() and list((tmp_path / "ray").glob("raylet*"))
