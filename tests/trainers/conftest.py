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
