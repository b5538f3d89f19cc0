"""Common parts of the rollouts of both pipelines: interfaces, generation on shared devices, and validation.

The rollout side (the source of groups and the rollout of one group) is the only part that RLVR and agentic runs do not
share. A pipeline contributes a *plan*, which `preflight` finds and checks before anything starts, and which builds the
side.

The gate holds the engine's devices while requests are running. When another role waits for them, the gate lets go, and
the device lock interrupts the requests by putting the engine to sleep. They continue when the gate has the devices
again. An engine with devices of its own is never interrupted.

Validation measures one policy version. It runs inside the stage that publishes weights, so no newer version can arrive
before it ends; or on replicas that keep the version, beside the stages (`roll.pipeline.records`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
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


class RolloutSide(Protocol):
    """The rollout side of a running pipeline."""

    workers: WorkerProcesses
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
        return ()

    def metrics(self) -> dict[str, float]:
        """Return totals of the worker processes for the record of a step.

        The totals change while work is done, and a run in which nothing changes counts as stalled.
        """


class EngineGate(Generator):
    """Generator that lets requests of rollouts and validation through while the engine holds its devices."""

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

        If other roles use the devices one after the other for a batch, the gate waits until all of them are done. Runs
        until cancelled.
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


class Pace:
    """A limit on how many groups begin in one turn of the event loop: a step may allow thousands at once.

    They begin in the order in which they ask.
    """

    def __init__(self, most: int) -> None:
        """Let at most so many begin in a turn."""
        self._most = most
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait for a turn of the event loop that has room."""
        loop = asyncio.get_running_loop()
        if self._begun == 0:
            loop.call_soon(self._next_turn)
        elif self._begun >= self._most:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        self._begun += 1

    def _next_turn(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._most:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_turn)


@dataclass(frozen=True)
class ValidationGenerator(Generator):
    """Generator of a validation: its requests go to the replicas that keep the validated version, if some do."""

    gate: EngineGate

    async def generate(
        self, request: GenerateRequest, *, sticky_key: str | None = None, min_version: int | None = None
    ) -> Completion:
        return await self.gate.generate(request, sticky_key=sticky_key, min_version=min_version, pinned=True)

    def forget(self, sticky_key: str) -> None:
        self.gate.forget(sticky_key)


def sampling_params(arguments: GeneratingArguments, response_length: int) -> SamplingParams:
    """Return the engine's parameters for the configured ones; the seed is set per request."""
    return SamplingParams(
        max_new_tokens=arguments.max_new_tokens or response_length,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        stop_strings=tuple(arguments.stop_strings),
        ignore_eos=arguments.ignore_eos,
    )


def has_score_variance(group: Group) -> bool:
    """Return True if the samples of a group differ in score. Otherwise a group baseline learns nothing from them."""
    return bool(np.ptp(group.scores) > 0)


@dataclass
class ValidationResult:
    """Metrics of a validation by name, and the groups behind them."""

    version: int
    metrics: dict[str, float]
    groups: list[Group]
    episodes: Sequence[Episode] = ()
    """All episodes that were played, if the validation plays environments."""


class MixedVersions(AssertionError):
    """A validation saw tokens of a version other than the one it measures."""


@dataclass(frozen=True)
class Validator(ABC):
    """Validator that measures one policy version."""

    timeout_seconds: float = field(kw_only=True)
    attempts: int = field(kw_only=True)
    """Number of tries per group."""
    on_event: Callable[[str], None] = field(kw_only=True)

    async def run(self, version: int) -> ValidationResult:
        """Generate and judge the whole validation set.

        Raises `TimeoutError` at the deadline and `MixedVersions` if the weights changed meanwhile.
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
        """Generate and judge the validation set, however long it takes."""

    async def made(self, count: int, make: Callable[[int], Awaitable[Made]]) -> dict[int, Made]:
        """Return the result of ``make`` for each group number below ``count``, without the groups that keep failing.

        A failed group is tried again as in training; groups that fail each time are reported. Raises the first failure
        if no group could be made, and a fatal error at once.
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
