"""A reward worker: one process that judges responses, with a limit on the time of each.

A plain verifier runs in the process' main thread, one response after the other, under an alarm: the way for anything
that computes or uses signals itself. An async verifier has all its responses in flight at once: the way for anything
that waits. What no alarm can end (a long C call) the driver ends, by replacing the process.
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
from roll.configs.schema import RewardConfig
from roll.rewards.records import RewardGaveUp, RewardInput, RewardOutput
from roll.rewards.registry import Verifier, checked_output, make_importable, resolve_verifier

ALARM_REPEAT_SECONDS = 1.0
"""A verifier that swallows the alarm gets another one."""

VerdictKind = Literal["judged", "error", "gave_up", "timeout", "unjudged"]


@dataclass(frozen=True)
class Verdict:
    """How judging one response ended."""

    kind: VerdictKind
    """``gave_up``: an error after which another attempt is not worth it; ``unjudged``: the call ended before this
    response had its turn."""
    output: RewardOutput | None = None
    cause: str = ""
    seconds: float = 0.0


class _TimeIsUp(BaseException):
    """Not an `Exception`: verifiers and the libraries they use catch those."""


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
    """Judge a response with a plain verifier. Only in a main thread, whose alarm it takes."""
    started = time.perf_counter()
    try:
        with _alarm(timeout_seconds):
            output = checked_output(verifier.name, verifier(record))
    except _TimeIsUp:
        signal.setitimer(signal.ITIMER_REAL, 0)  # it may have rung just as the alarm was being switched off
        cause = f"no answer within {timeout_seconds:g} s"
        return Verdict("timeout", cause=cause, seconds=time.perf_counter() - started)
    except Exception as error:
        return _failed(error, time.perf_counter() - started)
    return Verdict("judged", output, seconds=time.perf_counter() - started)


def judge_all(verifier: Verifier, records: Sequence[RewardInput], timeout_seconds: float) -> list[Verdict]:
    """Judge responses one after the other.

    No response is begun later than ``timeout_seconds`` after the first, so no call lasts longer than two limits,
    however many responses it has: the driver can tell a stuck process from a long list.
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


def _prepare(
    config: RewardConfig, path: str, import_folders: Sequence[str], secrets: Mapping[str, str]
) -> Verifier:
    make_importable(import_folders)
    os.environ.update(secrets)
    verifier = resolve_verifier(config, path)
    for module in verifier.requires:
        importlib.import_module(module)
    return verifier


class RewardWorker:
    """Body of the worker process of a plain verifier (a Ray actor; its methods run in the main thread)."""

    def __init__(
        self, config: RewardConfig, path: str, import_folders: Sequence[str], secrets: Mapping[str, str]
    ) -> None:
        self._verifier = _prepare(config, path, import_folders, secrets)
        self._timeout_seconds = reward_timeout(config)

    def ready(self) -> None:
        """Returns once the verifier is loaded."""

    def judge(self, records: Sequence[RewardInput]) -> list[Verdict]:
        """One verdict per response."""
        return judge_all(self._verifier, records, self._timeout_seconds)


class AsyncRewardWorker:
    """Body of the worker process of an async verifier (an async Ray actor: any number of calls at once)."""

    def __init__(
        self, config: RewardConfig, path: str, import_folders: Sequence[str], secrets: Mapping[str, str]
    ) -> None:
        self._verifier = _prepare(config, path, import_folders, secrets)
        self._timeout_seconds = reward_timeout(config)

    async def ready(self) -> None:
        """Returns once the verifier is loaded."""

    async def judge(self, records: Sequence[RewardInput]) -> list[Verdict]:
        """One verdict per response, all of them judged at once."""
        return await asyncio.gather(
            *(judge_one_async(self._verifier, record, self._timeout_seconds) for record in records)
        )
