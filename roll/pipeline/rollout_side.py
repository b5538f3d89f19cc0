"""The part that the pipelines do not share: the source of groups and the rollout of one group.

Everything else (scheduler, engine, trainer, stages, weight update) is common code. A pipeline contributes a *plan*,
which is found and checked before anything starts. The plan builds the *side* that runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from roll.data.records import Group
from roll.engines.base import Completion, GenerateRequest
from roll.rollout.scheduler import GroupRequest

if TYPE_CHECKING:
    from roll.configs.run import PipelineConfig
    from roll.pipeline.preflight import Prepared
    from roll.pipeline.validation import ValidationResult
    from roll.runtime.actors import WorkerHandle
    from roll.runtime.locks import DeviceLock
    from roll.runtime.placement import Placement
    from roll.tracking.run_directory import RunDirectory


class Generator(Protocol):
    """An object that runs generation requests."""

    async def generate(
        self, request: GenerateRequest, *, sticky_key: str | None = None, min_version: int | None = None
    ) -> Completion:
        """Run a request to its end on an engine that holds ``min_version`` or newer.

        All requests with one ``sticky_key`` go to the same engine.
        """

    def forget(self, sticky_key: str) -> None:
        """Drop the routing of this key; no request with it will follow."""


class WorkerProcesses(Protocol):
    """The processes of a rollout side: reward workers and models, or environment workers.

    They recover from failures by themselves. A failure that they cannot recover from ends the rollouts that need them.
    """

    async def start(self) -> None:
        """Start all processes. Wrap waits for devices in `part`, since other roles wait for them at the same time."""

    async def shutdown(self) -> None:
        """End all processes."""

    def busy_spans(self) -> Mapping[str, Sequence[tuple[float, float]]]:
        """Return the recent spans of work by role, in seconds since the epoch."""


class Validator(Protocol):
    """Validator that measures one policy version."""

    async def run(self, version: int) -> ValidationResult:
        """Generate and judge the whole validation set."""


class RolloutSide(Protocol):
    """The rollout side of a running pipeline."""

    @property
    def workers(self) -> WorkerProcesses:
        """The processes that run beside the driver."""

    sample_metrics: str
    """First part of the names of the metrics that samples carry; ``{domain}`` stands for their domain tag."""

    def canary_prompts(self) -> Sequence[np.ndarray]:
        """Return token sequences (int32) for the log-probability parity check of trainer and engines."""

    def source(self) -> Iterator[Any]:
        """Return the item that each group starts from, in order."""

    def rollout(self, generator: Generator) -> Callable[[GroupRequest[Any]], Awaitable[Group]]:
        """Return the function that makes a training group."""

    def validator(self, generator: Generator) -> Validator | None:
        """Return the validator; None if this run does not validate."""

    def handles(self) -> Sequence[WorkerHandle]:
        """Return the current processes that have models on devices."""

    def metrics(self) -> dict[str, float]:
        """Return totals of the worker processes for the record of a step.

        They change while work is done: a run in which nothing changes counts as stalled.
        """


@dataclass(frozen=True)
class RunDevices:
    """Devices and locks with which a rollout side may start processes."""

    placement: Placement
    locks: Mapping[str, DeviceLock]
    """Locks by role."""


class RolloutPlan(Protocol):
    """The rollout side as the preflight found and checked it."""

    def fingerprint(self, config: PipelineConfig) -> str:
        """Return a fingerprint of the items that groups are made of, in order.

        Two runs have the same fingerprint if group ``n`` is made of the same item in both.
        """

    def build(
        self, prepared: Prepared, run: RunDirectory, on_event: Callable[[str], None], devices: RunDevices
    ) -> RolloutSide:
        """Build the side. Starts nothing."""
