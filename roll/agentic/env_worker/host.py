"""All environments of one process. No environment waits for another, and none is reused after a failure.

Every call of an environment (make, reset, step, render, close) runs in a thread with a deadline. An environment that
raises, does not return or gives an invalid answer is abandoned: it is closed in the background and never used again. An
environment whose calls all returned serves the next episode of its tag. Stuck threads and leaks cannot be repaired in a
running process. They are counted, and at a limit the host asks to be replaced.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium

from roll.agentic.env_worker.leaks import holdings
from roll.agentic.env_worker.records import EnvFactory, EnvFailure, EnvSpec, FailureKind, HostSettings, Observe
from roll.agentic.env_worker.threads import CallHung, CallThreads, Outcome
from roll.agentic.episode import Observation

logger = logging.getLogger(__name__)

TRACEBACK_FRAMES = 6


class Nonsense(Exception):
    """An environment's answer is not an observation."""


class CallFailed(Exception):
    """A call of an environment failed."""

    def __init__(self, kind: FailureKind, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind
        self.cause = cause


class EnvHost:
    """The environments of one process. Belongs to one event loop."""

    def __init__(
        self, specs: Mapping[str, EnvSpec], settings: HostSettings, make_env: EnvFactory, observe: Observe
    ) -> None:
        self.observe = observe
        self.counts = dict.fromkeys(("made", "reused", "closed", "close_failures"), 0)
        """See `Report.counts`."""
        self._specs = specs
        self._settings = settings
        self._make_env = make_env
        self._threads = CallThreads(settings.thread_stack_bytes)
        self._environments: dict[int, gymnasium.Env] = {}
        """All environments that are not abandoned, by identity, because an environment may be unhashable."""
        self._idle: dict[str, list[gymnasium.Env]] = {tag: [] for tag in specs}
        self._closing: set[asyncio.Task[None]] = set()
        self._at_first = holdings()

    def open(self, tag: str, frames: bool) -> HostSession:
        """Return a session. It has no environment before its first reset.

        With ``frames`` each observation has a frame, which costs a `render`. Raises `KeyError` for an unknown tag.
        """
        return HostSession(self, tag, self._specs[tag], frames)

    def retire_because(self) -> str | None:
        """Return why this process should be replaced; None if it should not."""
        limits = self._settings
        if self._threads.stuck > limits.max_stuck_threads:
            return f"{self._threads.stuck} threads are stuck in environments that do not return"
        grown = holdings() - self._at_first
        extra_threads = grown.threads - self._threads.count
        living = len(self._environments) + len(self._closing)
        if grown.open_files > limits.max_open_files + living * limits.files_per_environment:
            return f"{grown.open_files} files were opened and not closed"
        if extra_threads > limits.max_extra_threads + living * limits.threads_per_environment:
            return f"{extra_threads} threads were started by environments and have not ended"
        if grown.resident_bytes > limits.max_memory_growth_bytes:
            return f"its memory has grown by {grown.resident_bytes / 2**20:.0f} MiB"
        return None

    async def close(self) -> None:
        """Close every environment, whatever it is doing. Returns when all are closed or their time is up."""
        for environment in list(self._environments.values()):
            self.abandon(environment)
        while self._closing:
            await asyncio.wait(self._closing)
        self._threads.end()

    async def acquire(self, tag: str) -> gymnasium.Env:
        """Return an environment of a tag: the one that became idle last, or a new one. Raises `CallFailed`."""
        if self._idle[tag]:
            self.counts["reused"] += 1
            return self._idle[tag].pop()
        spec = self._specs[tag]
        make = partial(self._make_env, spec.env_type, spec.env_config)
        limit = Limit("making it", "reset_timeout_seconds", spec.reset_timeout_seconds)
        environment = await self.call(make, limit, on_late=self._close_late)
        self.counts["made"] += 1
        self._environments[id(environment)] = environment
        return environment

    def give_back(self, tag: str, environment: gymnasium.Env) -> None:
        """Make the environment available to the tag's next episode."""
        self._idle[tag].append(environment)

    def abandon(self, environment: gymnasium.Env) -> None:
        """Never use an environment again, and close it in the background. Calling it twice is harmless.

        The environment may be in a call that does not return; closing may end that call.
        """
        if self._environments.pop(id(environment), None) is not None:
            self._in_background(self._close(environment))

    async def call(
        self, function: Callable[[], Any], limit: Limit, on_late: Callable[[Outcome], None] = lambda outcome: None
    ) -> Any:
        """Run a function in a thread and return its value. Raises `CallFailed`."""
        try:
            outcome = await self._threads.call(function, limit.seconds, on_late)
        except CallHung:
            cause = f"{limit.what} did not end within {limit.seconds:g} s ({limit.setting})"
            raise CallFailed("hung", cause) from None
        if isinstance(outcome.error, Nonsense):
            raise CallFailed("nonsense", f"{limit.what} gave nonsense: {outcome.error}") from outcome.error
        if outcome.error is not None:
            raise CallFailed("raised", f"{limit.what} raised {described(outcome.error)}") from outcome.error
        return outcome.value

    def _close_late(self, made: Outcome) -> None:
        if made.error is None:
            self._in_background(self._close(made.value))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, environment: gymnasium.Env) -> None:
        limit = Limit("closing it", "close_timeout_seconds", self._settings.close_timeout_seconds)
        self.counts["closed"] += 1
        try:
            await self.call(lambda: environment.close(), limit)
        except CallFailed as failure:
            self.counts["close_failures"] += 1
            logger.warning("an environment %s: %s", type(environment).__name__, failure.cause)


@dataclass(frozen=True)
class Limit:
    """The time limit of a call, and the names of both in messages."""

    what: str
    setting: str
    seconds: float


class HostSession:
    """One episode's use of an environment. One call at a time; failures are returned, not raised."""

    def __init__(self, host: EnvHost, tag: str, spec: EnvSpec, frames: bool) -> None:
        self._host = host
        self._tag = tag
        self._frames = frames
        self._reset_limit = Limit("its reset", "reset_timeout_seconds", spec.reset_timeout_seconds)
        self._step_limit = Limit("its step", "step_timeout_seconds", spec.step_timeout_seconds)
        self._environment: gymnasium.Env | None = None
        self._seed = 0
        self._turn: int | None = None
        self._busy = False
        self._released = False

    async def reset(self, seed: int) -> Observation | EnvFailure:
        """Begin an episode, in the session's environment if it still has one."""
        self._seed, self._turn = seed, None
        return await self._guarded(partial(self._reset, seed))

    async def step(self, text: str) -> Observation | EnvFailure:
        """Carry out an action."""
        self._turn = 0 if self._turn is None else self._turn + 1
        return await self._guarded(partial(self._step, text))

    def release(self) -> None:
        """Give back the environment, after the running call if there is one. Calling it twice is harmless."""
        self._released = True
        if self._environment is not None and not self._busy:
            self._host.give_back(self._tag, self._environment)
            self._environment = None

    async def _reset(self, seed: int) -> Observation:
        if self._environment is None:
            self._environment = await self._host.acquire(self._tag)
        call = partial(_reset, self._environment, self._host.observe, self._frames, seed)
        return await self._host.call(call, self._reset_limit)

    async def _step(self, text: str) -> Observation:
        if self._environment is None:
            raise CallFailed("lost", "it was asked for a step without a reset before")
        call = partial(_step, self._environment, self._host.observe, self._frames, text)
        return await self._host.call(call, self._step_limit)

    async def _guarded(self, call: Callable[[], Awaitable[Observation]]) -> Observation | EnvFailure:
        self._busy = True
        try:
            if self._released:
                raise CallFailed("lost", "its session was closed before the call began")
            return await call()
        except CallFailed as failed:
            return self._failure(failed)
        finally:
            self._busy = False
            if self._released:
                self.release()

    def _failure(self, failed: CallFailed) -> EnvFailure:
        if self._environment is not None:
            self._host.abandon(self._environment)
            self._environment = None
        failure = EnvFailure(self._tag, self._seed, self._turn, failed.kind, failed.cause)
        logger.warning("%s%s", failure, _short_traceback(failed.__cause__))
        return failure


def described(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0]}" if message else type(error).__name__


def _reset(environment: gymnasium.Env, observe: Observe, frames: bool, seed: int) -> Observation:
    text, info = _parts(environment.reset(seed=seed), "(text, info)", 2)
    return _observation(observe, text, info, frame=_frame(environment, frames))


def _step(environment: gymnasium.Env, observe: Observe, frames: bool, text: str) -> Observation:
    parts = _parts(environment.step(text), "(text, reward, terminated, truncated, info)", 5)
    text, reward, terminated, truncated, info = parts
    results = {"reward": reward, "terminated": terminated, "truncated": truncated}
    return _observation(observe, text, info, frame=_frame(environment, frames), **results)


def _frame(environment: gymnasium.Env, frames: bool) -> Any:
    return environment.render() if frames else None


def _parts(answer: Any, due: str, count: int) -> tuple[Any, ...]:
    if isinstance(answer, tuple) and len(answer) == count:
        return answer
    found = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
    raise Nonsense(f"{found} where {due} is due")


def _observation(observe: Observe, text: Any, info: Any, **results: Any) -> Observation:
    """Convert an answer to an observation, and check that it can be pickled.

    An observation that cannot be pickled would make the whole report fail, with the answers of other environments.
    """
    try:
        observation = observe(text, info, **results)
        pickle.dumps(observation)
    except Exception as error:
        raise Nonsense(described(error)) from error
    return observation


def _short_traceback(error: BaseException | None) -> str:
    if error is None:
        return ""
    return "\n" + "".join(traceback.format_exception(error, limit=-TRACEBACK_FRAMES)).rstrip()
