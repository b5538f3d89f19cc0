"""One worker process as the driver sees it: commands go in, answers come out, until it dies or retires.

All commands of one turn of the event loop leave in one call. The next call leaves when that one has arrived. So batches
grow under load, and commands never overtake each other. The long poll for answers is the process's sign of life.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from roll.agentic.env_worker.records import Close, Command, EnvFailure, Report, Reset, Step
from roll.agentic.env_worker.suspects import Who
from roll.agentic.episode import Observation
from roll.data.actor_deaths import ACTOR_GONE, memory_death
from roll.tracking.waits import WORKER, waiting

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
