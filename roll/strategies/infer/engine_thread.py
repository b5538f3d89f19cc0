"""The thread in which an engine lives: commands go in through a queue, one report per step comes out.

Only the thread touches the engine, so the engine needs no locks. Reports are delivered by one ``call_soon_threadsafe``
per turn, however many requests ended in it. An error that is not a command's own mistake ends the thread, and every
waiting caller gets the cause.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from roll.strategies.infer.base import EngineFailed, GenerateRequest, PauseMode
from roll.strategies.infer.hf_engine import EngineOutput, HFEngine

_JOIN_TIMEOUT_SECONDS = 120.0
"""Longest wait for the thread to end after its last step."""


class _State(Enum):
    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


@dataclass
class _Answer:
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


@dataclass
class EngineReport:
    """Results of one turn of the thread, for the event loop."""

    output: EngineOutput = field(default_factory=EngineOutput)
    rejected: list[tuple[int, ValueError]] = field(default_factory=list)
    """Requests that cannot run, each with the reason."""
    answers: list[_Answer] = field(default_factory=list)
    failure: BaseException | None = None
    """Error that ended the thread."""

    def __bool__(self) -> bool:
        return bool(self.output.completions or self.output.chunks or self.rejected or self.answers or self.failure)


def engine_failed_from(cause: BaseException) -> EngineFailed:
    """Return a new ``EngineFailed`` with the cause in its text and attached. Each waiting caller raises its own."""
    failure = EngineFailed(f"the engine stopped: {cause!r}")
    failure.__cause__ = cause
    return failure


class EngineThread:
    """Runs an engine. Only the event loop calls the methods without an underscore."""

    def __init__(
        self,
        build_engine: Callable[[], HFEngine],
        loop: asyncio.AbstractEventLoop,
        receive: Callable[[EngineReport], None],
    ) -> None:
        self._build_engine = build_engine
        self._loop = loop
        self._receive = receive
        self._thread = threading.Thread(target=self._run, name="hf_infer", daemon=True)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake_up = threading.Condition()
        self._open_calls: set[asyncio.Future[Any]] = set()
        self._failure: BaseException | None = None
        self._engine: HFEngine | None = None
        self._state = _State.RUNNING
        self._drain_calls: list[asyncio.Future[Any]] = []
        self._closing = False
        self._report = EngineReport()

    @property
    def alive(self) -> bool:
        """False once the engine has failed or was shut down."""
        return self._failure is None

    @property
    def engine(self) -> HFEngine:
        """The engine. Only its own thread may do more than read counters. Raises ``EngineFailed`` before the start."""
        if self._engine is None:
            raise EngineFailed("the engine is not there yet, or no longer")
        return self._engine

    def check_alive(self) -> None:
        """Raise ``EngineFailed`` with the cause if the thread has ended."""
        if self._failure is not None:
            raise engine_failed_from(self._failure)

    async def start(self) -> None:
        """Build the engine in the thread. Raises what building it raises."""
        started = self._new_call()
        self._inbox.append(lambda: self._answer(started))
        self._thread.start()
        try:
            await started
        except EngineFailed as failure:
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_SECONDS)
            if failure.__cause__ is not None and self._engine is None:
                raise failure.__cause__ from None
            raise

    def submit(self, key: int, request: GenerateRequest, streaming: bool) -> None:
        """Queue a request."""
        self._post(lambda: self._submit(key, request, streaming))

    def abandon(self, key: int) -> None:
        """Abort a request that no caller waits for any more."""
        self._post(lambda: self.engine.abort([key]))

    async def call(self, function: Callable[[HFEngine], Any]) -> Any:
        """Run a function on the engine between two steps."""
        return await self._command(lambda future: self._answer(future, function(self.engine)))

    async def call_while_still(self, function: Callable[[HFEngine], Any], name: str) -> Any:
        """Run a function like `call`, but raise ``RuntimeError`` unless the engine is paused or idle."""

        def command(future: asyncio.Future[Any]) -> None:
            busy = self.engine.running + self.engine.waiting
            if self._state is not _State.PAUSED and busy:
                raise RuntimeError(f"{name} needs a paused or idle engine; {busy} requests are in progress")
            self._answer(future, function(self.engine))

        return await self._command(command)

    async def sleep(self) -> None:
        """Call `HFEngine.sleep`, unless the engine sleeps already."""
        await self.call_while_still(lambda engine: None if engine.asleep else engine.sleep(), "sleep")

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; see `InferStrategy.pause`."""
        if mode not in ("keep", "resume", "drain"):
            raise ValueError(f"pause mode {mode!r} is unknown; one of keep, resume, drain")
        await self._command(lambda future: self._pause(mode, future))

    async def resume(self) -> None:
        """Resume decoding; see `InferStrategy.resume`."""
        await self._command(self._resume)

    async def shutdown(self) -> None:
        """End all requests as aborted and join the thread."""
        if self._thread.is_alive() and self.alive:
            self._post(self._close)
        await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            raise EngineFailed(f"a step of the engine did not end within {_JOIN_TIMEOUT_SECONDS:.0f} s of shutdown")
        self._engine = None

    def _new_call(self) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        self._open_calls.add(future)
        future.add_done_callback(self._open_calls.discard)
        return future

    async def _command(self, command: Callable[[asyncio.Future[Any]], None]) -> Any:
        future = self._new_call()
        self._post(lambda: self._guarded(command, future))
        return await future

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake_up:
            self._inbox.append(command)
            self._wake_up.notify()

    def _deliver(self, report: EngineReport) -> None:
        """Pass a report on to every caller it concerns. Runs in the event loop."""
        if report.failure is not None:
            self._failure = report.failure
        for answer in report.answers:
            if answer.future.done():
                continue
            if answer.error is None:
                answer.future.set_result(answer.result)
            else:
                answer.future.set_exception(answer.error)
        self._receive(report)
        if report.failure is not None:
            for future in self._open_calls:
                if not future.done():
                    future.set_exception(engine_failed_from(report.failure))

    def _run(self) -> None:
        try:
            self._engine = self._build_engine()
            while not self._closing:
                self._turn()
            self._report.failure = EngineFailed("it was shut down")
        except BaseException as error:  # noqa: BLE001 - reported to every waiter, whatever it is
            self._report.failure = error
        self._send_report()

    def _turn(self) -> None:
        for command in self._next_commands():
            command()
        if self._report.answers:
            # Answer commands now: their callers do not wait for the step that follows.
            self._report.output = self.engine.take_output()
            self._send_report()
        if self._can_step():
            self.engine.step(admit=self._state is _State.RUNNING)
        if self._state is _State.DRAINING and not self.engine.running:
            self._state = _State.PAUSED
            self._end_drain(None)
        self._report.output = self.engine.take_output()
        self._send_report()

    def _next_commands(self) -> list[Callable[[], None]]:
        """Return all commands so far; wait for one if there is nothing to compute."""
        with self._wake_up:
            while not self._inbox and not self._can_step():
                self._wake_up.wait()
            commands = list(self._inbox)
            self._inbox.clear()
        return commands

    def _can_step(self) -> bool:
        engine = self.engine
        if self._closing or engine.asleep or self._state is _State.PAUSED:
            return False
        return bool(engine.running or (engine.waiting and self._state is _State.RUNNING))

    def _send_report(self) -> None:
        report, self._report = self._report, EngineReport()
        if self._loop.is_closed():
            self._closing = True
        elif report:
            self._loop.call_soon_threadsafe(self._deliver, report)

    def _guarded(self, command: Callable[[asyncio.Future[Any]], None], future: asyncio.Future[Any]) -> None:
        """Run a command. Its own mistakes go to its caller; an ``EngineFailed`` ends the thread."""
        try:
            command(future)
        except EngineFailed:
            raise
        except Exception as error:  # noqa: BLE001 - raised again at the caller
            self._answer(future, error=error)

    def _answer(self, future: asyncio.Future[Any], result: Any = None, error: Exception | None = None) -> None:
        self._report.answers.append(_Answer(future, result, error))

    def _submit(self, key: int, request: GenerateRequest, streaming: bool) -> None:
        try:
            self.engine.submit(key, request, streaming)
        except ValueError as error:
            self._report.rejected.append((key, error))

    def _pause(self, mode: PauseMode, future: asyncio.Future[Any]) -> None:
        if mode == "drain":
            self._drain_calls.append(future)
            self._state = _State.DRAINING
            return
        self._end_drain(RuntimeError(f"the drain was interrupted by pause({mode!r})"))
        self._state = _State.PAUSED
        if mode == "resume":
            self.engine.drop_caches()
        self._answer(future)

    def _resume(self, future: asyncio.Future[Any]) -> None:
        if self.engine.asleep:
            raise RuntimeError("the engine sleeps; wake it before resume")
        self._end_drain(RuntimeError("the drain was interrupted by resume()"))
        self._state = _State.RUNNING
        self._answer(future)

    def _end_drain(self, error: RuntimeError | None) -> None:
        for future in self._drain_calls:
            self._answer(future, error=error)
        self._drain_calls.clear()

    def _close(self) -> None:
        self._end_drain(RuntimeError("the drain was interrupted by shutdown()"))
        self.engine.abort_all()
        self._closing = True
