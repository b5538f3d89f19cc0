import os
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with a tiny model and its prompts, for all runs of a file."""
    from tiny import make_task

    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


@pytest.fixture(scope="module")
def ray_cluster():
    """A Ray for all runs of a file; each run connects to it and leaves it. It does not outlive the file: others, which
    may come next in the same process, start a Ray of their own."""
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()
