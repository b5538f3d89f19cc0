"""One Ray for all tests of a process: it takes seconds to start, and nothing of a test stays in it. Its workers are
warm (tests/warm_workers.py).

Who tests how Ray starts or ends starts one of his own, by the address "local" or as a `Cluster`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests import warm_workers as warm

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT, ROOT / "tests" / "pipeline")
"""Where workers find what tests give them."""
PLACES = 4
"""CPUs that it offers: more roles than these no run of a test puts side by side."""

QUIET = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""Processes of Ray that nobody here needs."""


@contextmanager
def running_cluster(nodes: int = 1) -> Iterator[str]:
    """A cluster on this machine, by its address. Each run connects to it and leaves it. A node of Ray has processes and
    an object store of its own."""
    from ray.cluster_utils import Cluster

    with ExitStack() as stack:
        if warm.ADDRESS not in os.environ:
            stack.enter_context(warm.warm_workers(*FOLDERS))
        paths = [*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
        with environment(PYTHONPATH=os.pathsep.join(paths)):
            node = {"num_cpus": PLACES, "setup_worker_path": warm.__file__, **QUIET}
            cluster = Cluster(initialize_head=True, head_node_args=node)
            stack.callback(cluster.shutdown)
            for _ in range(nodes - 1):
                cluster.add_node(**node)
        yield cluster.address


@contextmanager
def connected(address: str) -> Iterator[None]:
    """This process as a driver of the cluster, for tests that call Ray themselves."""
    import ray

    ray.init(address=address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """The environment of processes that are started within the block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
