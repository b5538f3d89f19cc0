"""The devices of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.configs.schema.options import COUNT, POSITIVE, option


@dataclass
class ClusterConfig:
    """The devices of the run."""

    device: Literal["cpu", "cuda"] = option(
        "cpu", help="Kind of device that `device_mapping` numbers: CPU slots or CUDA GPUs."
    )
    num_devices_per_node: int = option(1, help="Devices (CPU slots or GPUs) used on each node.", range=COUNT)
    num_nodes: int = option(1, help="Nodes used. Device `i` lives on node `i // num_devices_per_node`.", range=COUNT)
    address: str | None = option(
        None, help="Address of a running Ray cluster (`auto` or `host:port`). Empty: start a local one for this run."
    )
    device_memory_gib: float | None = option(
        None,
        help="Memory of one GPU in GiB. With it, `roll check` and the start of a run say what will not fit.",
        range=POSITIVE,
    )
    cpu_threads_per_device: int | None = option(
        None,
        help="Computing threads of a worker per CPU slot it owns. Default: cores of the node / slots of the node.",
        range=COUNT,
    )
    worker_start_timeout_seconds: float = option(
        300.0, help="Longest wait for a worker to start and load its model before the run fails.", range=POSITIVE
    )
