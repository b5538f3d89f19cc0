"""What the pipelines do not share: where groups come from and how one comes about.

Everything else (scheduler, engine, trainer, stages, publication) is one code. A pipeline contributes a *plan*, found
and checked before anything starts, which builds the *side* that runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from roll.data.records import Group
from roll.rollout.schedule import Ticket
from roll.strategies.infer.base import Completion, GenerateRequest

if TYPE_CHECKING:
    from roll.configs.schema import PipelineConfig
    from roll.distributed.group import WorkerHandle
    from roll.distributed.placement import Placement
    from roll.pipeline.device_lock import DeviceLock
    from roll.pipeline.preflight import Prepared
    from roll.pipeline.validation import ValidationResult
    from roll.tracking.run_directory import RunDirectory


class Generator(Protocol):
    """Anything that runs requests."""

    async def generate(
        self, request: GenerateRequest, *, sticky_key: str | None = None, min_version: int | None = None
    ) -> Completion:
        """Run a request to its end; all with one ``sticky_key`` on one engine, which holds ``min_version`` or newer."""

    def forget(self, sticky_key: str) -> None:
        """No request with this key will come any more."""


class WorkerProcesses(Protocol):
    """The processes of a rollout side: reward workers and models, or environment workers. They look after themselves;
    what they cannot recover from ends the rollouts that need them."""

    async def start(self) -> None:
        """What waits for devices here is a `part` of the start: others wait for these devices at the same time."""

    async def shutdown(self) -> None:
        """End all processes."""

    def busy_spans(self) -> Mapping[str, Sequence[tuple[float, float]]]:
        """When they lately worked, by role, in seconds since the epoch."""


class Validator(Protocol):
    """Measures one policy version."""

    async def run(self, version: int) -> ValidationResult:
        """Generate and judge the whole validation set."""


class RolloutSide(Protocol):
    """The rollout side of a running pipeline."""

    @property
    def workers(self) -> WorkerProcesses:
        """What runs beside the driver."""

    sample_metrics: str
    """First part of the names of the metrics that samples carry; ``{domain}`` stands for their domain tag."""

    def canary_prompts(self) -> Sequence[np.ndarray]:
        """Token sequences (int32) to compare trainer and engines on."""

    def source(self) -> Iterator[Any]:
        """What each group starts from, in order."""

    def rollout(self, generator: Generator) -> Callable[[Ticket[Any]], Awaitable[Group]]:
        """How a training group comes about."""

    def validator(self, generator: Generator) -> Validator | None:
        """None: this run does not validate."""

    def handles(self) -> Sequence[WorkerHandle]:
        """Its processes that have models on devices, at this moment."""

    def metrics(self) -> dict[str, float]:
        """Totals of the worker processes, for the record of a step. While work is done they change: a run in which
        nothing changes is taken for stalled."""


@dataclass(frozen=True)
class RunDevices:
    """Where a rollout side may start processes that compute on devices."""

    placement: Placement
    locks: Mapping[str, DeviceLock]
    """By role."""


class RolloutPlan(Protocol):
    """What the preflight found for the rollout side."""

    def fingerprint(self, config: PipelineConfig) -> str:
        """Of what groups are made of, in their order: equal for runs whose group ``n`` is made of the same."""

    def build(
        self, prepared: Prepared, run: RunDirectory, on_event: Callable[[str], None], devices: RunDevices
    ) -> RolloutSide:
        """The side itself. Starts nothing."""
