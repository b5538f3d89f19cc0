"""A process has one process group: no test leaves one behind, also when building its trainer failed."""

import pytest
import torch.distributed as dist


@pytest.fixture
def leave_process_group():
    """Makes room for another trainer in this process."""

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    yield leave
    leave()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model of each family that `megatron_train` takes, for all tests of a file."""
    from tests.trainers.megatron_models import write_models

    path = tmp_path_factory.mktemp("megatron")
    write_models(path)
    return path
