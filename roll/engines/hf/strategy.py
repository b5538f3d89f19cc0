"""`hf_infer`: the embedded generation engine, transformers in a thread behind the `InferStrategy` protocol.

The thread owns the model, so the engine needs no locks; the event loop owns the requests. They meet in two places only:
a queue of commands into the thread, and one callback per step out of it, however many requests ended in that step. If
the thread fails, every request and every later call fails with `EngineFailed` and its cause; nothing waits for a thread
that has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from roll.configs.errors import ConfigError, ConfigProblem
from roll.engines.base import Completion, EngineFailed, GenerateRequest, PauseMode, TokenChunk
from roll.engines.hf.engine import EngineLimits, EngineOutput, HFEngine, StagedWeights
from roll.engines.hf.model import load_model
from roll.engines.hf.options import parse_options
from roll.engines.model_facts import ModelSpec, eos_token_ids, load_tokenizer
from roll.engines.requests import StopStrings
from roll.weights.buckets import HeldWeights, WeightBucket

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


@dataclass
class _Waiter:
    """A caller that waits for a request: for its completion, or for its chunks."""

    request_id: str
    completion: asyncio.Future[Completion] | None = None
    chunks: asyncio.Queue[TokenChunk | Exception] | None = None

    def fail(self, error: Exception) -> None:
        if self.chunks is not None:
            self.chunks.put_nowait(error)
        elif self.completion is not None and not self.completion.done():
            self.completion.set_exception(error)


class HFInferStrategy:
    """One engine replica; implements `InferStrategy`. Call every method in the event loop that called `start`."""

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
            raise ConfigError(
                [ConfigProblem("actor_infer.num_gpus_per_engine", "hf_infer computes on one GPU", "write 1")]
            )
        self._config = parse_options(strategy_config)
        self._spec = ModelSpec(model_path, device, dtype, attn_implementation, max_length, trust_remote_code)
        self._eos_token_ids = None if eos_token_ids is None else tuple(eos_token_ids)
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
        self._thread = EngineThread(self._build_engine, asyncio.get_running_loop(), self._receive)
        await self._thread.start()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request to its end. Raises ``ValueError`` for a request that cannot run, ``EngineFailed`` if the
        engine fails."""
        completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        key = self._submit(request, _Waiter(request.request_id, completion=completion))
        try:
            return await completion
        finally:
            self._forget(key)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield the tokens of a request, one chunk per step. Leaving the iteration early aborts the request."""
        chunks: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        key = self._submit(request, _Waiter(request.request_id, chunks=chunks))
        try:
            while True:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._forget(key)

    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        """Return the new tokens of the running requests, taken between two steps of the engine's thread."""
        keys = {self._keys[request_id]: count for request_id, count in known.items() if request_id in self._keys}
        chunks = await self._live_thread().call(lambda engine: engine.progress(keys))
        return {self._waiters[key].request_id: chunk for key, chunk in chunks.items() if key in self._waiters}

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return log-probabilities at temperature 1, computed between two steps.

        Raises ``ValueError`` for a sequence that does not fit the model, ``RuntimeError`` while the engine sleeps.
        """
        return await self._live_thread().call(lambda engine: engine.score(token_ids))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now. Unknown ids are ignored."""
        keys = [self._keys[request_id] for request_id in request_ids if request_id in self._keys]
        await self._live_thread().call(lambda engine: engine.abort(keys))

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; see the protocol.

        A `drain` raises ``RuntimeError`` if another `pause`, `resume` or `shutdown` interrupts it.
        """
        await self._live_thread().pause(mode)

    async def resume(self) -> None:
        """Resume decoding after `pause`. Raises ``RuntimeError`` while the engine sleeps."""
        await self._live_thread().resume()

    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> HeldWeights:
        """Take in a weight update (see `HFEngine.stage_weights`), in a thread of its own beside decoding."""
        engine = self._live_thread().engine
        self._staged = None
        self._staged = await asyncio.to_thread(engine.stage_weights, buckets, version)
        return self._staged.receipt

    async def load_weights(self, version: int) -> HeldWeights:
        """Replace all weights by the prepared ones.

        Raises ``RuntimeError`` unless the engine is paused or idle, or if this version is not the one prepared.
        """
        thread, staged = self._live_thread(), self._staged
        if staged is None or staged.receipt.version != version:
            prepared = "nothing" if staged is None else f"version {staged.receipt.version}"
            raise RuntimeError(f"load_weights of version {version}: {prepared} was prepared")
        receipt = await thread.call_while_still(lambda engine: engine.load_weights(staged), "load_weights")
        self._staged = None
        return receipt

    async def sleep(self) -> None:
        """Free the caches and move the weights to the host. Raises ``RuntimeError`` unless paused or idle."""
        await self._live_thread().sleep()

    async def wake(self) -> None:
        """Undo `sleep`. The engine stays paused if it was."""
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
            "generated_tokens": engine.counters.generated_tokens,
            "prefill_tokens": engine.counters.prefill_tokens,
            "busy_seconds": engine.counters.busy_seconds,
            "busy_spans": engine.counters.busy_spans.recent(),
            "kv_bytes": engine.kv_bytes,
        }

    async def shutdown(self) -> None:
        """End all requests as aborted, end the thread and free the model. Harmless to repeat."""
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
        limits = EngineLimits(self._spec.max_length, self._config.max_running_requests, self._config.max_prefill_tokens)
        return HFEngine(model, limits, end_tokens, StopStrings(lambda: load_tokenizer(self._spec)))

    def _live_thread(self) -> EngineThread:
        if self._thread is None:
            raise EngineFailed("the engine has not been started")
        self._thread.check_alive()
        return self._thread

    def _submit(self, request: GenerateRequest, waiter: _Waiter) -> int:
        thread = self._live_thread()
        if request.request_id in self._keys:
            raise ValueError(f"request {request.request_id!r} cannot run: another one with this id is running")
        key = next(self._next_key)
        self._waiters[key] = waiter
        self._keys[request.request_id] = key
        thread.submit(key, request, streaming=waiter.chunks is not None)
        return key

    def _forget(self, key: int) -> None:
        """Drop a waiter that has left. Abort its request if it has not ended."""
        waiter = self._waiters.pop(key, None)
        if waiter is None:
            return
        del self._keys[waiter.request_id]
        if self._thread is not None and self._thread.alive:
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
            if listener is not None and listener.chunks is not None:
                listener.chunks.put_nowait(chunk)
        for key, completion in report.output.completions:
            waiter = self._end(key)
            if waiter is not None and waiter.completion is not None and not waiter.completion.done():
                waiter.completion.set_result(completion)
        for key, error in report.rejected:
            waiter = self._end(key)
            if waiter is not None:
                waiter.fail(error)
        if report.failure is not None:
            for key in list(self._waiters):
                waiter = self._end(key)
                if waiter is not None:
                    waiter.fail(engine_failed_from(report.failure))
