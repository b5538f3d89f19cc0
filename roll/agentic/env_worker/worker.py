"""The process of one environment worker: an async Ray actor around an `EnvHost`.

Commands come in batches and answers leave in batches through one long poll, so the cost of crossing processes is paid
per event, not per step. What is wrong with an environment travels as data; an error of the worker itself makes the
poll fail, so that the whole process is replaced.
"""

from __future__ import annotations

import asyncio
import os
import sys
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
from roll.data.imports import import_object
from roll.tracking.chatter import give_away_output
from roll.tracking.logs import configure_logging

GATHER_SECONDS = 0.005
"""How long a report waits for more answers: little beside a policy's turn, and it saves most of the reports."""


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker process needs to begin. Functions travel by name, since a user's module is found only after the
    folders are."""

    name: str
    specs: Mapping[str, EnvSpec]
    host: HostSettings
    make_env: str
    """`package.module:function`, an `EnvFactory`."""
    observe: str
    """The same, an `Observe`."""
    import_folders: tuple[str, ...]
    log_dir: str | None


class EnvWorker:
    """Body of the actor."""

    def __init__(self, setup: WorkerSetup) -> None:
        sys.path += [folder for folder in setup.import_folders if folder not in sys.path]
        if setup.log_dir is not None:
            give_away_output(Path(setup.log_dir), setup.name)
            configure_logging(Path(setup.log_dir), setup.name)
        self._setup = setup
        self._make_env = import_object(setup.make_env)
        self._observe = import_object(setup.observe)

    async def start(self) -> int:
        """Be ready for commands. Returns the process id."""
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
        """Take commands on, in order. Answers come out of `collect`."""
        for command in commands:
            match command:
                case Reset():
                    if command.session not in self._sessions:
                        self._sessions[command.session] = self._host.open(command.tag, command.frames)
                    self._begin(command.session, self._sessions[command.session].reset(command.seed))
                case Step():
                    self._begin(command.session, self._sessions[command.session].step(command.text))
                case Close():
                    if command.session in self._sessions:  # it may have been given up before its first reset
                        self._sessions.pop(command.session).release()

    async def collect(self, wait_seconds: float) -> Report:
        """What ended since the last call; waits for something at most ``wait_seconds``."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._any_news.wait()
            await asyncio.sleep(GATHER_SECONDS)
        except TimeoutError:
            pass  # no news is a report too: the process lives
        self._any_news.clear()
        if self._broken is not None:
            raise self._broken
        answers, self._answers = self._answers, []
        return Report(answers, self._look_for_leaks(), dict(self._host.counts))

    async def close(self) -> None:
        """Close all environments, as far as they let themselves be closed in time."""
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
