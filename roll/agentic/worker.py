"""One environment worker: a process that holds many environments, and the threads that their calls run in.

No environment waits for another. Every call (make, reset, step, render, close) runs in a thread of its own with a
deadline. An environment that raises, does not return or gives an invalid answer is abandoned: it is closed in the
background and never used again. An environment whose calls all returned serves the next episode of its tag. Python
cannot end a thread: a late call keeps its thread, which counts as stuck until the call returns. Stuck threads and leaks
cannot be repaired in a running process. They are counted, and at a limit the process asks to be replaced.

Commands arrive in batches and answers leave in batches through one long poll, so the cost of crossing processes is paid
per event, not per step. A failure is a record, not an exception: one failure must not fail the others of its batch. An
error of the worker itself makes the poll fail, and the whole process is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import gymnasium

from roll.agentic.episode import EnvironmentFailed, Observation
from roll.configs.plugins import import_object
from roll.runtime.process import DriverFolders
from roll.tracking.logs import configure_logging, give_away_output

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


_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Holdings:
    """Resources of this process at one moment."""

    open_files: int = 0
    threads: int = 0
    resident_bytes: int = 0

    def __sub__(self, other: Holdings) -> Holdings:
        return Holdings(
            self.open_files - other.open_files,
            self.threads - other.threads,
            self.resident_bytes - other.resident_bytes,
        )


def holdings() -> Holdings:
    """Measure the resources of this process."""
    if not _PROCESS.is_dir():
        return Holdings()
    resident_pages = int((_PROCESS / "statm").read_text().split()[1])
    return Holdings(
        open_files=len(os.listdir(_PROCESS / "fd")),
        threads=len(os.listdir(_PROCESS / "task")),
        resident_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
    )


EnvFactory = Callable[[str, Mapping[str, Any]], gymnasium.Env]
"""Factory of environments: (env_type, env_config) -> a new environment."""

Observe = Callable[..., Observation]
"""Function that makes an observation from (text, info, *, reward, terminated, truncated, frame).

After a reset it is called with ``frame`` only. An exception means that the environment's answer is invalid.
"""

FailureKind = Literal["raised", "hung", "nonsense", "lost"]
"""``lost``: the process that held the environment is gone."""


@dataclass(frozen=True)
class EnvSpec:
    """Environments of one tag: how to make them, and time limits of their calls."""

    env_type: str
    env_config: Mapping[str, Any] = field(default_factory=dict)
    reset_timeout_seconds: float = 60.0
    """Limit of a reset, and of making the environment before its first one."""
    step_timeout_seconds: float = 60.0


@dataclass(frozen=True)
class HostSettings:
    """Limits of one worker process. A process that exceeds one is replaced once its episodes have ended."""

    close_timeout_seconds: float = 5.0
    """Limit of an environment's `close`. Only the shutdown waits for it."""
    max_stuck_threads: int = 8
    """Number of threads in calls that are past their deadline and may never return."""
    max_open_files: int = 1024
    """Open files beyond those at the start and those that `files_per_environment` allows.

    This limit and the following ones find environments that leak; Linux only.
    """
    files_per_environment: int = 32
    """Files that a living environment may hold; one with a tool server has pipes and sockets."""
    max_extra_threads: int = 256
    """Threads beyond those at the start, those that `threads_per_environment` allows, and those of running calls."""
    threads_per_environment: int = 8
    max_memory_growth_bytes: int = 4 * 2**30
    """Growth of the resident memory."""
    leak_check_seconds: float = 1.0
    """Interval between two checks of these limits."""
    thread_stack_bytes: int = 2**20
    """Stack size of the threads that run calls."""


@dataclass(frozen=True)
class EnvFailure:
    """Reason why an episode cannot continue."""

    tag: str
    seed: int
    turn: int | None
    """The turn whose action was being carried out, from 0; None: at the reset."""
    kind: FailureKind
    cause: str
    proven: bool = False
    """True if no other episode was in a ``lost`` process. Otherwise another one may have caused the loss."""

    @property
    def may_be_innocent(self) -> bool:
        """True if the environment may not be the cause, so that the episode can simply be started again."""
        return self.kind == "lost" and not self.proven

    def __str__(self) -> str:
        when = "at the reset" if self.turn is None else f"turn {self.turn}"
        return f"environment `{self.tag}`, seed {self.seed}, {when}: {self.cause}"


class SessionFailed(EnvironmentFailed):
    """An `EnvironmentFailed` whose failure can be counted."""

    def __init__(self, failure: EnvFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class EnvPoolClosed(RuntimeError):
    """The pool was shut down or cannot start its processes, so there are no environments. A retry does not help."""


@dataclass(frozen=True)
class Reset:
    """Begin an episode in a session; the first one also opens the session."""

    session: int
    tag: str
    seed: int
    frames: bool


@dataclass(frozen=True)
class Step:
    """Carry out an action."""

    session: int
    text: str


@dataclass(frozen=True)
class Close:
    """End a session. There is no answer."""

    session: int


Command = Reset | Step | Close


@dataclass(frozen=True)
class Answer:
    """Outcome of a `Reset` or a `Step`."""

    session: int
    outcome: Observation | EnvFailure


@dataclass(frozen=True)
class Report:
    """News of a worker since its last report."""

    answers: list[Answer]
    retire_because: str | None
    """Reason why the process should take no new sessions; None: it may."""
    counts: dict[str, int]
    """Totals of the process: environments ``made``, ``reused``, ``closed``, ``close_failures``."""


class CallHung(Exception):
    """A call did not return before its deadline."""


@dataclass(frozen=True)
class Outcome:
    """Result of a call: a value, or an error of any class."""

    value: Any = None
    error: BaseException | None = None


@dataclass
class _Call:
    function: Callable[[], Any]
    done: asyncio.Future[Outcome]
    on_late: Callable[[Outcome], None]
    late: bool = False


_Inbox = SimpleQueue["_Call | None"]


class CallThreads:
    """A pool with as many threads as calls ever ran at once. Belongs to one event loop."""

    def __init__(self, stack_bytes: int) -> None:
        self.count = 0
        self.stuck = 0
        self._stack_bytes = stack_bytes
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Inbox] = []

    async def call(
        self,
        function: Callable[[], Any],
        deadline_seconds: float,
        on_late: Callable[[Outcome], None] = lambda outcome: None,
    ) -> Outcome:
        """Run ``function`` in a thread.

        Raises `CallHung` at the deadline; ``on_late`` is called with an outcome that comes after that.
        """
        call = _Call(function, self._loop.create_future(), on_late)
        inbox = self._idle.pop() if self._idle else self._new_thread()
        inbox.put(call)
        try:
            await asyncio.wait([call.done], timeout=deadline_seconds)
            if not call.done.done():
                raise CallHung
        except BaseException:
            call.late = not call.done.done()
            self.stuck += call.late
            raise
        return call.done.result()

    def end(self) -> None:
        """Let the idle threads end. Running calls continue and keep their threads."""
        while self._idle:
            self._idle.pop().put(None)
            self.count -= 1

    def _new_thread(self) -> _Inbox:
        inbox: _Inbox = SimpleQueue()
        thread = threading.Thread(target=self._serve, args=[inbox], name="environment", daemon=True)
        # The stack size is a setting of the whole process, which the environments' own threads should not inherit.
        usual = threading.stack_size(self._stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
        self.count += 1
        return inbox

    def _serve(self, inbox: _Inbox) -> None:
        while (call := inbox.get()) is not None:
            outcome = _outcome(call.function)
            # Mark the thread idle before delivering the outcome, so that the receiver's next call reuses it.
            self._idle.append(inbox)
            try:
                self._loop.call_soon_threadsafe(self._deliver, call, outcome)
            except RuntimeError:
                return  # the event loop is closed, and nothing waits for the outcome
            del call, outcome

    def _deliver(self, call: _Call, outcome: Outcome) -> None:
        if call.late:
            self.stuck -= 1
            call.on_late(outcome)
        elif not call.done.done():
            call.done.set_result(outcome)


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(function())
    except BaseException as error:  # includes `SystemExit`, which environments raise by calling `sys.exit`
        return Outcome(error=error)


GATHER_SECONDS = 0.005
"""Wait of a report for more answers. It is short compared to a policy's turn, and saves most of the reports."""


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a worker process needs to start.

    Functions are passed by name, because a user's module can be found only once the import folders are known.
    """

    name: str
    specs: Mapping[str, EnvSpec]
    host: HostSettings
    make_env: str
    """`package.module:function` of an `EnvFactory`."""
    observe: str
    """`package.module:function` of an `Observe`."""
    folders: DriverFolders
    log_dir: str | None


class EnvWorker:
    """Body of the actor."""

    def __init__(self, setup: WorkerSetup) -> None:
        setup.folders.enter()
        if setup.log_dir is not None:
            give_away_output(Path(setup.log_dir), setup.name)
            configure_logging(Path(setup.log_dir), setup.name)
        self._setup = setup
        self._make_env = import_object(setup.make_env)
        self._observe = import_object(setup.observe)

    async def start(self) -> int:
        """Prepare for commands, and return the process id."""
        setup = self._setup
        self._host = EnvHost(setup.specs, setup.host, self._make_env, self._observe)
        self._sessions: dict[int, HostSession] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._answers: list[Answer] = []
        self._any_news = asyncio.Event()
        self._broken: Exception | None = None
        self._retire_because: str | None = None
        self._next_leak_check = 0.0
        return os.getpid()

    async def submit(self, commands: Sequence[Command]) -> None:
        """Start these commands, in order. `collect` returns their answers."""
        for command in commands:
            match command:
                case Reset():
                    if command.session not in self._sessions:
                        self._sessions[command.session] = self._host.open(command.tag, command.frames)
                    self._begin(command.session, self._sessions[command.session].reset(command.seed))
                case Step():
                    self._begin(command.session, self._sessions[command.session].step(command.text))
                case Close():
                    if command.session in self._sessions:  # the session may have been given up before its first reset
                        self._sessions.pop(command.session).release()

    async def collect(self, wait_seconds: float) -> Report:
        """Return what finished since the last call, waiting at most ``wait_seconds`` for something."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._any_news.wait()
            await asyncio.sleep(GATHER_SECONDS)
        except TimeoutError:
            pass  # an empty report is useful too: it shows that the process lives
        self._any_news.clear()
        if self._broken is not None:
            raise self._broken
        answers, self._answers = self._answers, []
        return Report(answers, self._look_for_leaks(), dict(self._host.counts))

    async def close(self) -> None:
        """Close all environments that can be closed within their time limit."""
        await self._host.close()

    def _begin(self, session: int, call: Awaitable[Observation | EnvFailure]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(session, call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, session: int, call: Awaitable[Observation | EnvFailure]) -> None:
        try:
            outcome = await call
        except Exception as error:
            self._broken = error
        else:
            self._answers.append(Answer(session, outcome))
        self._any_news.set()

    def _look_for_leaks(self) -> str | None:
        now = asyncio.get_running_loop().time()
        if self._retire_because is None and now >= self._next_leak_check:
            self._next_leak_check = now + self._setup.host.leak_check_seconds
            self._retire_because = self._host.retire_because()
        return self._retire_because
