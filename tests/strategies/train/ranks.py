"""Trainers in processes of their own, as a run has them.

An engine may leave its mark on the process it runs in (DeepSpeed replaces functions of torch), so what is not torch's
own never runs in the process of the tests. Processes are started once for many trainers, one after the other: starting
them takes longer than a tiny model's steps.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from roll.strategies.train import build_train_strategy
from roll.strategies.train.base import TrainStrategy
from tests.strategies.train.trainers import free_ports, trainer_setup

Work = Callable[[TrainStrategy, Any], Any]
"""What a rank does with its trainer: a function of a test module, (trainer, argument) -> a result to send back."""


@dataclass(frozen=True)
class Job:
    """One trainer, and what is done with it."""

    work: Work
    strategy: str
    model_path: str
    argument: Any = None
    setup: dict[str, Any] = field(default_factory=dict)
    """Changes to `trainer_setup`."""


def run_jobs(jobs: list[Job], world_size: int, folder: Path) -> list[list[Any]]:
    """Results by job and rank."""
    folder.mkdir(exist_ok=True)
    ports = free_ports(len(jobs))
    torch.multiprocessing.spawn(_run_rank, (jobs, world_size, ports, str(folder)), nprocs=world_size)
    by_rank = [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(world_size)]
    return [list(results) for results in zip(*by_rank, strict=True)]


def _run_rank(rank: int, jobs: list[Job], world_size: int, ports: list[int], folder: str) -> None:
    torch.set_num_threads(1)
    results = []
    # Each has a port of its own: the other rank may still be leaving the trainer before.
    for job, port in zip(jobs, ports, strict=True):
        setup = trainer_setup(job.model_path, **{"rank": rank, "world_size": world_size, "port": port} | job.setup)
        trainer = build_train_strategy(job.strategy, setup)
        trainer.initialize()
        results.append(job.work(trainer, job.argument))
        trainer.shutdown()
    (Path(folder) / f"rank{rank}").write_bytes(pickle.dumps(results))
