"""Driver-side pool of environment workers: thousands of concurrent episodes in a few processes, replaced as needed.

An episode holds one of `max_sessions` slots from its first reset until it is closed, fails or is cancelled. Slots are
granted first come, first served. When a process dies or stops answering, its sessions fail with the cause, and the
process is replaced. A process that should retire is replaced at once, and ends with its last session. `shutdown` leaves
nothing behind.

A process runs many environments, and its death does not show which one caused it. An episode with a call in flight at
the time becomes a suspect. After two such deaths it runs alone, in quarantine; a death there is proof, which is
permanent.

All commands of one turn of the event loop are sent in one call, and the next call is sent when that one has arrived. So
batches grow under load, and commands stay in order. The long poll for answers doubles as the heartbeat of the process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ray

from roll.agentic.episode import EnvironmentFailed, Observation
from roll.agentic.worker import (
    Close,
    Command,
    EnvPoolClosed,
    EnvWorker,
    PoolSettings,
    Report,
    Reset,
    SessionFailed,
    Step,
)
from roll.configs.errors import nearest_name_hint
from roll.configs.run import CustomEnvConfig
from roll.runtime.pool import Tasks, all_or_none
from roll.runtime.process import driver_folders
from roll.runtime.workers import CALL_ERRORS, ProcessHandle, WorkerDied, WorkerTimeout
from roll.tracking.timeline import BusySpans
from roll.tracking.waits import WORKER, waiting

logger = logging.getLogger(__name__)

SessionEnd = Literal["whole", "failed", "interrupted"]
"""State in which a session ends: ``whole``: between two calls; ``failed``: the environment raised, hung or returned an
invalid value; ``interrupted``: during a call."""
DEATHS_TO_CONFINE = 2


class EpisodeKey(NamedTuple):
    """Tag and seed, which identify an episode across retries."""

    tag: str
    seed: int

    def __str__(self) -> str:
        return f"environment `{self.tag}`, seed {self.seed}"


class Suspects:
    """Records which episodes had a call in flight when a process died."""

    def __init__(self) -> None:
        self._deaths: Counter[EpisodeKey] = Counter()
        self._proven: set[EpisodeKey] = set()

    def must_be_alone(self, key: EpisodeKey) -> bool:
        """Return True if the episode must have a process to itself."""
        return key in self._proven or self._deaths[key] >= DEATHS_TO_CONFINE

    def process_died(self, in_a_call: Iterable[EpisodeKey]) -> None:
        """Record a death. Each of these episodes may have caused it; retries of an episode count once."""
        self._deaths.update(set(in_a_call))

    def prove(self, key: EpisodeKey) -> None:
        """Record that a process died in which the episode was alone."""
        self._proven.add(key)

    def acquit(self, key: EpisodeKey) -> None:
        """Clear the suspicion, because the episode ended without killing its quarantine process. Proof remains."""
        del self._deaths[key]


class EnvPool:
    """The pool of environment workers of a run."""

    def __init__(self, envs: Mapping[str, CustomEnvConfig], settings: PoolSettings) -> None:
        """Prepare the pool; `start` starts the processes."""
        self._envs = dict(envs)
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.workers.max_sessions)  # first come, first served
        self._leases = 0
        self._waits: set[asyncio.Timeout] = set()
        """Timeouts of callers that wait for a slot or a process; closing the pool expires them."""
        self._numbers = itertools.count()
        self._processes: set[EnvProcess] = set()
        """All processes not known to be dead."""
        self._live: list[EnvProcess] = []
        """Processes that accept new sessions."""
        self._any_live = asyncio.Event()
        self._suspects = Suspects()
        self._turn = asyncio.Lock()
        """Mutex of the quarantine process: one episode at a time."""
        self._quarantine: EnvProcess | None = None
        self._quarantine_start: asyncio.Task[None] | None = None
        self._tasks = Tasks(on_failure=self._broke_down)
        self._failed_starts = 0
        self.busy = BusySpans()
        self._closed_because: str | None = None
        self._counts: Counter[str] = Counter()
        self._cpu_seconds: dict[Hashable, float] = {}

    async def start(self) -> None:
        """Start all worker processes. If one fails to start, stop the others and raise `EnvPoolClosed`."""
        try:
            for process in await all_or_none(self._started() for _ in range(self._settings.workers.num_workers)):
                self._admit(process)
        except BaseException as error:
            await self.shutdown()
            if isinstance(error, CALL_ERRORS):
                raise EnvPoolClosed(f"an environment worker did not start: {error}") from error
            raise

    def session(self, tag: str, *, frames: bool = False) -> EnvPoolSession:
        """Return a session for an episode; it takes a slot at its first reset.

        ``frames``: include rendered frames in observations. Raises `ValueError` for an unknown tag.
        """
        if tag not in self._envs:
            raise ValueError(f"no environment has the tag `{tag}`; {nearest_name_hint(tag, self._envs)}")
        return EnvPoolSession(self, tag, frames)

    def counts(self) -> dict[str, int]:
        """Return totals since the run was started or resumed, and current numbers.

        Totals: ``steps``, ``resets``, ``restarts`` (of dead processes), ``retired`` (processes), ``quarantined``
        (sessions), ``failures/<tag>/<kind>`` (`FailureKind`), ``environments/{made,reused,closed,close_failures}``.
        Current: ``sessions``, ``waiting`` (callers of `take`), ``workers`` (without the quarantine process).
        """
        now = {"sessions": self._leases, "waiting": len(self._waits), "workers": len(self._live)}
        always = ("steps", "resets", "restarts", "retired", "quarantined")
        return now | dict.fromkeys(always, 0) | self._counts

    def busy_spans(self) -> dict[str, list[tuple[float, float]]]:
        """Return the spans in which at least one environment was busy; see `BusySpans`."""
        return {"environments": self.busy.recent()}

    def cpu_seconds(self) -> dict[str, dict[Hashable, float]]:
        """Return the processor time of each process up to its last report (`Report`), also of those that have ended."""
        return {"environments": {**self._cpu_seconds}}

    async def shutdown(self) -> None:
        """Close all environments and end all worker processes. May be called twice.

        Running calls, and callers that wait for a slot, raise `EnvPoolClosed`.
        """
        self._close("the environment workers have been shut down")
        await self._tasks.cancel()
        await asyncio.gather(*(self._end(process) for process in list(self._processes)))

    async def take(self, key: EpisodeKey) -> Lease:
        """Wait for a slot, then open a session in the least loaded process.

        An episode that must run alone (`Suspects.must_be_alone`) gets the quarantine process. Raises
        `EnvironmentFailed` if there is no slot within `place_timeout_seconds`, and `EnvPoolClosed` if the pool is
        closed.
        """
        seconds = self._settings.workers.place_timeout_seconds
        wait = asyncio.timeout(seconds)
        self._waits.add(wait)
        try:
            with waiting("places for episodes", "a place"):
                async with wait:
                    while True:
                        lease = await self._leased(key, alone=self._suspects.must_be_alone(key))
                        if lease is not None:
                            return lease
        except TimeoutError:
            self.check_open()
            limit = f"{seconds:g} s (place_timeout_seconds)"
            raise EnvironmentFailed(f"{key}: no place among the running episodes within {limit}") from None
        finally:
            self._waits.discard(wait)

    def give_back(self, lease: Lease, end: SessionEnd) -> None:
        """End a session and free its slot."""
        if lease.alone:
            self._judge(lease, end)
        lease.process.release(lease.session)
        self._leases -= 1
        self._slots.release()
        if lease.alone:
            self._turn.release()

    def may_stay(self, lease: Lease, key: EpisodeKey) -> bool:
        """Return True if the session may run its next episode, ``key``, in the same process."""
        takes_sessions = lease.process.lost_because is None and not lease.process.retiring
        return takes_sessions and not lease.alone and not self._suspects.must_be_alone(key)

    def check_open(self) -> None:
        """Raise `EnvPoolClosed` if the pool is closed."""
        if self._closed_because is not None:
            raise EnvPoolClosed(self._closed_because)

    def count(self, what: str) -> None:
        """Increment a total."""
        self._counts[what] += 1

    async def _leased(self, key: EpisodeKey, alone: bool) -> Lease | None:
        """Return a lease; None if ``alone`` became wrong while waiting."""
        async with AsyncExitStack() as undo:
            if alone:
                await undo.enter_async_context(self._turn)
                if not self._suspects.must_be_alone(key):
                    return None
            await undo.enter_async_context(self._slots)
            process = await (self._quarantine_process() if alone else self._least_loaded())
            if alone != self._suspects.must_be_alone(key):
                return None
            undo.pop_all()
        self._leases += 1
        self._counts["quarantined"] += alone
        return Lease(process, process.open(), key, alone)

    async def _least_loaded(self) -> EnvProcess:
        while not self._live:
            self.check_open()
            await self._any_live.wait()
        return min(self._live, key=lambda each: len(each.sessions))

    async def _quarantine_process(self) -> EnvProcess:
        """Return the quarantine process, starting it if needed. Only the holder of `_turn` may call this.

        If the caller is cancelled, the starting process is left for the next one.
        """
        while self._quarantine is None:
            self.check_open()
            if self._quarantine_start is None or self._quarantine_start.done():
                self._quarantine_start = self._tasks.start(self._start_another(alone=True))
            await asyncio.wait([self._quarantine_start])
        return self._quarantine

    def _judge(self, lease: Lease, end: SessionEnd) -> None:
        """Update the suspicion against an episode after its session in quarantine.

        Unless the session ended cleanly, the process is retired, because its leftovers would be blamed on the next
        episode.
        """
        if lease.process.lost_because is not None:
            self._suspects.prove(lease.key)
            return
        if end != "interrupted":
            self._suspects.acquit(lease.key)
        if end != "whole":
            self._quarantine = None
            lease.process.retire()

    async def _started(self) -> EnvProcess:
        """Start a process and wait until it accepts commands. If one of `CALL_ERRORS` is raised, no process is left."""
        settings = self._settings
        name = f"environments/{next(self._numbers)}"
        options = {"num_cpus": 0, "max_restarts": 0, **settings.actor_options}
        actor = ray.remote(EnvWorker).options(**options).remote(name, self._envs, settings, driver_folders())
        process = EnvProcess(name, actor, settings.workers.silence_timeout_seconds, self._take_report)
        self._processes.add(process)
        try:
            await process.call("start", timeout=settings.start_timeout_seconds)
        except CALL_ERRORS:
            await self._kill(process)
            raise
        return process

    def _admit(self, process: EnvProcess, alone: bool = False) -> None:
        self._failed_starts = 0
        if alone:
            self._quarantine = process
        else:
            self._live.append(process)
            self._any_live.set()
        self._tasks.start(self._serve(process))

    async def _serve(self, process: EnvProcess) -> None:
        """Supervise a process from its start to its end."""
        try:
            await process.serve()
        except CALL_ERRORS as lost:
            self._suspects.process_died(process.suspects)
            self._replace(process, "restarts", str(lost))
            await self._kill(process)
        else:
            await self._end(process)

    def _take_report(self, process: EnvProcess, report: Report) -> None:
        self._cpu_seconds[process.name] = report.cpu_seconds
        self._counts.update({f"environments/{name}": number for name, number in report.counts.items()})
        if report.retire_because is not None and not process.retiring:
            self._replace(process, "retired", f"{process.name} is replaced, since {report.retire_because}")
            process.retire()

    def _replace(self, process: EnvProcess, total: str, because: str) -> None:
        """Send no more sessions to a process, and start another one. The quarantine process is restarted on demand."""
        logger.warning("%s", because)
        if process is self._quarantine:
            self._quarantine = None
        if process in self._live:
            self._counts[total] += 1
            self._live.remove(process)
            if not self._live:
                self._any_live.clear()
            self._tasks.start(self._start_another())

    async def _start_another(self, alone: bool = False) -> None:
        while self._closed_because is None:
            try:
                self._admit(await self._started(), alone)
                return
            except CALL_ERRORS as lost:
                logger.warning("an environment worker did not start: %s", lost)
                self._failed_starts += 1
                if self._failed_starts >= self._settings.workers.max_failed_starts:
                    self._close(f"{self._failed_starts} environment workers in a row did not start; the last: {lost}")

    async def _end(self, process: EnvProcess) -> None:
        """Close the environments of a process, so that they end their own child processes, then kill it."""
        with suppress(*CALL_ERRORS):
            await process.call("close", timeout=2 * self._settings.close_timeout_seconds)
        await self._kill(process)

    async def _kill(self, process: EnvProcess) -> None:
        await process.end()
        self._processes.discard(process)

    def _close(self, because: str) -> None:
        """Fail all calls and all waiting callers. The first cause is kept."""
        self._closed_because = self._closed_because or because
        self._live.clear()
        for process in self._processes:
            process.lose(self._closed_because)
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(-math.inf)

    def _broke_down(self, error: BaseException) -> None:
        logger.error("the care of environment workers failed", exc_info=error)
        self._close(f"the care of environment workers failed: {error!r}")


@dataclass(frozen=True)
class Lease:
    """A session in a process, together with its slot."""

    process: EnvProcess
    session: int
    key: EpisodeKey
    """The episode for which the lease was taken."""
    alone: bool
    """True if the session is in quarantine; it then also holds the mutex of the quarantine."""


class EnvPoolSession:
    """`EnvSession` in the pool. After a failure or a cancellation it holds no resources, and a reset starts anew."""

    def __init__(self, pool: EnvPool, tag: str, frames: bool) -> None:
        self._pool = pool
        self._tag = tag
        self._frames = frames
        self.worked = 0.0
        """Seconds that environments took for the calls so far."""
        self._lease: Lease | None = None
        self._seed = 0
        self._turn: int | None = None
        self._busy = False
        self._closed = False

    async def reset(self, seed: int) -> Observation:
        """Start an episode. Waits for a slot unless the session still holds a usable one.

        Raises `EnvironmentFailed` (as `SessionFailed`, unless no slot became free in time) and `EnvPoolClosed`.
        """
        self._seed, self._turn, self._closed = seed, None, False
        with self._one_call():
            if self._lease is not None and not self._pool.may_stay(self._lease, self._key):
                self._release("whole")
            if self._lease is None:
                self._lease = await self._pool.take(self._key)
                if self._closed:
                    self._release("interrupted")
                    raise EnvironmentFailed(f"{self._key}: closed while it waited for a place")
            self._pool.count("resets")
            return await self._ask(self._lease, Reset(self._lease.session, self._tag, seed, self._frames))

    async def step(self, text: str) -> Observation:
        """Execute an action. Raises the errors of `reset`, and `EnvironmentFailed` if no reset succeeded before."""
        with self._one_call():
            if self._lease is None:
                raise EnvironmentFailed(f"{self._key}: a step without a successful reset before it")
            self._turn = 0 if self._turn is None else self._turn + 1
            self._pool.count("steps")
            return await self._ask(self._lease, Step(self._lease.session, text))

    def give_up(self, cause: str) -> None:
        """Abort the running call, if any: it raises `SessionFailed` of the kind ``hung``, with this cause."""
        if self._lease is not None and self._busy:
            failure = SessionFailed(self._tag, self._seed, self._turn, "hung", cause)
            self._lease.process.settle(self._lease.session, failure)

    async def close(self) -> None:
        """Release the environment and the slot. A running call raises `EnvironmentFailed`."""
        self._closed = True
        self._release("interrupted" if self._busy else "whole")

    @property
    def _key(self) -> EpisodeKey:
        return EpisodeKey(self._tag, self._seed)

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        if self._busy:
            raise RuntimeError(f"{self._key}: two calls at the same time")
        self._pool.check_open()
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    async def _ask(self, lease: Lease, command: Reset | Step) -> Observation:
        try:
            with self._pool.busy.working():
                outcome = await lease.process.ask(command, self._key)
        except ProcessLost as lost:
            self._release("interrupted")
            self._pool.check_open()
            proven = lease.alone and lease.process.lost_because is not None
            cause = f"{lost}; no other environment was in it" if proven else str(lost)
            outcome = SessionFailed(self._tag, self._seed, self._turn, "lost", cause, proven)
        except BaseException:
            self._release("interrupted")
            raise
        if isinstance(outcome, SessionFailed):
            self._release("failed")
            self._pool.count(f"failures/{outcome.tag}/{outcome.kind}")
            raise outcome
        self.worked += outcome.seconds
        return outcome

    def _release(self, end: SessionEnd) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            self._pool.give_back(lease, end)


class ProcessLost(Exception):
    """A call cannot be answered, because its process or its session is gone. The message is the cause."""


class EnvProcess(ProcessHandle):
    """A worker process and its sessions."""

    def __init__(
        self, name: str, actor: Any, silence_seconds: float, on_report: Callable[[EnvProcess, Report], None]
    ) -> None:
        super().__init__(name, actor)
        self.sessions: set[int] = set()
        self.retiring = False
        """True if the process ends with its last session."""
        self.lost_because: str | None = None
        """Why the process has ended or no longer answers; None while it works."""
        self.suspects: frozenset[EpisodeKey] = frozenset()
        """Episodes with a call in flight when the process died. Commands that were never sent do not count."""
        self._silence_seconds = silence_seconds
        self._on_report = on_report
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[EpisodeKey, asyncio.Future[Observation | SessionFailed | ProcessLost]]] = {}
        """Unanswered calls, by session."""
        self._outgoing: list[Command] = []
        self._to_send = asyncio.Event()
        self._drained = asyncio.Event()

    def open(self) -> int:
        """Open a session and return its number. The process is informed by the first `Reset`."""
        session = next(self._numbers)
        self.sessions.add(session)
        return session

    def release(self, session: int) -> None:
        """End a session. If it has a running call, that raises `ProcessLost`."""
        self.sessions.discard(session)
        self._send(Close(session))
        self.settle(session, ProcessLost("its session was closed during the call"))
        self._end_if_drained()

    def retire(self) -> None:
        """End the process once its last session has ended."""
        self.retiring = True
        self._end_if_drained()

    async def ask(self, command: Reset | Step, key: EpisodeKey) -> Observation | SessionFailed:
        """Send a command and return its outcome. Raises `ProcessLost`."""
        if self.lost_because is not None:
            raise ProcessLost(self.lost_because)
        answer: asyncio.Future[Observation | SessionFailed | ProcessLost] = asyncio.get_running_loop().create_future()
        self._pending[command.session] = (key, answer)
        self._send(command)
        try:
            with waiting(f"{WORKER}{self.name}", f"{type(command).__name__.lower()} of {key.tag}, seed {key.seed}"):
                outcome = await answer
        finally:
            del self._pending[command.session]
        if isinstance(outcome, ProcessLost):
            raise outcome
        return outcome

    async def serve(self) -> None:
        """Transfer commands and answers until the process is retired and its last session has ended.

        Raises one of `CALL_ERRORS` if the process dies or stops answering; open calls then raise `ProcessLost`.
        """
        watches = [asyncio.ensure_future(work) for work in (self._submit(), self._collect(), self._drained.wait())]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for watch in watches:
                if watch.done():
                    watch.result()
        except CALL_ERRORS as lost:
            unsent = {command.session for command in self._outgoing}
            calls = ((key, answer) for session, (key, answer) in self._pending.items() if session not in unsent)
            self.suspects = frozenset(key for key, answer in calls if not answer.done())
            self.lose(str(lost))
            raise
        finally:
            for watch in watches:
                watch.cancel()

    def lose(self, because: str) -> None:
        """Make all current and future calls raise `ProcessLost`. The first cause is kept."""
        self.lost_because = self.lost_because or because
        for session in self._pending:
            self.settle(session, ProcessLost(self.lost_because))

    def _send(self, command: Command) -> None:
        if self.lost_because is None:
            self._outgoing.append(command)
            self._to_send.set()

    async def _submit(self) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            commands, self._outgoing = self._outgoing, []
            await self._promptly("submit", commands)

    async def _collect(self) -> None:
        while True:
            report: Report = await self._promptly("collect", self._silence_seconds / 4)
            for session, outcome in report.outcomes:
                self.settle(session, outcome)
            self._on_report(self, report)

    async def _promptly(self, method: str, argument: object) -> Any:
        """Make a call that a working process answers soon. Raises `WorkerDied` if it does not answer."""
        try:
            return await self.call(method, argument, timeout=self._silence_seconds)
        except WorkerTimeout:
            cause = f"it did not answer for {self._silence_seconds:g} s, and was killed"
            raise WorkerDied(self.name, cause) from None

    def settle(self, session: int, outcome: Observation | SessionFailed | ProcessLost) -> None:
        """Set the outcome of the session's running call, unless it has one."""
        if session in self._pending:
            _, answer = self._pending[session]
            if not answer.done():
                answer.set_result(outcome)

    def _end_if_drained(self) -> None:
        if self.retiring and not self.sessions:
            self._drained.set()
