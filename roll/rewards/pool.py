"""A pool of processes that judge responses with a verifier, and replace processes that fail.

Every call ends before a deadline in one of three ways: an output for every response, `RewardFailed` naming reward,
prompt and cause, or cancellation. A process that dies or hangs is replaced. The responses it was judging are judged
again, one by one if needed, so a response that kills its process does not make others fail.

A plain verifier runs in the main thread of its process, one response after the other, with an alarm as time limit. This
suits verifiers that compute. An async verifier judges all its responses concurrently. This suits verifiers that wait.
If the alarm cannot interrupt a call (a long C call), the driver replaces the process.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import ray

from roll.configs.derived import reward_timeout
from roll.configs.errors import count
from roll.configs.rewards import RewardConfig
from roll.rewards.base import RewardFailed, RewardGaveUp, RewardInput, RewardOutput
from roll.rewards.registry import RewardNonsense, Verifier, checked_output, resolve_verifier
from roll.runtime.pool import Slot, Tasks, all_or_none, ignore_failure
from roll.runtime.process import DriverFolders, driver_folders
from roll.runtime.workers import CALL_ERRORS, ProcessHandle, WorkerFailed, WorkerTimeout
from roll.tracking.timeline import BusySpans

ALARM_REPEAT_SECONDS = 1.0
"""Interval at which the alarm repeats, in case a verifier catches the first one."""
ASYNC_CALLS_PER_WORKER = 256
"""Largest number of calls in one process of an async verifier at a time; each may have many responses."""
START_TIMEOUT_SECONDS = 120.0
KILL_GRACE_SECONDS = 5.0
"""Extra time after a limit before an unresponsive process is killed."""

VerdictKind = Literal["judged", "error", "gave_up", "timeout", "unjudged"]


@dataclass(frozen=True)
class Verdict:
    """Outcome of judging one response."""

    kind: VerdictKind
    """``gave_up``: an error for which a retry is useless. ``unjudged``: the call ended before this response's turn."""
    output: RewardOutput | None = None
    cause: str = ""
    seconds: float = 0.0


class _TimeIsUp(BaseException):
    """The error that the alarm raises. It is not an `Exception`, which verifiers and their libraries might catch."""


def _ring(signal_number: int, frame: FrameType | None) -> None:
    raise _TimeIsUp


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_REPEAT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Process:
    """Base class of the Ray actors."""

    def __init__(self, config: RewardConfig, path: str, folders: DriverFolders, secrets: Mapping[str, str]) -> None:
        folders.enter()
        os.environ.update(secrets)
        self._verifier = resolve_verifier(config, path)
        for module in self._verifier.requires:
            importlib.import_module(module)
        if self._verifier.prepared is not None:
            self._verifier.prepared.load()
        self._timeout_seconds = reward_timeout(config)

    def _output(self, value: Any) -> RewardOutput:
        return checked_output(self._verifier.name, value, self._verifier.weights)

    def _failed(self, error: BaseException, timed_out: bool) -> Verdict:
        if timed_out:
            return Verdict("timeout", cause=f"no answer within {self._timeout_seconds:g} s")
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, RewardGaveUp):
            return Verdict("gave_up", cause=cause)
        if not isinstance(error, RewardNonsense) and error.__traceback__ is not None:
            at = traceback.extract_tb(error.__traceback__)[-1]
            cause = f"{cause} ({Path(at.filename).name}:{at.lineno}, in `{at.name}`)"
        return Verdict("error", cause=cause)


class RewardWorker(_Process):
    """Ray actor of a plain verifier. Its methods run in the main thread, because only that can use the alarm."""

    def judge(self, records: Sequence[RewardInput]) -> list[Verdict]:
        """Judge responses one after the other, and return one verdict per response.

        No response is begun after one time limit has passed since the start of the call. So a call never lasts longer
        than two time limits, however many responses it has, and the driver can recognise a stuck process.
        """
        started = time.perf_counter()
        verdicts = []
        for record in records:
            in_time = time.perf_counter() - started <= self._timeout_seconds
            verdicts.append(self._judge_one(record) if in_time else Verdict("unjudged"))
        return verdicts

    def _judge_one(self, record: RewardInput) -> Verdict:
        started = time.perf_counter()
        try:
            with _alarm(self._timeout_seconds):
                verdict = Verdict("judged", self._output(self._verifier(record)))
        except (_TimeIsUp, Exception) as error:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may have interrupted its own cancellation
            verdict = self._failed(error, timed_out=isinstance(error, _TimeIsUp))
        return replace(verdict, seconds=time.perf_counter() - started)


class AsyncRewardWorker(_Process):
    """Ray actor of an async verifier, with any number of calls at once."""

    async def judge(self, records: Sequence[RewardInput]) -> list[Verdict]:
        """Judge all responses concurrently, and return one verdict per response."""
        return await asyncio.gather(*map(self._judge_one, records))

    async def _judge_one(self, record: RewardInput) -> Verdict:
        started = time.perf_counter()
        limit = asyncio.timeout(self._timeout_seconds)
        try:
            async with limit:
                verdict = Verdict("judged", self._output(await self._verifier(record)))
        except Exception as error:
            verdict = self._failed(error, timed_out=limit.expired())
        return replace(verdict, seconds=time.perf_counter() - started)


@dataclass
class RewardCounts:
    """Totals over a run."""

    calls: int = 0
    samples: int = 0
    errors: int = 0
    """Number of attempts that ended with an exception, an invalid output, or the death of the process."""
    timeouts: int = 0
    restarts: int = 0
    """Number of worker processes replaced."""
    seconds: float = 0.0
    """Time that verifiers spent on responses."""


class RewardPool:
    """The processes of one reward."""

    def __init__(self, name: str, config: RewardConfig, *, actor_options: Mapping[str, Any] | None = None) -> None:
        """Resolve the verifier without starting anything.

        ``actor_options`` are Ray options of the actors, besides `num_cpus=0`. Raises `ConfigError` if the verifier
        cannot be resolved.
        """
        self.counts = RewardCounts()
        self.busy = BusySpans()
        self._name = name
        self._config = config
        self._path = f"rewards.{name}"
        self._verifier: Verifier = resolve_verifier(config, self._path)
        self._actor_options = actor_options or {}
        self._timeout_seconds = reward_timeout(config)
        self._slots = [self._slot(str(index)) for index in range(config.num_workers)]
        calls_per_worker = ASYNC_CALLS_PER_WORKER if self._verifier.is_async else 1
        calls = self._verifier.max_concurrency or config.num_workers * calls_per_worker
        self._free_calls = asyncio.Semaphore(calls)  # first come, first served
        self._quarantine = self._slot("quarantine")
        self._one_suspect = asyncio.Lock()
        self._tasks = Tasks(on_failure=ignore_failure)
        self._closed = False

    async def start(self) -> None:
        """Start the processes and load the verifier in each. Raises `RewardFailed` if one does not start."""
        try:
            await all_or_none(slot.filled() for slot in self._slots)
        except BaseException:
            await self.shutdown()
            raise

    async def score(self, records: Sequence[RewardInput]) -> list[RewardOutput]:
        """Judge responses, usually those of one group, and return outputs in the same order.

        Raises `RewardFailed` if one of them cannot be judged after all retries.
        """
        if self._verifier.max_concurrency is None or len(records) < 2:
            return await self._score_together(records)
        # The limit counts responses, so each response becomes a call of its own.
        outputs = await all_or_none(self._score_together([record]) for record in records)
        return [output for (output,) in outputs]

    async def _score_together(self, records: Sequence[RewardInput]) -> list[RewardOutput]:
        outputs: dict[int, RewardOutput] = {}
        failures = [0] * len(records)
        self.counts.samples += len(records)
        while pending := [index for index in range(len(records)) if index not in outputs]:
            verdicts = await self._attempt([records[index] for index in pending])
            for index, verdict in zip(pending, verdicts, strict=True):
                output = self._counted(verdict)
                if output is not None:
                    outputs[index] = output
                elif verdict.kind != "unjudged":
                    failures[index] += 1
                    if verdict.kind == "gave_up" or failures[index] > self._config.max_retries:
                        raise RewardFailed(
                            f"reward `{self._name}` (verifier `{self._verifier.name}`) could not judge a response to "
                            f"prompt {records[index].prompt_id} in {count(failures[index], 'attempt')}; the last one "
                            f"ended with: {verdict.cause}"
                        )
        return [outputs[index] for index in range(len(records))]

    async def shutdown(self) -> None:
        """Kill the processes and cancel running calls. May be called twice."""
        self._closed = True
        await self._tasks.cancel()
        await asyncio.gather(*(slot.close() for slot in (*self._slots, self._quarantine)))

    def _counted(self, verdict: Verdict) -> RewardOutput | None:
        """Count a verdict and return its output; None if it has none."""
        self.counts.errors += verdict.kind in ("error", "gave_up")
        self.counts.timeouts += verdict.kind == "timeout"
        self.counts.seconds += verdict.seconds
        if verdict.kind == "timeout" and self._verifier.timeout_score is not None:
            names = ("score", *self._verifier.weights)
            value = dict.fromkeys(names, self._verifier.timeout_score) | {"timeout": 1.0}
            return checked_output(self._verifier.name, value, self._verifier.weights)
        return verdict.output

    async def _attempt(self, records: list[RewardInput]) -> list[Verdict]:
        """Judge each response once. Responses for which the call had no time get the verdict `unjudged`."""
        if len(records) == 1 and not self._verifier.is_async:
            return [await self._judge_alone(records[0])]
        # A process of a plain verifier has the responses of one call only; one of an async verifier also has those of
        # other calls, one of which may be at fault. So there is a second attempt before each is judged in quarantine,
        # which is slow.
        for _ in range(2 if self._verifier.is_async else 1):
            try:
                return await self._judge(records)
            except CALL_ERRORS:
                continue
        return await asyncio.gather(*map(self._judge_alone, records))

    async def _judge_alone(self, record: RewardInput) -> Verdict:
        """Judge a response in a process that has no other one. If the process is lost, this response is at fault."""
        try:
            return (await self._judge([record], in_quarantine=self._verifier.is_async))[0]
        except WorkerTimeout:
            cause = f"no answer within {self._timeout_seconds:g} s, and the process had to be killed"
            return Verdict("timeout", cause=cause)
        except CALL_ERRORS as lost:
            return Verdict("error", cause=str(lost))

    async def _judge(self, records: list[RewardInput], *, in_quarantine: bool = False) -> list[Verdict]:
        """Make a call. If the caller is cancelled, the call continues, because its process stays busy.

        Raises one of `CALL_ERRORS` if the process is lost, and `RewardFailed` if the pool is closed.
        """
        self._check_open()
        return await asyncio.shield(self._tasks.start(self._call(records, in_quarantine)))

    async def _call(self, records: list[RewardInput], in_quarantine: bool) -> list[Verdict]:
        """Make one call within its deadline. Raises one of `CALL_ERRORS` if the process is lost.

        If the call raises an error in a process that stays alive, this is the verdict on each response of the call.
        """
        async with self._one_suspect if in_quarantine else self._free_calls:
            slot = self._quarantine if in_quarantine else min(self._slots, key=lambda each: each.calls)
            slot.calls += 1
            try:
                process = await slot.filled()
                self.counts.calls += 1
                # A call with several responses may take two time limits, see `RewardWorker.judge`.
                limits = 1 if len(records) == 1 or self._verifier.is_async else 2
                deadline = limits * self._timeout_seconds + KILL_GRACE_SECONDS
                try:
                    with self.busy.working():
                        return await process.call("judge", records, timeout=deadline)
                except CALL_ERRORS as error:
                    if isinstance(error, WorkerFailed) and not error.answer_lost:
                        return [Verdict("error", cause=error.cause) for _ in records]
                    was_there = await slot.lose(process)  # awaited before the sum, which other calls change meanwhile
                    self.counts.restarts += was_there
                    raise
            finally:
                slot.calls -= 1

    def _check_open(self) -> None:
        if self._closed:
            raise RewardFailed(f"reward `{self._name}` has been shut down")

    def _slot(self, name: str) -> Slot[ProcessHandle]:
        return Slot(partial(self._process, f"{self._path}/{name}"), self._started)

    def _process(self, name: str) -> ProcessHandle:
        self._check_open()
        body = AsyncRewardWorker if self._verifier.is_async else RewardWorker
        secrets = {name: os.environ[name] for name in self._verifier.secrets if name in os.environ}
        actor = ray.remote(body).options(**{"num_cpus": 0, **self._actor_options})
        return ProcessHandle(name, actor.remote(self._config, self._path, driver_folders(), secrets))

    async def _started(self, process: ProcessHandle) -> None:
        try:
            await process.ready(START_TIMEOUT_SECONDS)
        except CALL_ERRORS as cause:
            raise RewardFailed(f"a worker process of reward `{self._name}` did not start: {cause}") from cause
