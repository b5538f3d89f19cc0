"""One rank among the others: its device and its process group.

Every trainer uses this code, so that a rank is found where the others expect it, and a collective that gets no answer
fails after a configured time.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from roll.strategies.train.setup import TrainerSetup


def pick_device(setup: TrainerSetup) -> torch.device:
    """Return the device of this rank, and make it the current one on GPUs."""
    if setup.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", setup.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_process_group(setup: TrainerSetup, timeout_seconds: float) -> None:
    """Join the process group of all ranks. Collective. ``timeout_seconds`` is the longest wait in a collective."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo",
        init_method=setup.rendezvous,
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def leave_process_group() -> None:
    """Leave the process group. Do nothing in a process that is in none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def joined_over_ranks(values: np.ndarray) -> np.ndarray:
    """Join the ``values`` of all ranks. Each rank has zeros where another one computed. Collective; changes its
    argument.

    An element is non-zero on one rank only, so this sum keeps every bit.
    """
    shared = torch.from_numpy(values)
    dist.all_reduce(shared)
    return shared.numpy()
