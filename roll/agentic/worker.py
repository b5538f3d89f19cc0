"""One environment worker: a process that runs many environments, each call in a thread of its own.

Environments never wait for each other. Every call (make, reset, step, render, close) runs in its own thread, with a
deadline. An environment that raises, does not return or returns an invalid value is abandoned: it is closed in the
background and never used again. An environment whose calls all returned is reused for the next episode of its tag.
Python cannot kill a thread: a late call keeps its thread, which counts as stuck until the call returns. Stuck threads
and leaks cannot be repaired in a running process. They are counted, and beyond a limit the process asks to be replaced.

Commands arrive in batches, and answers leave in batches through a long poll, so that the cost of interprocess
communication is paid per batch, not per step. A failure is a record, not an exception, because one failure must not
fail the other answers of its batch. An error of the worker itself makes the poll fail, and the whole process is
replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium

from roll.agentic.episode import EnvironmentFailed, Observation
from roll.agentic.tools.environment import with_tools
from roll.configs.plugins import import_object
from roll.configs.run import CustomEnvConfig, EnvWorkersConfig
from roll.runtime.pool import Tasks
from roll.runtime.process import DriverFolders
from roll.tracking.logs import configure_logging, give_away_output

logger = logging.getLogger(__name__)

TRACEBACK_FRAMES = 6
GATHER_SECONDS = 0.005
"""Time for which a report waits for more answers, unless no call is left. Short compared to a turn, but it saves most
reports."""

SWITCH_SECONDS = 0.005
"""Time for which a thread computes before Python lets another one compute."""

EnvFactory = Callable[[str, Mapping[str, Any]], gymnasium.Env]
"""Factory of environments: (env_type, env_config) -> a new environment."""

Observe = Callable[..., Observation]
"""Function that builds an observation from (text, info, *, reward, terminated, truncated, frame).

After a reset, ``frame`` is the only keyword argument. An exception means that the environment returned invalid values.
"""


def ends_calls_when_closed(environment: gymnasium.Env | None) -> bool:
    """Return True if an environment says so: its running call ends when another thread closes it.

    Its steps have no time limit. When its episode is given up, it is closed. Other environments finish the call and are
    reused.
    """
    return bool(getattr(environment, "ends_calls_when_closed", False))


FailureKind = Literal["raised", "hung", "nonsense", "lost"]
"""How an environment failed; ``nonsense``: an invalid value; ``lost``: its process or session is gone."""


@dataclass(frozen=True)
class PoolSettings:
    """Settings shared by all environment workers of a run.

    A process that exceeds one of the limits is replaced once its episodes have ended.
    """

    workers: EnvWorkersConfig = field(default_factory=EnvWorkersConfig)
    make_env: str = "roll.agentic.registry:make_env"
    """`package.module:function` that is an `EnvFactory`."""
    observe: str = "roll.agentic.base:observation_from"
    """`package.module:function` that is an `Observe`."""
    actor_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the Ray actors besides `num_cpus=0`, such as a scheduling strategy."""
    log_dir: str | None = None
    start_timeout_seconds: float = 120.0
    close_timeout_seconds: float = 5.0
    """Time limit of an environment's `close`. Only the shutdown waits for it."""
    max_stuck_threads: int = 8
    """Maximum number of threads in calls that are past their deadline."""
    max_open_files: int = 1024
    """Maximum open files beyond those at the start and those that `files_per_environment` allows.

    This limit, the following ones and that of memory detect leaking environments. Linux only.
    """
    files_per_environment: int = 32
    """Open files allowed per live environment; one with a tool server has pipes and sockets."""
    max_extra_threads: int = 256
    """Maximum threads beyond those at the start, those for calls, and those that `threads_per_environment` allows."""
    threads_per_environment: int = 8
    leak_check_seconds: float = 1.0
    """Interval between checks of these limits."""
    thread_stack_bytes: int = 2**20
    """Stack size of the threads that run calls."""


@dataclass(eq=False)
class SessionFailed(EnvironmentFailed):
    """Why an episode cannot continue. Takes positional arguments, because unpickling an exception passes them so."""

    tag: str
    seed: int
    turn: int | None
    """Index (from 0) of the turn whose action was being executed; None: the reset."""
    kind: FailureKind
    cause: str
    proven: bool = False
    """True if the episode was alone in the ``lost`` process. Otherwise another episode may have caused the loss."""

    @property
    def may_be_innocent(self) -> bool:
        """True if another episode may be the cause, so that this one can simply be restarted."""
        return self.kind == "lost" and not self.proven

    def __str__(self) -> str:
        when = "at the reset" if self.turn is None else f"turn {self.turn}"
        return f"environment `{self.tag}`, seed {self.seed}, {when}: {self.cause}"


class EnvPoolClosed(RuntimeError):
    """The pool was shut down or cannot start its processes, so no environment is available. Retrying does not help."""


@dataclass(frozen=True)
class Reset:
    """Command: start an episode in a session, which is opened if it is new."""

    session: int
    tag: str
    seed: int
    frames: bool


@dataclass(frozen=True)
class Step:
    """Command: execute an action."""

    session: int
    text: str


@dataclass(frozen=True)
class Close:
    """Command: end a session. It has no answer."""

    session: int


Command = Reset | Step | Close


@dataclass(frozen=True)
class Report:
    """Answers and state of a worker since its last report."""

    outcomes: list[tuple[int, Observation | SessionFailed]]
    """Pairs of session number and outcome of its call."""
    retire_because: str | None
    """Why the process should get no new sessions; None: it may."""
    counts: dict[str, int]
    """Number of environments ``made``, ``reused`` and ``closed``, and ``close_failures``."""
    cpu_seconds: float
    """Processor time of the process since its start, and of its children that have ended."""


def holdings() -> Counter[str]:
    """Return the resources that this process holds: open files, threads, resident bytes. Empty without /proc."""
    process = Path("/proc/self")
    if not process.is_dir():
        return Counter()
    resident_pages = int((process / "statm").read_text().split()[1])
    return Counter(
        {
            "open files": len(os.listdir(process / "fd")),
            "threads": len(os.listdir(process / "task")),
            "resident bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        }
    )


class CallFailed(Exception):
    """A call of an environment failed."""

    def __init__(self, kind: FailureKind, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind
        self.cause = cause


@dataclass(eq=False)
class _Call:
    """A call that a thread runs, and where its value goes."""

    run: Callable[[], Any]
    answer: asyncio.Future[Any]
    on_late: Callable[[Any], None]
    since: float = field(default_factory=time.perf_counter)
    has_returned: bool = False
    is_stuck: bool = False


class NoThread(RuntimeError):
    """The system could not start another thread."""


class CallThreads:
    """Thread pool that grows with the number of concurrent calls. Use it in one event loop only.

    Its threads are daemons, unlike those of `ThreadPoolExecutor`, so a call that never returns keeps no process alive.
    A thread that takes a call first wakes another one for the next call. So calls never wait for each other, and yet
    short ones need few threads: the other thread comes to run only when a call waits or computes for long, and by then
    the first one has made many short calls. Values that are returned at about the same time wake the event loop once.
    """

    def __init__(self, stack_bytes: int) -> None:
        self.count = 0
        self.stuck = 0
        self._stack_bytes = stack_bytes
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._calls: deque[_Call] = deque()
        """Calls that no thread has taken yet."""
        self._idle = 0
        self._coming = 0
        """Number of threads that will look at the calls next: woken, started, or at the end of a call."""
        self._is_starting = False
        self._has_ended = False
        self._returned: deque[tuple[_Call, Any]] = deque()
        self._wakes_loop = False

    async def call(
        self,
        function: Callable[[], Any],
        what: str,
        setting: str,
        seconds: float | None,
        on_late: Callable[[Any], None] = lambda value: None,
    ) -> Any:
        """Run a function in a thread and return its value. Raises `CallFailed` and `NoThread`.

        ``what`` names the call in messages, and ``setting`` its limit of ``seconds`` (None: no limit). If the value, or
        a `CallFailed`, arrives after the limit or a cancellation, ``on_late`` is called with it.
        """
        call = _Call(partial(_value_or_failure, function, what), self._loop.create_future(), on_late)
        with self._changed:
            self._calls.append(call)
            needs_thread = self._wake_threads()
        if needs_thread:
            self._start_thread()
        limit = None if seconds is None else self._loop.call_later(seconds, self._expire, call, what, setting, seconds)
        try:
            value = await call.answer
        except asyncio.CancelledError:
            if not call.is_stuck:
                if not call.has_returned:
                    self._note_stuck(call)
                elif not call.answer.cancelled():  # it returned in the same turn of the event loop
                    self._came_late(call, call.answer.result())
            raise
        finally:
            if limit is not None:
                limit.cancel()
        if isinstance(value, (CallFailed, NoThread)):
            raise value
        return value

    def end(self) -> None:
        """End the idle threads, and those in a call after it."""
        with self._changed:
            self._has_ended = True
            self._coming += self._idle
            self._idle = 0
            self._changed.notify_all()

    def _expire(self, call: _Call, what: str, setting: str, seconds: float) -> None:
        if not call.answer.done():
            self._note_stuck(call)
            call.answer.set_result(CallFailed("hung", f"{what} did not end within {seconds:g} s ({setting})"))

    def _note_stuck(self, call: _Call) -> None:
        call.is_stuck = True
        self.stuck += 1

    def _wake_threads(self) -> bool:
        """Wake a thread for the next call, unless one is coming. Return True if one is to be started instead.

        The longer that call has waited, the more threads may be coming: they get their turns late if others compute.
        One is started at a time. The lock must be held.
        """
        if not self._calls:
            return False
        waited = time.perf_counter() - self._calls[0].since
        missing = min(len(self._calls), 1 + int(waited / SWITCH_SECONDS)) - self._coming
        woken = max(0, min(missing, self._idle))
        self._idle -= woken
        self._coming += woken
        self._changed.notify(woken)
        if missing <= woken or self._is_starting:
            return False
        self._is_starting = True
        self._coming += 1
        self.count += 1
        return True

    def _start_thread(self) -> None:
        """Start the thread that `_wake_threads` asked for, without its lock: a start takes long if others compute.

        Call it in the event loop: a thread inherits cores and priority, which an environment may have set for its own.
        """
        thread = threading.Thread(target=self._serve, name="environment", daemon=True)
        # The stack size is a process-wide setting, which the environments' own threads should not inherit.
        usual = threading.stack_size(self._stack_bytes)
        try:
            thread.start()
            return
        except RuntimeError as error:
            failure = NoThread(str(error))
        finally:
            threading.stack_size(usual)
        with self._changed:
            self._is_starting = False
            self._coming -= 1
            self.count -= 1
            while self._calls and not self._coming:
                self._return(self._calls.popleft(), failure)

    def _serve(self) -> None:
        with self._changed:
            self._is_starting = False
        while (call := self._next_call()) is not None:
            value = call.run()
            with self._changed:
                self._coming += 1  # before the value is told, so that the receiver's next call starts no other thread
            self._return(call, value)
            del call, value

    def _next_call(self) -> _Call | None:
        """Wait for a call, and have a thread woken or started for the one after it. Returns None after `end`."""
        with self._changed:
            self._coming -= 1
            while not self._calls:
                if self._has_ended:
                    self.count -= 1
                    return None
                self._idle += 1
                self._changed.wait()
                self._coming -= 1
            call = self._calls.popleft()
            needs_thread = self._wake_threads()
        if needs_thread:
            self._in_loop(self._start_thread)
        return call

    def _return(self, call: _Call, value: Any) -> None:
        self._returned.append((call, value))
        if not self._wakes_loop:
            self._wakes_loop = True
            self._in_loop(self._take_returned)

    def _in_loop(self, work: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(work)

    def _take_returned(self) -> None:
        self._wakes_loop = False  # before the first value is taken: a thread that comes later wakes the loop again
        while self._returned:
            call, value = self._returned.popleft()
            call.has_returned = True
            self.stuck -= call.is_stuck
            if call.answer.done():
                self._came_late(call, value)
            else:
                call.answer.set_result(value)

    def _came_late(self, call: _Call, value: Any) -> None:
        if not isinstance(value, NoThread):
            self._loop.call_soon(call.on_late, value)  # its errors concern no other call


def _value_or_failure(function: Callable[[], Any], what: str) -> Any:
    try:
        return function()
    except CallFailed as failed:
        return failed
    except BaseException as error:  # includes `SystemExit`, which environments raise by calling `sys.exit`
        failure = CallFailed("raised", f"{what} raised {described(error)}")
        failure.__cause__ = error
        return failure


def described(error: BaseException) -> str:
    """Return the class and the first line of an error, even if formatting the error raises."""
    try:
        message = str(error).strip()
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message.splitlines()[0]}" if message else type(error).__name__


class EnvHost:
    """The environments of one process. Use it in one event loop only."""

    def __init__(
        self, envs: Mapping[str, CustomEnvConfig], settings: PoolSettings, make_env: EnvFactory, observe: Observe
    ) -> None:
        self.observe = observe
        self.counts = dict.fromkeys(("made", "reused", "closed", "close_failures"), 0)
        """See `Report.counts`."""
        self._envs = envs
        self._settings = settings
        self._make_env = make_env
        self.threads = CallThreads(settings.thread_stack_bytes)
        self._environments: dict[int, gymnasium.Env] = {}
        """All environments that are not abandoned, by `id`, because an environment may be unhashable."""
        self._idle: dict[str, list[gymnasium.Env]] = {tag: [] for tag in envs}
        self._closing = Tasks()
        self._at_first = holdings()

    def open(self, tag: str, frames: bool) -> HostSession:
        """Open a session. It gets an environment at its first reset.

        ``frames``: include rendered frames in observations, which costs a `render` each. Raises `KeyError` for an
        unknown tag.
        """
        return HostSession(self, tag, self._envs[tag], frames)

    def retire_because(self) -> str | None:
        """Return why this process should be replaced, or None."""
        limits = self._settings
        if self.threads.stuck > limits.max_stuck_threads:
            return f"{self.threads.stuck} threads are stuck in environments that do not return"
        grown = holdings() - self._at_first
        extra_threads = grown["threads"] - self.threads.count
        living = len(self._environments) + len(self._closing)
        if grown["open files"] > limits.max_open_files + living * limits.files_per_environment:
            return f"{grown['open files']} files were opened and not closed"
        if extra_threads > limits.max_extra_threads + living * limits.threads_per_environment:
            return f"{extra_threads} threads were started by environments and have not ended"
        if grown["resident bytes"] > limits.workers.max_memory_growth_gib * 2**30:
            return f"its memory has grown by {grown['resident bytes'] / 2**20:.0f} MiB"
        return None

    async def close(self) -> None:
        """Close all environments, even those in a call. Returns when all are closed or their time limit has passed."""
        for environment in list(self._environments.values()):
            self.abandon(environment)
        await self._closing.wait()
        self.threads.end()

    async def acquire(self, tag: str) -> gymnasium.Env:
        """Return the most recently used idle environment of a tag, or a new one. Raises `CallFailed`."""
        if self._idle[tag]:
            self.counts["reused"] += 1
            return self._idle[tag].pop()
        config = self._envs[tag]
        make = partial(self._made, config)
        limit = ("reset_timeout_seconds", config.reset_timeout_seconds)
        environment = await self.threads.call(make, "making it", *limit, on_late=self._close_late)
        self.counts["made"] += 1
        self._environments[id(environment)] = environment
        return environment

    def _made(self, config: CustomEnvConfig) -> gymnasium.Env:
        return with_tools(self._make_env(config.env_type, config.env_config), config.tools, config.tool_settings)

    def give_back(self, tag: str, environment: gymnasium.Env) -> None:
        """Make the environment available to the next episode of its tag."""
        self._idle[tag].append(environment)

    def abandon(self, environment: gymnasium.Env, call: asyncio.Task[Observation] | None = None) -> None:
        """Close an environment in the background, and never use it again. May be called twice.

        The environment may be in a call, which closing may end. If closing does not end ``call``, it is cancelled, and
        its thread counts as stuck.
        """
        if self._environments.pop(id(environment), None) is not None:
            self._closing.start(self._close(environment, call))

    def _close_late(self, made: gymnasium.Env | CallFailed) -> None:
        if not isinstance(made, CallFailed):
            self._closing.start(self._close(made))

    async def _close(self, environment: gymnasium.Env, running: asyncio.Task[Observation] | None = None) -> None:
        self.counts["closed"] += 1
        seconds = self._settings.close_timeout_seconds
        try:
            await self.threads.call(lambda: environment.close(), "closing it", "close_timeout_seconds", seconds)
        except CallFailed as failure:
            self.counts["close_failures"] += 1
            logger.warning("an environment %s: %s", type(environment).__name__, failure.cause)
        if running is not None:
            await asyncio.wait([running], timeout=seconds)
            running.cancel()


_RESET_PARTS = ("text", "info")
_STEP_PARTS = ("text", "reward", "terminated", "truncated", "info")


class HostSession:
    """One episode's use of an environment. Allows one call at a time; failures are returned, not raised."""

    def __init__(self, host: EnvHost, tag: str, config: CustomEnvConfig, frames: bool) -> None:
        self._host = host
        self._tag = tag
        self._config = config
        self._frames = frames
        self._environment: gymnasium.Env | None = None
        self._seed = 0
        self._turn: int | None = None
        self._busy = False
        self._call: asyncio.Task[Observation] | None = None
        self._released = False

    async def reset(self, seed: int) -> Observation | SessionFailed:
        """Start an episode."""
        self._seed, self._turn = seed, None
        limit = ("its reset", "reset_timeout_seconds", self._config.reset_timeout_seconds)
        return await self._observation(lambda environment: environment.reset(seed=seed), _RESET_PARTS, *limit)

    async def step(self, text: str) -> Observation | SessionFailed:
        """Execute an action."""
        self._turn = 0 if self._turn is None else self._turn + 1
        seconds = None if ends_calls_when_closed(self._environment) else self._config.step_timeout_seconds
        limit = ("its step", "step_timeout_seconds", seconds)
        return await self._observation(lambda environment: environment.step(text), _STEP_PARTS, *limit)

    def release(self) -> None:
        """Release the environment, after the running call if there is one. May be called twice.

        If closing the environment would end the running call, the environment is abandoned instead.
        """
        self._released = True
        if self._environment is None:
            return
        if not self._busy:
            self._host.give_back(self._tag, self._environment)
        elif ends_calls_when_closed(self._environment):
            self._host.abandon(self._environment, self._call)
        else:
            return
        self._environment = None

    async def _observation(
        self,
        act: Callable[[gymnasium.Env], Any],
        parts: tuple[str, ...],
        what: str,
        setting: str,
        seconds: float | None,
    ) -> Observation | SessionFailed:
        self._busy = True
        try:
            if self._released:
                raise CallFailed("lost", "its session was closed before the call began")
            if self._environment is None:
                self._environment = await self._host.acquire(self._tag)
            call = partial(self._observed, self._environment, act, parts, what)
            running = self._host.threads.call(call, what, setting, seconds)
            return await (self._until_closed(running, what) if seconds is None else running)
        except CallFailed as failed:
            return self._failure(failed)
        finally:
            self._busy = False
            if self._released:
                self.release()

    async def _until_closed(self, running: Coroutine[Any, Any, Observation], what: str) -> Observation:
        """Await a call without a time limit. `release` may cancel it."""
        self._call = asyncio.ensure_future(running)
        try:
            await asyncio.wait([self._call])
            if self._call.cancelled():
                raise CallFailed("hung", f"{what} did not end when its environment was closed")
            return self._call.result()
        finally:
            self._call.cancel()  # no effect if it has ended

    def _observed(
        self, environment: gymnasium.Env, act: Callable[[gymnasium.Env], Any], parts: tuple[str, ...], what: str
    ) -> Observation:
        """Run a call, convert its result (a tuple of ``parts``) to an observation, and check that it can be pickled.

        An observation that cannot be pickled would make the whole report fail, including answers of other environments.
        """
        began = time.perf_counter()
        answer = act(environment)
        seconds = time.perf_counter() - began
        if not isinstance(answer, tuple) or len(answer) != len(parts):
            found = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
            raise CallFailed("nonsense", f"{what} gave nonsense: {found} where ({', '.join(parts)}) is due")
        text, *results, info = answer
        frame = self._frame(environment)
        try:
            named = dict(zip(parts[1:-1], results, strict=True))
            observation = replace(self._host.observe(text, info, **named, frame=frame), seconds=seconds)
            pickle.dumps(observation)
        except Exception as error:
            raise CallFailed("nonsense", f"{what} gave nonsense: {described(error)}") from error
        return observation

    def _frame(self, environment: gymnasium.Env) -> Any:
        """Return a frame; None if none is asked for, or if the environment does not render."""
        try:
            return environment.render() if self._frames else None
        except NotImplementedError:  # from `gymnasium.Env.render`
            return None

    def _failure(self, failed: CallFailed) -> SessionFailed:
        if self._environment is not None:
            self._host.abandon(self._environment)
            self._environment = None
        failure = SessionFailed(self._tag, self._seed, self._turn, failed.kind, failed.cause)
        cause = failed.__cause__
        lines = [] if cause is None else ["\n", *traceback.format_exception(cause, limit=-TRACEBACK_FRAMES)]
        logger.warning("%s%s", failure, "".join(lines).rstrip())
        return failure


class EnvWorker:
    """The Ray actor of an environment worker.

    Functions are passed by name, because a user's module is importable only after ``folders`` are set up.
    """

    def __init__(
        self, name: str, envs: Mapping[str, CustomEnvConfig], settings: PoolSettings, folders: DriverFolders
    ) -> None:
        folders.enter()
        if settings.log_dir is not None:
            give_away_output(Path(settings.log_dir), name)
            configure_logging(Path(settings.log_dir), name)
        self._envs = envs
        self._settings = settings
        self._make_env = import_object(settings.make_env)
        self._observe = import_object(settings.observe)

    async def start(self) -> None:
        """Get ready for commands."""
        self._host = EnvHost(self._envs, self._settings, self._make_env, self._observe)
        self._sessions: dict[int, HostSession] = {}
        self._calls = Tasks()
        self._outcomes: list[tuple[int, Observation | SessionFailed]] = []
        self._any_news = asyncio.Event()
        self._unanswered = 0
        self._all_answered = asyncio.Event()
        self._broken: Exception | None = None
        self._retire_because: str | None = None
        self._next_leak_check = 0.0

    async def submit(self, commands: Sequence[Command]) -> None:
        """Start these commands, in order. Their answers are returned by `collect`."""
        for command in commands:
            match command:
                case Reset():
                    if command.session not in self._sessions:
                        self._sessions[command.session] = self._host.open(command.tag, command.frames)
                    session = self._sessions[command.session]
                    self._start(command.session, session.reset(command.seed))
                case Step():
                    session = self._sessions[command.session]
                    self._start(command.session, session.step(command.text))
                case Close():
                    if command.session in self._sessions:  # else it was closed before its first reset
                        self._sessions.pop(command.session).release()

    async def collect(self, wait_seconds: float) -> Report:
        """Return the answers since the last call. Waits at most ``wait_seconds`` for the first one."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._any_news.wait()
            async with asyncio.timeout(GATHER_SECONDS):
                await self._all_answered.wait()
        except TimeoutError:
            pass  # an empty report serves as a heartbeat
        self._any_news.clear()
        if self._broken is not None:
            raise self._broken
        now = asyncio.get_running_loop().time()
        if self._retire_because is None and now >= self._next_leak_check:
            self._next_leak_check = now + self._settings.leak_check_seconds
            self._retire_because = self._host.retire_because()
        outcomes, self._outcomes = self._outcomes, []
        counts, self._host.counts = self._host.counts, dict.fromkeys(self._host.counts, 0)
        return Report(outcomes, self._retire_because, counts, sum(os.times()[:4]))

    async def close(self) -> None:
        """Close all environments, as far as their time limit allows."""
        await self._host.close()

    def _start(self, session: int, call: Coroutine[Any, Any, Observation | SessionFailed]) -> None:
        self._unanswered += 1
        self._all_answered.clear()
        self._calls.start(self._answer(session, call))

    async def _answer(self, session: int, call: Awaitable[Observation | SessionFailed]) -> None:
        try:
            outcome = await call
        except Exception as error:
            self._broken = error
        else:
            self._outcomes.append((session, outcome))
        self._unanswered -= 1
        if not self._unanswered:
            self._all_answered.set()
        self._any_news.set()
