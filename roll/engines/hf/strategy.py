"""`hf_infer`: the embedded generation engine, transformers in a thread behind the `InferStrategy` protocol.

The thread owns the model, so the engine needs no locks; the event loop owns the requests. They meet in two places only:
a queue of commands into the thread, and one report per step out of it, however many requests ended in that step. If the
thread fails, every request and every later call fails with `EngineFailed` and its cause; nothing waits for a thread
that has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, get_args

import numpy as np
import torch

from roll.configs.plugins import problem
from roll.engines.base import (
    Completion,
    EngineFailed,
    GenerateRequest,
    InferStrategy,
    ModelSpec,
    PauseMode,
    StopStrings,
    TokenChunk,
    eos_token_ids,
    load_tokenizer,
)
from roll.engines.hf.engine import EngineOutput, HFEngine, StagedWeights
from roll.engines.hf.model import load_model
from roll.engines.options import parse_hf_options
from roll.weights.buckets import HeldWeights, WeightBucket

_JOIN_TIMEOUT_SECONDS = 120.0
"""Longest wait for the thread to end after its last step."""


class _State(Enum):
    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


@dataclass
class EngineReport:
    """Results of one turn of the thread, for the event loop."""

    output: EngineOutput
    rejected: list[tuple[int, ValueError]]
    """Requests that cannot run, each with the reason."""
    failure: BaseException | None = None
    """Error that ended the thread."""

    def __bool__(self) -> bool:
        return bool(self.output.completions or self.output.chunks or self.rejected or self.failure)


def engine_failed_from(cause: BaseException) -> EngineFailed:
    """Return a new ``EngineFailed`` with the cause in its text and attached. Each waiting caller raises its own."""
    failure = EngineFailed(f"the engine stopped: {cause!r}")
    failure.__cause__ = cause
    return failure


class EngineThread:
    """Runs an engine. Only the event loop that made it calls the methods without an underscore."""

    def __init__(self, build_engine: Callable[[], HFEngine], receive: Callable[[EngineReport], None]) -> None:
        self._build_engine = build_engine
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="hf_infer", daemon=True)
        self._commands: deque[tuple[Callable[[HFEngine], Any], Future[Any]]] = deque()
        self._arrived = threading.Condition()
        self._failure: BaseException | None = None
        self._engine: HFEngine | None = None
        self._state = _State.RUNNING
        self._drains: list[Future[None]] = []
        self._rejected: list[tuple[int, ValueError]] = []
        self._closing = False

    @property
    def engine(self) -> HFEngine:
        """The engine. Only its own thread may do more than read counters. Raises ``EngineFailed`` with the cause if the
        thread has ended."""
        if self._failure is not None:
            raise engine_failed_from(self._failure)
        if self._engine is None:
            raise EngineFailed("the engine is not there yet")
        return self._engine

    async def start(self) -> None:
        """Build the engine in the thread. Raises what building it raises."""
        self._thread.start()
        try:
            await self.call(lambda engine: None)
        except EngineFailed as failure:
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_SECONDS)
            if failure.__cause__ is not None and self._engine is None:
                raise failure.__cause__ from None
            raise

    def submit(self, key: int, request: GenerateRequest, streaming: bool) -> None:
        """Queue a request."""

        def command(engine: HFEngine) -> None:
            try:
                engine.submit(key, request, streaming)
            except ValueError as error:
                self._rejected.append((key, error))

        self._post(fatal(command))

    def abandon(self, key: int) -> None:
        """Abort a request that no caller waits for any more."""
        with suppress(EngineFailed):
            self._post(fatal(lambda engine: engine.abort([key])))

    async def call(self, function: Callable[[HFEngine], Any]) -> Any:
        """Run a function on the engine between two steps. Raises what it raises, and ``EngineFailed`` with the cause if
        the thread has ended."""
        return await asyncio.wrap_future(self._post(function))

    async def call_while_still(self, function: Callable[[HFEngine], Any], name: str) -> Any:
        """Run a function like `call`, but raise ``RuntimeError`` unless the engine is paused or idle."""

        def command(engine: HFEngine) -> Any:
            busy = engine.running + engine.waiting
            if self._state is not _State.PAUSED and busy:
                raise RuntimeError(f"{name} needs a paused or idle engine; {busy} requests are in progress")
            return function(engine)

        return await self.call(command)

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; see `InferStrategy.pause`."""
        if mode not in get_args(PauseMode):
            raise ValueError(f"pause mode {mode!r} is unknown; one of {', '.join(get_args(PauseMode))}")
        if mode == "drain":
            await asyncio.wrap_future(await self.call(self._begin_drain))
        else:
            await self.call(lambda engine: self._pause(engine, mode))

    async def resume(self) -> None:
        """Resume decoding; see `InferStrategy.resume`."""
        await self.call(self._resume)

    async def shutdown(self) -> None:
        """End all requests as aborted and join the thread."""
        with suppress(EngineFailed):
            self._post(self._close)
        await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            raise EngineFailed(f"a step of the engine did not end within {_JOIN_TIMEOUT_SECONDS:.0f} s of shutdown")
        self._engine = None

    def _post(self, command: Callable[[HFEngine], Any]) -> Future[Any]:
        """Queue a command. Its answer comes after the report of what it ended."""
        answer = _uncancellable()
        with self._arrived:
            if self._failure is not None:
                raise engine_failed_from(self._failure)
            self._commands.append((command, answer))
            self._arrived.notify()
        return answer

    def _run(self) -> None:
        failure: BaseException = EngineFailed("it was shut down")
        try:
            engine = self._engine = self._build_engine()
            while not self._closing:
                self._turn(engine)
        except BaseException as error:  # noqa: BLE001 - reported to every waiter, whatever it is
            failure = error
        with self._arrived:
            self._failure = failure
        self._send_report()
        for answer in [*(answer for _, answer in self._commands), *self._drains]:
            answer.set_exception(engine_failed_from(failure))

    def _turn(self, engine: HFEngine) -> None:
        """Run all commands so far, then one step. Wait for a command if there is nothing to compute."""
        with self._arrived:
            while not self._commands and not self._can_step(engine):
                self._arrived.wait()
        while self._commands:
            self._carry_out(engine, *self._commands.popleft())
        if self._can_step(engine):
            engine.step(admit=self._state is _State.RUNNING)
        if self._state is _State.DRAINING and not engine.running:
            self._state = _State.PAUSED
            self._send_report()
            self._end_drains(None)
        self._send_report()

    def _carry_out(self, engine: HFEngine, command: Callable[[HFEngine], Any], answer: Future[Any]) -> None:
        """Run a command. Its own mistakes go to its caller; an ``EngineFailed`` ends the thread."""
        try:
            result = command(engine)
        except BaseException as error:
            answer.set_exception(error)
            if isinstance(error, EngineFailed) or not isinstance(error, Exception):
                raise
        else:
            self._send_report()
            answer.set_result(result)

    def _can_step(self, engine: HFEngine) -> bool:
        if self._closing or engine.asleep or self._state is _State.PAUSED:
            return False
        return bool(engine.running or (engine.waiting and self._state is _State.RUNNING))

    def _send_report(self) -> None:
        output = EngineOutput() if self._engine is None else self._engine.take_output()
        report, self._rejected = EngineReport(output, self._rejected, self._failure), []
        if self._loop.is_closed():
            self._closing = True
        elif report:
            self._loop.call_soon_threadsafe(self._receive, report)

    def _begin_drain(self, engine: HFEngine) -> Future[None]:
        drained: Future[None] = _uncancellable()
        self._drains.append(drained)
        self._state = _State.DRAINING
        return drained

    def _pause(self, engine: HFEngine, mode: PauseMode) -> None:
        self._end_drains(RuntimeError(f"the drain was interrupted by pause({mode!r})"))
        self._state = _State.PAUSED
        if mode == "resume":
            engine.drop_caches()

    def _resume(self, engine: HFEngine) -> None:
        if engine.asleep:
            raise RuntimeError("the engine sleeps; wake it before resume")
        self._end_drains(RuntimeError("the drain was interrupted by resume()"))
        self._state = _State.RUNNING

    def _end_drains(self, error: RuntimeError | None) -> None:
        for drained in self._drains:
            if error is None:
                drained.set_result(None)
            else:
                drained.set_exception(error)
        self._drains.clear()

    def _close(self, engine: HFEngine) -> None:
        self._end_drains(RuntimeError("the drain was interrupted by shutdown()"))
        engine.abort_all()
        self._closing = True


def fatal(command: Callable[[HFEngine], None]) -> Callable[[HFEngine], None]:
    """Return a command whose errors end the engine: no caller waits for its answer, so nothing else would show them."""

    def carry_out(engine: HFEngine) -> None:
        try:
            command(engine)
        except Exception as error:
            raise EngineFailed(f"a request could not be handled: {error!r}") from error

    return carry_out


def _uncancellable() -> Future[Any]:
    """Return a future that a cancelled waiter leaves alone: what was ordered is done."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass
class _Waiter:
    """A caller that waits for a request: for its completion, or for its chunks."""

    request_id: str
    events: asyncio.Queue[Completion | TokenChunk | Exception] = field(default_factory=asyncio.Queue)

    async def next(self) -> Any:
        """Return the next event; raise it if it is an error."""
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        return event


class HFInferStrategy(InferStrategy):
    """One engine replica. Call every method in the event loop that called `start`."""

    def __init__(
        self,
        model_path: str,
        *,
        device: str,
        dtype: str,
        attn_implementation: str,
        max_length: int,
        trust_remote_code: bool = False,
        eos_token_ids: Sequence[int] | None = None,
        devices_per_engine: int = 1,
        shares_devices: bool = False,
        transport: str = "object_store",
        strategy_config: dict[str, Any],
    ) -> None:
        """``eos_token_ids`` defaults to the model's own. Raises ``ConfigError`` for a wrong ``strategy_config``, or for
        more than one GPU.

        The engine computes on one GPU at most (``devices_per_engine``). Sleeping needs no preparation, so
        ``shares_devices`` has no effect. Weights always come in buckets, so ``transport`` has none either.
        """
        if device == "cuda" and devices_per_engine > 1:
            raise problem("actor_infer.num_gpus_per_engine", "hf_infer computes on one GPU", "write 1")
        self._config = parse_hf_options(strategy_config)
        self._spec = ModelSpec(model_path, device, dtype, attn_implementation, max_length, trust_remote_code)
        self._eos_token_ids = eos_token_ids
        self._waiters: dict[int, _Waiter] = {}
        self._keys: dict[str, int] = {}
        self._next_key = itertools.count()
        self._thread: EngineThread | None = None
        self._staged: StagedWeights | None = None

    async def start(self) -> None:
        """Load the model (as version 0) and accept requests. Raises ``ConfigError`` for a model that the engine cannot
        drive."""
        if self._thread is not None:
            raise RuntimeError("this engine was started before")
        self._thread = EngineThread(self._build_engine, self._receive)
        await self._thread.start()

    async def generate(self, request: GenerateRequest) -> Completion:
        key = self._submit(request, streaming=False)
        try:
            return await self._waiters[key].next()
        finally:
            self._forget(key)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield the tokens of a request, one chunk per step; see `InferStrategy.stream`."""
        key = self._submit(request, streaming=True)
        waiter = self._waiters[key]
        try:
            while True:
                chunk: TokenChunk = await waiter.next()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._forget(key)

    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        keys = {self._keys[request_id]: count for request_id, count in known.items() if request_id in self._keys}
        chunks = await self._live_thread().call(lambda engine: engine.progress(keys))
        return {self._waiters[key].request_id: chunk for key, chunk in chunks.items() if key in self._waiters}

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        return await self._live_thread().call(lambda engine: engine.score(token_ids))

    async def abort(self, request_ids: Sequence[str]) -> None:
        keys = [self._keys[request_id] for request_id in request_ids if request_id in self._keys]
        await self._live_thread().call(lambda engine: engine.abort(keys))

    async def pause(self, mode: PauseMode) -> None:
        await self._live_thread().pause(mode)

    async def resume(self) -> None:
        await self._live_thread().resume()

    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> HeldWeights:
        """Take in a weight update (see `HFEngine.stage_weights`), in a thread of its own beside decoding."""
        engine = self._live_thread().engine
        self._staged = None
        self._staged = await asyncio.to_thread(engine.stage_weights, buckets, version)
        return self._staged.receipt

    async def load_weights(self, version: int) -> HeldWeights:
        thread, staged = self._live_thread(), self._staged
        if staged is None or staged.receipt.version != version:
            prepared = "nothing" if staged is None else f"version {staged.receipt.version}"
            raise RuntimeError(f"load_weights of version {version}: {prepared} was prepared")
        receipt = await thread.call_while_still(lambda engine: engine.load_weights(staged), "load_weights")
        self._staged = None
        return receipt

    async def sleep(self) -> None:
        await self._live_thread().call_while_still(lambda engine: engine.sleep(), "sleep")

    async def wake(self) -> None:
        await self._live_thread().call(lambda engine: engine.wake())

    def stats(self) -> dict[str, Any]:
        """Return `running`, `waiting`, `version`, `kv_bytes`, the totals `generated_tokens`, `prefill_tokens` and
        `busy_seconds`, and `busy_spans`."""
        engine = self._live_thread().engine
        running = engine.running
        return {
            "running": running,
            "waiting": max(len(self._waiters) - running, 0),
            "version": engine.version,
            "generated_tokens": engine.generated_tokens,
            "prefill_tokens": engine.prefill_tokens,
            "kv_bytes": engine.kv_bytes,
            **engine.clock.stats(),
        }

    async def shutdown(self) -> None:
        if self._thread is not None:
            await self._thread.shutdown()

    def _build_engine(self) -> HFEngine:
        """Build the engine. Runs in the engine's thread."""
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        model = load_model(self._spec)
        end_tokens = self._eos_token_ids
        if end_tokens is None:
            end_tokens = eos_token_ids(self._spec, model.config)
        stop_strings = StopStrings(lambda: load_tokenizer(self._spec))
        return HFEngine(model, self._spec.max_length, self._config, end_tokens, stop_strings)

    def _live_thread(self) -> EngineThread:
        if self._thread is None:
            raise EngineFailed("the engine has not been started")
        return self._thread

    def _submit(self, request: GenerateRequest, streaming: bool) -> int:
        thread = self._live_thread()
        if request.request_id in self._keys:
            raise ValueError(f"request {request.request_id!r} cannot run: another one with this id is running")
        key = next(self._next_key)
        thread.submit(key, request, streaming)
        self._waiters[key] = _Waiter(request.request_id)
        self._keys[request.request_id] = key
        return key

    def _forget(self, key: int) -> None:
        """Drop a waiter that has left. Abort its request if it has not ended."""
        if self._end(key) is not None and self._thread is not None:
            self._thread.abandon(key)

    def _end(self, key: int) -> _Waiter | None:
        waiter = self._waiters.pop(key, None)
        if waiter is not None:
            del self._keys[waiter.request_id]
        return waiter

    def _receive(self, report: EngineReport) -> None:
        """Receive a report of the thread: its only callback, in the event loop."""
        for key, chunk in report.output.chunks:
            listener = self._waiters.get(key)
            if listener is not None:
                listener.events.put_nowait(chunk)
        ended: list[tuple[int, Completion | Exception]] = [*report.output.completions, *report.rejected]
        if report.failure is not None:
            ended += [(key, engine_failed_from(report.failure)) for key in self._waiters]
        for key, event in ended:
            waiter = self._end(key)
            if waiter is not None:
                waiter.events.put_nowait(event)
