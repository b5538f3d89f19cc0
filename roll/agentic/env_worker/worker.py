"""The process of one environment worker: an async Ray actor around an `EnvHost`.

Commands arrive in batches and answers leave in batches through one long poll, so the cost of crossing processes is paid
per event, not per step. An environment's failure travels as data. An error of the worker itself makes the poll fail,
and the whole process is replaced.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.agentic.env_worker.host import EnvHost, HostSession
from roll.agentic.env_worker.records import (
    Answer,
    Close,
    Command,
    EnvFailure,
    EnvSpec,
    HostSettings,
    Report,
    Reset,
    Step,
)
from roll.agentic.episode import Observation
from roll.data.imports import DriverFolders, import_object
from roll.tracking.chatter import give_away_output
from roll.tracking.logs import configure_logging

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
