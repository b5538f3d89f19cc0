"""Trainers in processes of their own, as a run has them.

An engine may leave its mark on the process it runs in, so each trainer here has new ones (`nursery`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from roll.runtime.placement import free_port
from roll.trainers.base import build_forward_strategy, build_trainer
from roll.trainers.trainer import ForwardStrategy, TrainStrategy
from tests.trainers.nursery import RankFailed, on_ranks
from tests.trainers.trainers import trainer_setup

Work = Callable[[TrainStrategy, Any], Any] | Callable[[ForwardStrategy, Any], Any]
"""What a rank does with its trainer (or with what drives a forward-only role): a function of a test module, (trainer,
argument) -> a result to send back."""

Key = TypeVar("Key")

ENGINES = {"deepspeed_train": "deepspeed", "megatron_train": "megatron"}


@dataclass(frozen=True)
class Job:
    """One trainer, and what is done with it."""

    work: Work
    strategy: str
    model_path: str
    argument: Any = None
    setup: dict[str, Any] = field(default_factory=dict)
    """Changes to `trainer_setup`."""
    ranks: int = 2


def run_job(job: Job) -> list[Any]:
    """Results by rank."""
    return on_ranks(_train, job, ranks=job.ranks, engine=ENGINES.get(job.strategy, "torch"))


def run_here(job: Job) -> list[Any]:
    """Results of a job of one rank, in this process: for trainers that leave no mark on it."""
    assert job.ranks == 1 and job.strategy not in ENGINES
    return [_train(0, free_port(), job)]


class Results(Generic[Key]):
    """Results of jobs by rank. A job is run when they are first asked for, after the one that it ``follows``."""

    def __init__(self, jobs: Mapping[Key, Job], follows: Mapping[Key, Key] | None = None) -> None:
        self._jobs = jobs
        self._follows = follows or {}
        self._found: dict[Key, list[Any] | Exception] = {}

    def __getitem__(self, key: Key) -> list[Any]:
        if key not in self._found:
            if key in self._follows:
                self[self._follows[key]]
            try:
                self._found[key] = run_job(self._jobs[key])
            except RankFailed as failure:
                self._found[key] = failure
        found = self._found[key]
        if isinstance(found, Exception):
            raise found
        return found


def _train(rank: int, port: int, job: Job) -> Any:
    setup = trainer_setup(job.model_path, **{"rank": rank, "world_size": job.ranks, "port": port} | job.setup)
    build = build_forward_strategy if setup.forward_only else build_trainer
    trainer = build(job.strategy, setup)
    trainer.initialize()
    result = job.work(trainer, job.argument)
    trainer.shutdown()
    return result
