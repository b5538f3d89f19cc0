"""Common parts of the rollouts of all pipelines: interfaces, generation on shared devices, and validation.

The rollout side (the source of prompts or tasks, and the function that makes a group) is the only part in which the
pipelines differ. A pipeline contributes a *plan*, which `preflight` builds and checks before anything starts.

The gate holds the engine's devices while requests are running. When another role waits for the devices, the gate
releases them, and the device lock interrupts the requests by putting the engine to sleep. The requests continue once
the gate holds the devices again. An engine that shares no devices is never interrupted.

Validation measures one policy version. It runs either within the stage that publishes weights, so no newer version can
arrive before it ends, or in parallel to the stages on replicas pinned to the version (`roll.pipeline.records`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from roll.agentic.episode import Episode
from roll.configs.roles import GeneratingArguments
from roll.data.records import Group
from roll.engines.base import Completion, GenerateRequest, SamplingParams
from roll.rollout.scheduler import GroupRequest, is_fatal
from roll.tracking.waits import waiting

if TYPE_CHECKING:
    from roll.engines.pool import InferencePool
    from roll.runtime.locks import DeviceLock
    from roll.runtime.workers import WorkerHandle

Made = TypeVar("Made")

logger = logging.getLogger(__name__)


class Generator(Protocol):
    """Interface that runs generation requests on an engine."""

    async def generate(
        self, request: GenerateRequest, *, sticky_key: str | None = None, min_version: int | None = None
    ) -> Completion:
        """Run a request to completion on an engine with version ``min_version`` or newer.

        All requests with the same ``sticky_key`` go to the same engine.
        """

    def forget(self, sticky_key: str) -> None:
        """Drop the routing of a sticky key that will not be used again."""


class WorkerProcesses(Protocol):
    """Worker processes of a rollout side: reward workers and reward models, or environment workers.

    They recover from failures themselves. If they cannot, the rollouts that need them fail.
    """

    async def start(self) -> None:
        """Start all processes. Wrap waits for devices in `part`, since other roles wait for the same devices."""

    async def shutdown(self) -> None:
        """End all processes."""

    def busy_spans(self) -> Mapping[str, Sequence[tuple[float, float]]]:
        """Return the recent busy spans by role, as (start, end) in seconds since the epoch."""

    def cpu_seconds(self) -> Mapping[str, Mapping[Hashable, float]]:
        """Return the processor seconds so far, by role and process, of those that tell."""
        return {}


class RolloutSide(Protocol):
    """The part of a run that produces groups; it differs between pipelines."""

    workers: WorkerProcesses
    """Its processes, apart from the driver and the engines."""
    sample_metrics: str
    """Prefix for metrics of samples; ``{domain}`` in it is replaced by the sample's domain."""

    def canary_prompts(self) -> Sequence[np.ndarray]:
        """Return token sequences (int32) for the log-probability parity check between trainer and engines."""

    def source(self) -> Iterator[Any]:
        """Return an iterator over the prompts or tasks of the groups, in order."""

    def rollout(self, generator: Generator) -> Callable[[GroupRequest[Any]], Awaitable[Group]]:
        """Return the coroutine function that makes a training group."""

    def validator(self, generator: Generator) -> Validator | None:
        """Return the validator, or None if this run does not validate."""

    def handles(self) -> Sequence[WorkerHandle]:
        """Return the current processes that have models on devices."""
        return ()

    def metrics(self) -> dict[str, float]:
        """Return totals of the worker processes, to record with a step.

        Totals must change while work is done, because a run without any change counts as stalled.
        """


class EngineGate(Generator):
    """Generator that holds back requests while another role uses the engine's devices."""

    def __init__(self, pool: InferencePool, lock: DeviceLock, role: str) -> None:
        self._pool = pool
        self._lock = lock
        self._role = role
        self._requests = 0
        self._demanded = asyncio.Event()
        self._idle = asyncio.Event()
        self._open = asyncio.Event()

    async def generate(
        self,
        request: GenerateRequest,
        *,
        sticky_key: str | None = None,
        min_version: int | None = None,
        pinned: bool = False,
    ) -> Completion:
        self._requests += 1
        self._demanded.set()
        self._idle.clear()
        try:
            if not self._open.is_set():
                with waiting("gate", "the engine to have its devices"):
                    await self._open.wait()
            return await self._pool.generate(request, sticky_key=sticky_key, min_version=min_version, pinned=pinned)
        finally:
            self._requests -= 1
            if self._requests == 0:
                self._demanded.clear()
                self._idle.set()

    def forget(self, sticky_key: str) -> None:
        self._pool.forget(sticky_key)

    async def run(self) -> None:
        """Hold the engine's devices while there are requests, and release them when another role waits for them.

        If several roles use the devices in turn for one batch, wait until all of them are done. Runs until cancelled.
        """
        while True:
            await self._demanded.wait()
            await self._lock.quiet(self._role)
            async with self._lock.hold(self._role):
                self._open.set()
                waits = [asyncio.ensure_future(wait) for wait in (self._idle.wait(), self._lock.wait_contended())]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._open.clear()
                    for wait in waits:
                        wait.cancel()


@dataclass(frozen=True)
class ValidationGenerator(Generator):
    """Generator for validation requests. They go to the replicas that are pinned to the validated version, if any."""

    gate: EngineGate

    async def generate(
        self, request: GenerateRequest, *, sticky_key: str | None = None, min_version: int | None = None
    ) -> Completion:
        return await self.gate.generate(request, sticky_key=sticky_key, min_version=min_version, pinned=True)

    def forget(self, sticky_key: str) -> None:
        self.gate.forget(sticky_key)


def sampling_params(arguments: GeneratingArguments, response_length: int) -> SamplingParams:
    """Convert the configured arguments to sampling parameters. The seed is set per request."""
    return SamplingParams(
        max_new_tokens=arguments.max_new_tokens or response_length,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        stop_strings=tuple(arguments.stop_strings),
        ignore_eos=arguments.ignore_eos,
    )


def has_score_variance(group: Group) -> bool:
    """Return True if the scores of a group differ. Otherwise all its group-relative advantages are 0."""
    return bool(np.ptp(group.scores) > 0)


@dataclass
class ValidationResult:
    """Metrics of a validation by name, and its groups."""

    version: int
    metrics: dict[str, float]
    groups: list[Group]
    episodes: Sequence[Episode] = ()
    """All episodes, if the validation runs in environments."""


class MixedVersions(AssertionError):
    """A validation generated tokens with another version than the one it measures."""


@dataclass(frozen=True)
class Validator(ABC):
    """Generates and scores the validation set with one policy version."""

    timeout_seconds: float = field(kw_only=True)
    attempts: int = field(kw_only=True)
    """Maximum number of attempts per group."""
    on_event: Callable[[str], None] = field(kw_only=True)

    async def run(self, version: int) -> ValidationResult:
        """Run the validation set with ``version``.

        Raises `TimeoutError` at the deadline, and `MixedVersions` if the weights changed in the meantime.
        """
        try:
            async with asyncio.timeout(self.timeout_seconds):
                result = await self.measure(version)
        except TimeoutError:
            raise TimeoutError(
                f"validation of version {version} did not end within {self.timeout_seconds:g} s "
                "(validation.timeout_seconds)"
            ) from None
        for sample in (sample for group in result.groups for sample in group.samples):
            seen = set(np.unique(sample.versions[sample.response_mask]).tolist())
            if seen - {version}:
                raise MixedVersions(f"validation of version {version} saw tokens of versions {sorted(seen)}")
        return result

    @abstractmethod
    async def measure(self, version: int) -> ValidationResult:
        """Generate and score the validation set, without a deadline."""

    async def made(self, count: int, make: Callable[[int], Awaitable[Made]]) -> dict[int, Made]:
        """Call ``make`` for each group number below ``count``; return the results of the groups that succeed.

        Failed groups are retried; those that fail every attempt are reported. If all groups fail, raises the first
        failure. Fatal errors are raised at once.
        """
        failures: list[Exception] = []

        async def try_to_make(number: int) -> Made | None:
            for attempt in range(1, self.attempts + 1):
                try:
                    return await make(number)
                except Exception as error:
                    if is_fatal(error):
                        raise
                    logger.info("attempt %d of group %d of the validation failed: %r", attempt, number, error)
                    failure = error
            failures.append(failure)
            return None

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(try_to_make(number)) for number in range(count)]
        if failures:
            self.on_event(f"validation: {len(failures)} of {count} groups failed; the first: {failures[0]}")
        if len(failures) == count > 0:
            raise failures[0]
        outcomes = {number: task.result() for number, task in enumerate(running)}
        return {number: outcome for number, outcome in outcomes.items() if outcome is not None}
