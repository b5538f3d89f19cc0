"""A reward worker: one process that judges responses, with a time limit for each.

A plain verifier runs in the process's main thread, one response after the other, under an alarm. This suits verifiers
that compute or use signals themselves. An async verifier judges all its responses concurrently. This suits verifiers
that wait. If no alarm can interrupt a call (a long C call), the driver replaces the process.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from roll.configs.derived import reward_timeout
from roll.configs.rewards import RewardConfig
from roll.rewards.base import RewardGaveUp, RewardInput, RewardOutput
from roll.rewards.registry import Verifier, checked_output, resolve_verifier
from roll.runtime.process import DriverFolders

ALARM_REPEAT_SECONDS = 1.0
"""Interval of repeated alarms, for a verifier that swallows the first one."""

VerdictKind = Literal["judged", "error", "gave_up", "timeout", "unjudged"]


@dataclass(frozen=True)
class Verdict:
    """Outcome of judging one response."""

    kind: VerdictKind
    """``gave_up``: an error that a retry would not cure; ``unjudged``: the call ended before this response's turn."""
    output: RewardOutput | None = None
    cause: str = ""
    seconds: float = 0.0


class _TimeIsUp(BaseException):
    """Raised by the alarm. Not an `Exception`, because verifiers and the libraries they use catch those."""


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


def judge_one(verifier: Verifier, record: RewardInput, timeout_seconds: float) -> Verdict:
    """Judge a response with a plain verifier. Works only in a main thread, whose alarm it uses."""
    started = time.perf_counter()
    try:
        with _alarm(timeout_seconds):
            output = checked_output(verifier.name, verifier(record))
    except _TimeIsUp:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may have rung just as it was being switched off
        cause = f"no answer within {timeout_seconds:g} s"
        return Verdict("timeout", cause=cause, seconds=time.perf_counter() - started)
    except Exception as error:
        return _failed(error, time.perf_counter() - started)
    return Verdict("judged", output, seconds=time.perf_counter() - started)


def judge_all(verifier: Verifier, records: Sequence[RewardInput], timeout_seconds: float) -> list[Verdict]:
    """Judge responses one after the other.

    No response is begun later than ``timeout_seconds`` after the first. So a call never lasts longer than two limits,
    however many responses it has, and the driver can tell a stuck process from a long list.
    """
    started = time.perf_counter()
    verdicts = []
    for record in records:
        if time.perf_counter() - started > timeout_seconds:
            verdicts.append(Verdict("unjudged"))
        else:
            verdicts.append(judge_one(verifier, record, timeout_seconds))
    return verdicts


async def judge_one_async(verifier: Verifier, record: RewardInput, timeout_seconds: float) -> Verdict:
    """Judge a response with an async verifier."""
    started = time.perf_counter()
    limit = asyncio.timeout(timeout_seconds)
    try:
        async with limit:
            output = checked_output(verifier.name, await verifier(record))
    except Exception as cause:
        seconds = time.perf_counter() - started
        if limit.expired():
            return Verdict("timeout", cause=f"no answer within {timeout_seconds:g} s", seconds=seconds)
        return _failed(cause, seconds)
    return Verdict("judged", output, seconds=time.perf_counter() - started)


def _failed(cause: Exception, seconds: float) -> Verdict:
    kind: VerdictKind = "gave_up" if isinstance(cause, RewardGaveUp) else "error"
    return Verdict(kind, cause=f"{type(cause).__name__}: {cause}", seconds=seconds)


def _prepare(config: RewardConfig, path: str, folders: DriverFolders, secrets: Mapping[str, str]) -> Verifier:
    folders.enter()
    os.environ.update(secrets)
    verifier = resolve_verifier(config, path)
    for module in verifier.requires:
        importlib.import_module(module)
    return verifier


class RewardWorker:
    """Body of a plain verifier's worker process (a Ray actor; its methods run in the main thread)."""

    def __init__(self, config: RewardConfig, path: str, folders: DriverFolders, secrets: Mapping[str, str]) -> None:
        self._verifier = _prepare(config, path, folders, secrets)
        self._timeout_seconds = reward_timeout(config)

    def ready(self) -> None:
        """Return once the verifier is loaded."""

    def judge(self, records: Sequence[RewardInput]) -> list[Verdict]:
        """Return one verdict per response."""
        return judge_all(self._verifier, records, self._timeout_seconds)


class AsyncRewardWorker:
    """Body of an async verifier's worker process (an async Ray actor: any number of calls at once)."""

    def __init__(self, config: RewardConfig, path: str, folders: DriverFolders, secrets: Mapping[str, str]) -> None:
        self._verifier = _prepare(config, path, folders, secrets)
        self._timeout_seconds = reward_timeout(config)

    async def ready(self) -> None:
        """Return once the verifier is loaded."""

    async def judge(self, records: Sequence[RewardInput]) -> list[Verdict]:
        """Judge all responses concurrently, and return one verdict per response."""
        return await asyncio.gather(
            *(judge_one_async(self._verifier, record, self._timeout_seconds) for record in records)
        )
