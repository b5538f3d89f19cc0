"""Trainers in processes of their own, as a run has them.

An engine may leave its mark on the process it runs in (DeepSpeed replaces functions of torch), so what is not torch's
own never runs in the process of the tests. Processes are started once for many trainers, one after the other: starting
them takes longer than a tiny model's steps.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from roll.data.ports import free_port
from roll.strategies.train import build_forward_strategy, build_train_strategy
from roll.strategies.train.base import ForwardStrategy, TrainStrategy
from tests.strategies.train import megatron_cpu_shim
from tests.strategies.train.trainers import trainer_setup

Work = Callable[[TrainStrategy, Any], Any] | Callable[[ForwardStrategy, Any], Any]
"""What a rank does with its trainer (or with what drives a forward-only role): a function of a test module, (trainer,
argument) -> a result to send back."""


@dataclass(frozen=True)
class Job:
    """One trainer, and what is done with it."""

    work: Work
    strategy: str
    model_path: str
    argument: Any = None
    setup: dict[str, Any] = field(default_factory=dict)
    """Changes to `trainer_setup`."""
    ranks: int | None = None
    """How many of the processes have a rank of it; None: all."""


def run_jobs(jobs: list[Job], world_size: int, folder: Path) -> list[list[Any]]:
    """Results by job and rank. Jobs with megatron_train are to come last: what it needs on a CPU stays in a process."""
    folder.mkdir(exist_ok=True)
    context = torch.multiprocessing.get_context("spawn")
    meeting = Meeting(context.Barrier(world_size), context.Value("i"))
    torch.multiprocessing.spawn(_run_rank, (jobs, world_size, meeting, str(folder)), nprocs=world_size)
    by_rank = [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(world_size)]
    by_job = zip(*by_rank, strict=True)
    return [list(results[: job.ranks]) for job, results in zip(jobs, by_job, strict=True)]


@dataclass(frozen=True)
class Meeting:
    """Where ranks agree on a port, just before it is used: one chosen long before may be taken by then."""

    everybody: Barrier
    port: Synchronized[int]

    def next_port(self, rank: int) -> int:
        """Of the next trainer; all ranks have left the one before."""
        self.everybody.wait()
        if rank == 0:
            self.port.value = free_port()
        self.everybody.wait()
        return self.port.value


def _run_rank(rank: int, jobs: list[Job], world_size: int, meeting: Meeting, folder: str) -> None:
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        ranks = job.ranks or world_size
        place = {"rank": rank, "world_size": ranks, "port": meeting.next_port(rank)}
        if rank >= ranks:
            results.append(None)
            continue
        if job.strategy == "megatron_train":
            megatron_cpu_shim.install()
        setup = trainer_setup(job.model_path, **place | job.setup)
        build = build_forward_strategy if setup.forward_only else build_train_strategy
        trainer = build(job.strategy, setup)
        trainer.initialize()
        results.append(job.work(trainer, job.argument))
        trainer.shutdown()
    (Path(folder) / f"rank{rank}").write_bytes(pickle.dumps(results))
