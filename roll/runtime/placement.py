"""Placement of a run's workers on the devices of a Ray cluster, and choice of ports for processes to connect to.

Device ``i`` is on node ``i // num_devices_per_node``. All devices of a run are reserved at once, one bundle per node,
so a run either gets its devices or fails at the start and says what is missing. Workers of several roles may then share
a device: they take no Ray resources beyond the reservation, and see only their own devices.

A port is chosen first, sent to other processes, and opened seconds or minutes later. If it were in the range that the
system uses for outgoing connections (on Linux 32768 to 60999 by default), such a connection could take it in between,
and the run would fail with "address already in use". So ports are below that range, and also outside the ports of Ray
workers (10002 to 19999) and of Kubernetes services (30000 to 32767).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll.configs.run import ClusterConfig

PORTS = range(20000, 30000)
_TRIALS = 100


def free_port() -> int:
    """Return a TCP port from `PORTS` that is free on all interfaces of this host. ``OSError`` if none is found."""
    chance = random.SystemRandom()  # processes with the same seed must not choose the same ports
    for port in chance.sample(PORTS, _TRIALS):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"{_TRIALS} TCP ports from {PORTS[0]} to {PORTS[-1]} were tried, and none is free")


logger = logging.getLogger(__name__)


class PlacementError(RuntimeError):
    """The cluster does not have the devices that the run needs."""


@dataclass(frozen=True)
class WorkerPlace:
    """The node and the devices of one worker."""

    node: int
    device: Literal["cpu", "cuda"]
    local_devices: tuple[int | str, ...]
    """CPU slots, or GPUs of the node as in ``CUDA_VISIBLE_DEVICES``: numbers, or UUIDs of GPUs or of parts of one
    (MIG)."""
    cpu_threads: int


@contextmanager
def ray_session(config: ClusterConfig, *, link: Path | None = None) -> Iterator[None]:
    """Connect to Ray during a block: to the cluster at ``address``, or to a local one that ends with the block.

    ``link``: path at which to link Ray's own logs, if their folder is on this host.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    if config.address is not None:
        ray.init(address=config.address, **common)
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cpus = max(config.num_devices_per_node, os.cpu_count() or 1) + 1  # one per slot and one more
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **common)
    try:
        if link is not None:
            link_to_logs(link)
        yield
    finally:
        ray.shutdown()


def link_to_logs(link: Path) -> None:
    """Create a link to the folder of Ray's own logs if it is on this host. Log a warning if the link cannot be made.

    The folder is found from the path of the node's raylet socket.
    """
    here = ray.get_runtime_context().get_node_id()
    (socket,) = [node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == here]
    folder = Path(socket).parent.parent / "logs"
    if not folder.is_dir():
        return
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(folder, target_is_directory=True)
    except OSError as error:
        logger.warning("no link to Ray's logs in %s: %s", folder, error)


@ray.remote(num_cpus=0)
def _describe_node() -> dict[str, Any]:
    context = ray.get_runtime_context()
    return {
        "gpus": [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])],
        "cores": os.cpu_count() or 1,
    }


class Placement:
    """The reserved devices of a run."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._group: PlacementGroup | None = None
        self._nodes: list[dict[str, Any]] = []

    async def reserve(self) -> None:
        """Reserve all devices of the run.

        If they are not available, nothing stays reserved or pending, and a `PlacementError` says what the cluster has.
        """
        config = self._config
        per_node = float(config.num_devices_per_node)
        resources = {"CPU": per_node} if config.device == "cpu" else {"GPU": per_node, "CPU": 1.0}
        self._require_nodes(resources)
        self._group = placement_group(
            [dict(resources) for _ in range(config.num_nodes)],
            strategy="STRICT_SPREAD" if config.num_nodes > 1 else "STRICT_PACK",
        )
        try:
            async with asyncio.timeout(config.worker_start_timeout_seconds):
                await self._group.ready()
                self._nodes = await self._describe_nodes()
        except TimeoutError:
            raise PlacementError(
                f"the cluster did not give {config.num_nodes} node(s) with {resources} within "
                f"{config.worker_start_timeout_seconds:g} s; it has {self._cluster_text()}, partly in use"
            ) from None
        finally:
            if not self._nodes:
                self.release()

    async def _describe_nodes(self) -> list[dict[str, Any]]:
        gpus = self._config.num_devices_per_node if self._config.device == "cuda" else 0
        probes = [
            _describe_node.options(scheduling_strategy=self._strategy(node), num_gpus=gpus).remote()
            for node in range(self._config.num_nodes)
        ]
        return [await probe for probe in probes]

    def place(self, devices: Sequence[int]) -> WorkerPlace:
        """Return the place of a worker that owns these devices. Raises `PlacementError` if they span several nodes."""
        per_node = self._config.num_devices_per_node
        nodes = {device // per_node for device in devices}
        if len(nodes) != 1:
            raise PlacementError(f"devices {list(devices)} of one worker are on several nodes ({sorted(nodes)})")
        node = nodes.pop()
        local: list[int | str] = [device % per_node for device in devices]
        if self._config.device == "cuda":
            local = [self._nodes[node]["gpus"][index] for index in local]
        threads = self._config.cpu_threads_per_device or max(1, self._nodes[node]["cores"] // per_node)
        return WorkerPlace(node, self._config.device, tuple(local), threads * len(devices))

    def actor_options(self, place: WorkerPlace) -> dict[str, Any]:
        """Return the Ray options that put an actor at its place."""
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": self._strategy(place.node)}

    def release(self) -> None:
        """Release the devices."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _strategy(self, node: int) -> PlacementGroupSchedulingStrategy:
        if self._group is None:
            raise PlacementError("devices are used before they are reserved")
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)

    def _require_nodes(self, resources: dict[str, float]) -> None:
        fitting = [
            node
            for node in ray.nodes()
            if node["Alive"] and all(node["Resources"].get(name, 0) >= amount for name, amount in resources.items())
        ]
        if len(fitting) < self._config.num_nodes:
            raise PlacementError(
                f"the run needs {self._config.num_nodes} node(s) with {resources} each "
                f"(cluster.num_nodes, cluster.num_devices_per_node), the cluster has {self._cluster_text()}"
            )

    def _cluster_text(self) -> str:
        nodes = [
            {name: node["Resources"].get(name, 0) for name in ("CPU", "GPU")} for node in ray.nodes() if node["Alive"]
        ]
        return f"{len(nodes)} node(s): {nodes}"
