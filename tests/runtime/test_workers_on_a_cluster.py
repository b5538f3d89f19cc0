"""Placement, calls and deaths on Ray's own two-node test cluster."""

import asyncio
import logging
import os
import signal
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from roll.configs.run import ClusterConfig
from roll.runtime import placement as placement_module
from roll.runtime import workers as distributed_group
from roll.runtime.placement import Placement, PlacementError, link_to_logs, ray_session
from roll.runtime.workers import (
    Worker,
    WorkerDied,
    WorkerFailed,
    WorkerGroup,
    WorkerTimeout,
    split_devices,
    start_group,
    start_worker,
)

pytestmark = pytest.mark.tier("all")


class Probe(Worker):
    async def add(self, a, b):
        return a + b

    async def fail(self):
        raise ValueError("the probe was told to fail")

    async def folder(self):
        return os.getcwd()

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


@pytest.fixture(scope="module")
def two_nodes():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    config = ClusterConfig(
        num_devices_per_node=2, num_nodes=2, address=cluster.address, worker_start_timeout_seconds=60
    )
    with ray_session(config):
        yield config
    cluster.shutdown()


@dataclass
class Probes:
    """Workers of one run: one on each of four devices, and beside them one that owns two and one that shares one."""

    placement: Placement
    each: WorkerGroup
    owner: WorkerGroup
    guest: WorkerGroup
    logs: Path
    folder: Path
    """Where the driver was when they were started; Ray had been started elsewhere."""


@pytest.fixture(scope="module")
def probes(two_nodes, tmp_path_factory):
    logs, folder = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("folder of the run")

    async def start():
        placement = Placement(two_nodes)
        await placement.reserve()

        def group(role, devices, per_worker=1):
            places = split_devices(devices, per_worker)

            def build(rank):
                return start_worker(
                    Probe, placement, role=role, rank=rank, world_size=len(places), devices=places[rank],
                    log_dir=str(logs),
                )  # fmt: skip

            return start_group(build, len(places), two_nodes.worker_start_timeout_seconds)

        groups = await asyncio.gather(group("probe", [0, 1, 2, 3]), group("owner", [0, 1], 2), group("guest", [1]))
        return Probes(placement, *groups, logs, folder)

    with chdir(folder):
        started = asyncio.run(start())
    yield started
    for group in (started.each, started.owner, started.guest):
        group.kill()
    started.placement.release()


def test_devices_taken_by_another_run_end_in_an_error_at_the_deadline(two_nodes):
    async def scenario():
        first = Placement(two_nodes)
        await first.reserve()
        try:
            late = ClusterConfig(num_devices_per_node=2, num_nodes=2, worker_start_timeout_seconds=1)
            with pytest.raises(PlacementError, match="partly in use"):
                await Placement(late).reserve()
        finally:
            first.release()
        after = Placement(two_nodes)
        await after.reserve()  # nothing of the failed attempt waits in line
        after.release()

    asyncio.run(scenario())


def test_devices_that_the_cluster_does_not_have_are_refused_at_once_with_what_it_has(two_nodes):
    async def scenario():
        with pytest.raises(PlacementError, match=r"needs 3 node\(s\).*2 node\(s\)"):
            await Placement(ClusterConfig(num_devices_per_node=2, num_nodes=3)).reserve()
        with pytest.raises(PlacementError, match="GPU"):
            await Placement(ClusterConfig(device="cuda", num_devices_per_node=1)).reserve()

    asyncio.run(scenario())


def test_devices_of_different_nodes_are_in_different_places_and_failures_are_named(probes):
    async def scenario():
        first, second, third, fourth = probes.each.workers
        assert first.node == second.node != third.node == fourth.node
        assert len({worker.pid for worker in probes.each.workers}) == 4
        assert await probes.each.call_all("add", 1, 2) == [3, 3, 3, 3]
        with pytest.raises(WorkerFailed, match=r"probe/0\.fail failed: ValueError: the probe was told to fail"):
            await first.call("fail")
        with pytest.raises(WorkerFailed, match=r"probe/0\.time_out failed: TimeoutError: the store did not answer"):
            await first.call("time_out")
        with pytest.raises(WorkerTimeout, match=r"probe/0\.sleep_for_ever .* 0\.2 s"):
            await first.call("sleep_for_ever", timeout=0.2)

    asyncio.run(scenario())


def test_workers_work_in_the_folder_of_the_driver(probes):
    assert asyncio.run(probes.each.call_all("folder")) == 4 * [str(probes.folder)]


def test_several_workers_share_one_device_and_a_worker_can_own_several(probes):
    (owner,), (guest,) = probes.owner.workers, probes.guest.workers
    assert owner.node == guest.node == probes.each.workers[1].node
    assert owner.identity.place.local_devices == (0, 1)
    assert asyncio.run(probes.guest.call_all("add", 1, 1)) == [2]


def test_devices_may_be_named_by_uuids(monkeypatch):
    names = ["GPU-8f0b", "MIG-1c2d"]

    class Context:
        def get_accelerator_ids(self):
            return {"GPU": names}

    monkeypatch.setattr("ray.get_runtime_context", Context)
    placement = Placement(ClusterConfig(device="cuda", num_devices_per_node=2))
    placement._nodes = [placement_module._describe_node._function()]
    assert [placement.place([device]).local_devices for device in (0, 1)] == [("GPU-8f0b",), ("MIG-1c2d",)]
    assert placement.place([0, 1]).local_devices == tuple(names)


def test_a_worker_never_spans_nodes(probes):
    with pytest.raises(PlacementError, match="several nodes"):
        probes.placement.place([1, 2])


def test_what_a_worker_prints_is_in_a_file_of_its_own_and_not_on_the_drivers_console(probes, capfd):
    asyncio.run(probes.each.workers[1].call("chatter"))
    assert (probes.logs / "probe_1.out").read_text().splitlines() == ["printed", "native", "child error"]
    assert "WARNING roll.probe: worn out" in (probes.logs / "probe_1.log").read_text()
    assert (probes.logs / "probe_0.out").read_text() == ""
    assert capfd.readouterr() == ("", "")


def test_rays_own_logs_are_linked_to(two_nodes, tmp_path):
    link_to_logs(tmp_path / "ray")
    link_to_logs(tmp_path / "ray")
    assert (tmp_path / "ray").is_symlink() and list((tmp_path / "ray").glob("raylet*"))


def test_a_dead_rank_is_named_rather_than_the_peer_that_stumbled_over_it(probes, monkeypatch):
    monkeypatch.setattr(distributed_group, "DEATH_REPORT_SECONDS", 60.0)  # on a busy machine
    with pytest.raises(WorkerDied, match="probe/1"):
        asyncio.run(WorkerGroup(probes.each.workers[:2]).call_all("fail_because_of_a_dying_peer", timeout=60))


def test_a_death_is_named_to_all_who_wait(probes):
    async def scenario():
        group = WorkerGroup(probes.each.workers[2:])
        dying = group.workers[0]
        watching = asyncio.create_task(group.watch())
        hanging = asyncio.create_task(dying.call("sleep_for_ever"))
        await asyncio.sleep(0.2)
        os.kill(dying.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=rf"worker probe/2 died: process {dying.pid}"):
            await asyncio.wait_for(watching, 60)
        with pytest.raises(WorkerDied, match="probe/2"):
            await asyncio.wait_for(hanging, 60)
        with pytest.raises(WorkerDied, match="probe/2"):
            await group.call_all("add", 1, 2, timeout=60)

    asyncio.run(scenario())
