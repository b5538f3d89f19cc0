"""The driver's part of environment workers: thousands of concurrent episodes in a few processes, replaced as needed.

An episode holds one of `max_sessions` slots from its first reset until it is closed, fails or is cancelled. Slots are
given first come, first served. When a process dies or stops answering, its sessions fail with the cause and the process
is replaced. A process that should retire is replaced at once and ends with its last session. Nothing is left after
`shutdown`.

A process holds many environments and cannot say which one ended it. Being in a call when a process dies raises
suspicion. After two such deaths an episode runs alone, in quarantine; a death there is proof, and proof is permanent.

All commands of one turn of the event loop leave in one call. The next call leaves when that one has arrived. So batches
grow under load, and commands never overtake each other. The long poll for answers is the process's sign of life.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from roll.agentic.episode import EnvironmentFailed, Observation
from roll.agentic.worker import (
    Close,
    Command,
    EnvFailure,
    EnvPoolClosed,
    EnvSpec,
    EnvWorker,
    HostSettings,
    Report,
    Reset,
    SessionFailed,
    Step,
    WorkerSetup,
)
from roll.configs.errors import nearest_name_hint
from roll.runtime.actors import ACTOR_GONE, memory_death
from roll.runtime.process import driver_folders
from roll.tracking.timeline import BusySpans
from roll.tracking.waits import WORKER, waiting


class Places:
    """A semaphore that can be closed. No caller waits while a slot is free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._queue: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._closed_because: str | None = None

    @property
    def taken(self) -> int:
        """Number of slots in use."""
        return self.count - self._free

    @property
    def waiting(self) -> int:
        """Number of callers that wait for a slot."""
        return sum(not turn.done() for turn in self._queue)

    async def take(self) -> None:
        """Wait for a slot. A cancelled call has taken none. Raises `EnvPoolClosed`."""
        if self._closed_because is not None:
            raise EnvPoolClosed(self._closed_because)
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            self._queue.pop(turn, None)
            if not turn.cancelled() and turn.exception() is None:
                self.give_back()  # the slot arrived at the same moment as the cancellation
            raise

    def give_back(self) -> None:
        """Free a slot; the longest waiting caller gets it."""
        self._free += 1
        while self._free and self._queue:
            turn, _ = self._queue.popitem(last=False)
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def close(self, because: str) -> None:
        """Make all waiting and all later calls raise `EnvPoolClosed`."""
        self._closed_because = because
        while self._queue:
            turn, _ = self._queue.popitem(last=False)
            if not turn.done():
                turn.set_exception(EnvPoolClosed(because))


logger = logging.getLogger(__name__)

SessionEnd = Literal["whole", "failed", "interrupted"]
"""``whole``: between two calls; ``failed``: the environment raised, hung or gave an invalid answer; ``interrupted``:
the session ended during a call."""


@dataclass(frozen=True)
class PoolSettings:
    """Settings that all environment workers of a run share."""

    num_workers: int = 2
    max_sessions: int = 4096
    """Largest number of episodes that hold an environment at the same time, over all workers."""
    host: HostSettings = field(default_factory=HostSettings)
    make_env: str = "roll.agentic.registry:make_env"
    """`package.module:function` of an `EnvFactory`."""
    observe: str = "roll.agentic.base:observation_from"
    """`package.module:function` of an `Observe`."""
    actor_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the Ray actors besides `num_cpus=0`, such as a scheduling strategy."""
    log_dir: str | None = None
    start_timeout_seconds: float = 120.0
    silence_timeout_seconds: float = 60.0
    """Longest silence of a process before it is killed, and so the longest time a call may block the process."""
    place_timeout_seconds: float = 3600.0
    """Longest wait of an episode for a slot."""
    max_failed_starts: int = 3
    """Number of failed replacements in a row after which the pool gives up."""


class EnvPool:
    """The environment workers of a run."""

    def __init__(self, envs: Mapping[str, EnvSpec], settings: PoolSettings) -> None:
        """Prepare the pool without starting anything."""
        self._envs = dict(envs)
        self._settings = settings
        self._places = Places(settings.max_sessions)
        self._numbers = itertools.count()
        self._processes: set[EnvProcess] = set()
        """All processes that are not known to be dead."""
        self._live: list[EnvProcess] = []
        """Processes that take new sessions."""
        self._any_live = asyncio.Event()
        self._suspects = Suspects()
        self._quarantine = Quarantine(lambda: self._in_background(self._start_another(self._quarantined)))
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self.busy = BusySpans()
        self._closed_because: str | None = None
        self._counts: Counter[str] = Counter()
        self._gone_counts: Counter[str] = Counter()
        """Totals of the processes that are gone."""

    async def start(self) -> None:
        """Start all worker processes. If one does not start, stop the others and raise `EnvPoolClosed`."""
        starts = [asyncio.create_task(self._started()) for _ in range(self._settings.num_workers)]
        try:
            for process in await asyncio.gather(*starts):
                self._admit(process)
        except BaseException as error:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)
            await self.shutdown()
            if isinstance(error, ProcessLost):
                raise EnvPoolClosed(f"an environment worker did not start: {error}") from error
            raise

    def session(self, tag: str, *, frames: bool = False) -> EnvPoolSession:
        """Return an episode's environment, which takes a slot at its first reset.

        With ``frames`` its observations have frames. Raises `ValueError` for an unknown tag.
        """
        if tag not in self._envs:
            raise ValueError(f"no environment has the tag `{tag}`; {nearest_name_hint(tag, self._envs)}")
        return EnvPoolSession(self, tag, frames)

    def counts(self) -> dict[str, int]:
        """Return totals of the run, and current numbers.

        Totals: ``steps``, ``resets``, ``restarts`` (of dead processes), ``retired`` (processes), ``quarantined``
        (sessions opened there), ``failures/<tag>/<kind>`` (`FailureKind`),
        ``environments/{made,reused,closed,close_failures}``. Current: ``sessions``, ``waiting`` (for a slot or for
        quarantine), ``workers`` (without that of the quarantine).
        """
        environments = self._gone_counts.copy()
        for process in self._processes:
            environments.update(process.counts)
        waiting = self._places.waiting + self._quarantine.waiting
        now = {"sessions": self._places.taken, "waiting": waiting, "workers": len(self._live)}
        always = ("steps", "resets", "restarts", "retired", "quarantined")
        totals = {name: self._counts[name] for name in always} | self._counts
        return now | totals | {f"environments/{name}": count for name, count in environments.items()}

    def busy_spans(self) -> dict[str, list[tuple[float, float]]]:
        """Return the spans in which at least one environment was acting; see `BusySpans`."""
        return {"environments": self.busy.recent()}

    async def shutdown(self) -> None:
        """Close all environments and end all worker processes. May be called twice.

        Running calls, and callers that wait for slots, raise `EnvPoolClosed`.
        """
        self._close("the environment workers have been shut down")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(self._end(process) for process in list(self._processes)))

    async def take(self, who: Who) -> Lease:
        """Wait for a slot, and open a session in the least loaded process or in quarantine.

        Raises `TimeoutError`, `EnvPoolClosed`.
        """
        async with asyncio.timeout(self._settings.place_timeout_seconds):
            while True:
                lease = await self._leased(who, alone=self._suspects.must_be_alone(who))
                if lease is not None:
                    return lease

    def give_back(self, lease: Lease, end: SessionEnd) -> None:
        """End a session and free its slot."""
        if lease.alone:
            self._judge(lease, end)
        lease.process.release(lease.session)
        self._places.give_back()
        if lease.alone:
            self._quarantine.leave()

    def may_stay(self, lease: Lease, who: Who) -> bool:
        """Return True if a session may begin its next episode in the same process."""
        return not (lease.alone or self._suspects.must_be_alone(who))

    def check_open(self) -> None:
        """Raise `EnvPoolClosed` once the pool is closed."""
        if self._closed_because is not None:
            raise EnvPoolClosed(self._closed_because)

    def count(self, what: str) -> None:
        """Add one to a total."""
        self._counts[what] += 1

    @property
    def place_timeout_seconds(self) -> float:
        """Longest wait of an episode for a slot, in seconds."""
        return self._settings.place_timeout_seconds

    async def _leased(self, who: Who, alone: bool) -> Lease | None:
        """Return a lease, or None if ``alone`` has become wrong during the wait."""
        with ExitStack() as undo:
            if alone:
                await self._quarantine.enter()
                undo.callback(self._quarantine.leave)
                if not self._suspects.must_be_alone(who):
                    return None
            await self._places.take()
            undo.callback(self._places.give_back)
            process = await (self._quarantine.process() if alone else self._least_loaded())
            if alone != self._suspects.must_be_alone(who):
                return None
            undo.pop_all()
        self._counts["quarantined"] += alone
        return Lease(process, process.open(), who, alone)

    async def _least_loaded(self) -> EnvProcess:
        while not self._live:
            self.check_open()
            await self._any_live.wait()
        return min(self._live, key=lambda each: each.load)

    def _judge(self, lease: Lease, end: SessionEnd) -> None:
        """Update the suspicion after a session in quarantine.

        A process whose episode did not end cleanly is retired, because its leftovers would be blamed on the next
        episode.
        """
        if lease.process.is_lost:
            self._suspects.prove(lease.who)
            return
        if end != "interrupted":
            self._suspects.acquit(lease.who)
        if end != "whole":
            lease.process.retire()

    async def _started(self) -> EnvProcess:
        """Start a process and wait until it takes commands. On failure raise `ProcessLost` and leave nothing behind."""
        settings = self._settings
        name = f"environments/{next(self._numbers)}"
        setup = WorkerSetup(
            name, self._envs, settings.host, settings.make_env, settings.observe, driver_folders(), settings.log_dir
        )
        options = {"num_cpus": 0, "max_restarts": 0, **settings.actor_options}
        actor = ray.remote(EnvWorker).options(**options).remote(setup)
        process = EnvProcess(name, actor, settings.silence_timeout_seconds, self._retire)
        self._processes.add(process)
        try:
            await process.start(settings.start_timeout_seconds)
        except ProcessLost:
            await self._kill(process)
            raise
        return process

    def _admit(self, process: EnvProcess) -> None:
        self._failed_starts = 0
        self._live.append(process)
        self._any_live.set()
        self._in_background(self._serve(process))

    def _quarantined(self, process: EnvProcess) -> None:
        self._failed_starts = 0
        self._quarantine.admit(process)
        self._in_background(self._serve(process))

    async def _serve(self, process: EnvProcess) -> None:
        """Supervise a process from its admission to its end."""
        death = await process.serve()
        if death is None:
            await self._end(process)
            return
        self._suspects.process_died(death.suspects)
        logger.warning("environment worker %s: %s", process.name, death.because)
        if process in self._live:
            self._counts["restarts"] += 1
            self._replace(process)
        await self._kill(process)

    def _retire(self, process: EnvProcess, because: str) -> None:
        if process not in self._live:
            return
        logger.warning("environment worker %s is replaced: %s", process.name, because)
        self._counts["retired"] += 1
        self._replace(process)

    def _replace(self, process: EnvProcess) -> None:
        self._live.remove(process)
        if not self._live:
            self._any_live.clear()
        self._in_background(self._start_another(self._admit))

    async def _start_another(self, admit: Callable[[EnvProcess], None]) -> None:
        while True:
            try:
                process = await self._started()
            except ProcessLost as lost:
                self._failed_starts += 1
                if self._failed_starts >= self._settings.max_failed_starts:
                    self._close(f"{self._failed_starts} environment workers in a row did not start; the last: {lost}")
                    return
                logger.warning("an environment worker did not start: %s", lost)
            else:
                admit(process)
                return

    async def _end(self, process: EnvProcess) -> None:
        """Close a process's environments, and end it."""
        await process.close_environments(2 * self._settings.host.close_timeout_seconds)
        await self._kill(process)

    async def _kill(self, process: EnvProcess) -> None:
        await process.kill()
        if process in self._processes:
            self._processes.remove(process)
            self._gone_counts.update(process.counts)

    def _close(self, because: str) -> None:
        """Fail every call and all waiting. The first cause is kept."""
        self._closed_because = self._closed_because or because
        self._places.close(self._closed_because)
        self._quarantine.close(self._closed_because)
        self._live.clear()
        for process in self._processes:
            process.lose(self._closed_because)
        self._any_live.set()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the care of environment workers failed", exc_info=task.exception())
            self._close(f"the care of environment workers failed: {task.exception()!r}")


@dataclass(frozen=True)
class Lease:
    """A session of a process, with its slot."""

    process: EnvProcess
    session: int
    who: Who
    """The episode for which it was taken."""
    alone: bool
    """True if the session runs in quarantine; then it also has the quarantine's turn."""


class EnvPoolSession:
    """An `EnvSession` of the pool. After a failure or a cancellation it holds nothing; a reset starts over."""

    def __init__(self, pool: EnvPool, tag: str, frames: bool) -> None:
        self._pool = pool
        self._tag = tag
        self._frames = frames
        self._lease: Lease | None = None
        self._seed = 0
        self._turn: int | None = None
        self._busy = False
        self._closed = False

    async def reset(self, seed: int) -> Observation:
        """Wait for a slot, unless the session has one, and begin an episode.

        Raises `EnvironmentFailed` (as `SessionFailed`, unless no slot became free in time) and `EnvPoolClosed`.
        """
        self._seed, self._turn, self._closed = seed, None, False
        with self._one_call():
            self._pool.check_open()
            if self._lease is not None and not self._pool.may_stay(self._lease, self._who):
                self._release("whole")
            if self._lease is None:
                self._lease = await self._taken()
            self._pool.count("resets")
            return await self._ask(self._lease, Reset(self._lease.session, self._tag, seed, self._frames))

    async def step(self, text: str) -> Observation:
        """Carry out an action. Raises as `reset` does, and `EnvironmentFailed` without a successful reset before."""
        with self._one_call():
            self._pool.check_open()
            if self._lease is None:
                raise self._failed("a step without a successful reset before it")
            self._turn = 0 if self._turn is None else self._turn + 1
            self._pool.count("steps")
            return await self._ask(self._lease, Step(self._lease.session, text))

    async def close(self) -> None:
        """Give back the environment and the slot. A running call raises `EnvironmentFailed`."""
        self._closed = True
        self._release("interrupted" if self._busy else "whole")

    @property
    def _who(self) -> Who:
        return Who(self._tag, self._seed)

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        if self._busy:
            raise RuntimeError(f"environment `{self._tag}`, seed {self._seed}: two calls at the same time")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    async def _taken(self) -> Lease:
        try:
            with waiting("places for episodes", "a place"):
                lease = await self._pool.take(self._who)
        except TimeoutError:
            limit = f"{self._pool.place_timeout_seconds:g} s (place_timeout_seconds)"
            raise self._failed(f"no place among the running episodes within {limit}") from None
        if self._closed:
            self._pool.give_back(lease, "interrupted")
            raise self._failed("closed while it waited for a place")
        return lease

    def _failed(self, cause: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"environment `{self._tag}`, seed {self._seed}: {cause}")

    async def _ask(self, lease: Lease, command: Reset | Step) -> Observation:
        try:
            with self._pool.busy.working():
                outcome = await lease.process.ask(command, self._who)
        except ProcessLost as lost:
            self._release("interrupted")
            self._pool.check_open()
            outcome = self._loss(lease, str(lost))
        except BaseException:
            self._release("interrupted")
            raise
        if isinstance(outcome, EnvFailure):
            self._release("failed")
            self._pool.count(f"failures/{outcome.tag}/{outcome.kind}")
            raise SessionFailed(outcome)
        return outcome

    def _loss(self, lease: Lease, cause: str) -> EnvFailure:
        proven = lease.alone and lease.process.is_lost
        cause += "; no other environment was in it" if proven else ""
        return EnvFailure(self._tag, self._seed, self._turn, "lost", cause, proven)

    def _release(self, end: SessionEnd) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            self._pool.give_back(lease, end)


EXIT_TIMEOUT_SECONDS = 10.0


class ProcessLost(Exception):
    """The process is gone. The message is the cause."""


@dataclass(frozen=True)
class Death:
    """The cause of a process's early death, and the suspects."""

    because: str
    suspects: frozenset[Who]
    """Episodes with a call in flight when the process died. A call that was never sent kills no process."""


@dataclass(frozen=True)
class OpenCall:
    """A call without an answer."""

    who: Who
    answer: asyncio.Future[Observation | EnvFailure]


class EnvProcess:
    """The process and its sessions."""

    def __init__(
        self, name: str, actor: ActorHandle, silence_seconds: float, on_retire: Callable[[EnvProcess, str], None]
    ) -> None:
        self.name = name
        self.pid: int | None = None
        self.counts: dict[str, int] = {}
        """Totals of its last report."""
        self._actor = actor
        self._silence_seconds = silence_seconds
        self._on_retire = on_retire
        self._numbers = itertools.count()
        self._sessions: set[int] = set()
        self._pending: dict[int, OpenCall] = {}
        self._outgoing: list[Command] = []
        self._to_send = asyncio.Event()
        self._lost_because: str | None = None
        self._retiring = False
        self._drained = asyncio.Event()

    @property
    def load(self) -> int:
        """Number of sessions."""
        return len(self._sessions)

    @property
    def is_lost(self) -> bool:
        """True if the process has ended or no longer answers."""
        return self._lost_because is not None

    @property
    def takes_sessions(self) -> bool:
        """True if new episodes may begin in it."""
        return not self.is_lost and not self._retiring

    async def start(self, timeout_seconds: float) -> None:
        """Wait until the process takes commands. Raises `ProcessLost`."""
        self.pid = await self._remote(self._actor.start.remote(), timeout_seconds)

    def open(self) -> int:
        """Open a session and return its number. The process learns of it with its first `Reset`."""
        session = next(self._numbers)
        self._sessions.add(session)
        return session

    def release(self, session: int) -> None:
        """End a session. A running call of it raises `ProcessLost`."""
        self._sessions.discard(session)
        self._send(Close(session))
        if session in self._pending:
            self._fail(session, "its session was closed during the call")
        self._end_if_drained()

    def retire(self) -> None:
        """Let the process end with its last session."""
        self._retiring = True
        self._end_if_drained()

    async def ask(self, command: Reset | Step, who: Who) -> Observation | EnvFailure:
        """Send a command and return its outcome. Raises `ProcessLost`."""
        if self._lost_because is not None:
            raise ProcessLost(self._lost_because)
        call = OpenCall(who, asyncio.get_running_loop().create_future())
        self._pending[command.session] = call
        self._send(command)
        try:
            with waiting(f"{WORKER}{self.name}", f"{type(command).__name__.lower()} of {who.tag}, seed {who.seed}"):
                return await call.answer
        finally:
            del self._pending[command.session]

    async def serve(self) -> Death | None:
        """Transfer commands and answers until the process ends.

        Returns how the process died, or None if it was retired and its last session has ended. After a death, open
        calls fail with `ProcessLost`.
        """
        watches = [asyncio.ensure_future(work) for work in (self._submit(), self._collect(), self._drained.wait())]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for watch in watches:
                if watch.done():
                    watch.result()
            return None
        except ProcessLost as lost:
            death = Death(str(lost), self._suspects())
            self.lose(death.because)
            return death
        finally:
            for watch in watches:
                watch.cancel()

    def lose(self, because: str) -> None:
        """Fail all calls with `ProcessLost`, now and later. The first cause is kept."""
        self._lost_because = self._lost_because or because
        for session in self._pending:
            self._fail(session, self._lost_because)

    async def close_environments(self, timeout_seconds: float) -> None:
        """Let the environments end their own processes and connections. `kill` handles those that cannot."""
        try:
            await self._remote(self._actor.close.remote(), timeout_seconds)
        except ProcessLost:
            return

    async def kill(self) -> None:
        """Kill the process, whatever it is doing, and wait until Ray reports its death."""
        ray.kill(self._actor)
        try:
            await asyncio.wait_for(self._actor.start.remote(), EXIT_TIMEOUT_SECONDS)
        except (RayError, TimeoutError):
            return

    def _send(self, command: Command) -> None:
        if self._lost_because is None:
            self._outgoing.append(command)
            self._to_send.set()

    async def _submit(self) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            commands, self._outgoing = self._outgoing, []
            await self._remote(self._actor.submit.remote(commands), self._silence_seconds)

    async def _collect(self) -> None:
        wait_seconds = self._silence_seconds / 4
        while True:
            report: Report = await self._remote(self._actor.collect.remote(wait_seconds), self._silence_seconds)
            self.counts = report.counts
            for answer in report.answers:
                self._answer(answer.session, answer.outcome)
            if report.retire_because is not None and not self._retiring:
                self._on_retire(self, report.retire_because)
                self.retire()

    async def _remote(self, reference: ray.ObjectRef, seconds: float) -> Any:
        """Return an answer of the actor. Raises `ProcessLost`."""
        answer = asyncio.wrap_future(reference.future())
        try:
            # Not `asyncio.timeout`: if this process itself was suspended, an answer that has arrived still counts.
            await asyncio.wait([answer], timeout=seconds)
            if not answer.done():
                raise ProcessLost(f"the worker process did not answer for {seconds:g} s, and was killed")
            return answer.result()
        except RayTaskError as error:
            raise ProcessLost(f"the worker process failed ({_last_line(error)})") from error
        except ACTOR_GONE as error:
            because = memory_death(error) or death_cause(str(error))
            raise ProcessLost(f"the worker process died ({because})") from error
        except RayError as error:
            raise ProcessLost(f"the worker process cannot be reached ({_last_line(error)})") from error
        finally:
            answer.cancel()

    def _suspects(self) -> frozenset[Who]:
        unsent = {command.session for command in self._outgoing}
        calls = ((session, call) for session, call in self._pending.items() if session not in unsent)
        return frozenset(call.who for _, call in calls if not call.answer.done())

    def _answer(self, session: int, outcome: Observation | EnvFailure) -> None:
        call = self._pending.get(session)
        if call is not None and not call.answer.done():
            call.answer.set_result(outcome)

    def _fail(self, session: int, because: str) -> None:
        answer = self._pending[session].answer
        if not answer.done():
            answer.set_exception(ProcessLost(because))

    def _end_if_drained(self) -> None:
        if self._retiring and not self._sessions:
            self._drained.set()


def death_cause(text: str) -> str:
    """Return what Ray's long text about a dead actor says about the cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no cause given"]
    ends = [line for line in lines if line.startswith("The actor is dead")]
    if not ends:
        return lines[-1]  # the actor failed to start, and this is the error
    exit_code = re.search(r"exit code (-?\d+)", ends[-1])
    if exit_code is not None:
        return f"its process ended with exit code {exit_code[1]}"
    if "connection error" in ends[-1]:
        return "its process ended without a word, by a signal or an exit"
    return ends[-1].split(". ")[0].rstrip(".")


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1]


class Quarantine:
    """The turn and the process."""

    def __init__(self, order_process: Callable[[], None]) -> None:
        """Prepare without starting. ``order_process`` must lead to a call of `admit` or of `close`."""
        self._order_process = order_process
        self._turn = Places(1)
        self._process: EnvProcess | None = None
        self._is_ordered = False
        self._news = asyncio.Event()
        self._closed_because: str | None = None

    @property
    def waiting(self) -> int:
        """Number of sessions that wait for their turn."""
        return self._turn.waiting

    async def enter(self) -> None:
        """Wait for the turn. A cancelled call has not entered. Raises `EnvPoolClosed`."""
        await self._turn.take()

    def leave(self) -> None:
        """End the turn."""
        self._turn.give_back()

    async def process(self) -> EnvProcess:
        """Return the process. Only the holder of the turn may call this. Raises `EnvPoolClosed`."""
        while self._process is None or not self._process.takes_sessions:
            if self._closed_because is not None:
                raise EnvPoolClosed(self._closed_because)
            self._news.clear()
            if not self._is_ordered:
                self._is_ordered = True
                self._order_process()
            await self._news.wait()
        return self._process

    def admit(self, process: EnvProcess) -> None:
        """Accept a new process."""
        self._process = process
        self._is_ordered = False
        self._news.set()

    def close(self, because: str) -> None:
        """Make all waiting raise `EnvPoolClosed`."""
        self._closed_because = because
        self._turn.close(because)
        self._news.set()


DEATHS_TO_CONFINE = 2


class Who(NamedTuple):
    """Tag and seed, which identify an episode and its repetitions."""

    tag: str
    seed: int


class Suspects:
    """Record of the episodes that were in a call when a process died."""

    def __init__(self) -> None:
        self._deaths: Counter[Who] = Counter()
        self._proven: set[Who] = set()

    def must_be_alone(self, who: Who) -> bool:
        """Return True if its episodes must not share their process."""
        return who in self._proven or self._deaths[who] >= DEATHS_TO_CONFINE

    def process_died(self, in_a_call: Iterable[Who]) -> None:
        """Record a death. Each of these may have caused it; several episodes of one count once."""
        self._deaths.update(set(in_a_call))

    def prove(self, who: Who) -> None:
        """Record that it was alone in a process that died."""
        self._proven.add(who)

    def acquit(self, who: Who) -> None:
        """Clear the suspicion: an episode of it has ended alone in a process that did not die. Proof stays."""
        del self._deaths[who]
