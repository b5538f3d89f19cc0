"""`hf_infer`: the embedded generation engine, transformers in a thread behind the `InferStrategy` interface.

The thread owns the model, so the engine needs no locks; the event loop owns the requests. They communicate only through
a queue of commands to the thread, and one report per step from it, for all requests together. If the thread fails, all
requests and later calls fail with `EngineFailed` and the cause; nothing waits for a thread that has ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Literal, get_args

import numpy as np
import torch

from roll.configs.plugins import made, problem
from roll.engines.base import Completion, EngineFailed, GenerateRequest, InferStrategy, PauseMode, TokenChunk
from roll.engines.hf.engine import ActiveRequest, HFEngine
from roll.engines.hf.model import load_model
from roll.engines.options import HFInferConfig
from roll.weights.buckets import HeldWeights, WeightBucket

_JOIN_TIMEOUT_SECONDS = 120.0
"""Maximum wait for the thread to end at shutdown."""


Events = list[tuple[ActiveRequest, Completion | TokenChunk | Exception]]
"""Results of one iteration of the thread, reported to the event loop."""


def engine_failed_from(cause: BaseException) -> EngineFailed:
    """Return a new ``EngineFailed`` with this cause. Each waiting caller needs its own exception object."""
    failure = EngineFailed(f"the engine stopped: {cause!r}")
    failure.__cause__ = cause
    return failure


class EngineThread:
    """A thread that runs an engine. Its public methods may be called only in the event loop that created it."""

    def __init__(
        self, build_engine: Callable[[], HFEngine], receive: Callable[[Events, BaseException | None], None]
    ) -> None:
        """``build_engine`` runs in the thread. ``receive`` is called in the event loop with the results of each
        iteration, and with the error that ended the thread (None: it is running)."""
        self._build_engine = build_engine
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="hf_infer", daemon=True)
        self._commands: deque[tuple[Callable[[HFEngine], Any], Future[Any]]] = deque()
        self._arrived = threading.Condition()
        self._failure: BaseException | None = None
        self._engine: HFEngine | None = None
        self._state: Literal["running", "draining", "paused"] = "running"
        self._drains: list[Future[None]] = []
        self._closing = False

    @property
    def engine(self) -> HFEngine:
        """The engine. Other threads may only read its counters. Raises ``EngineFailed`` if the thread has ended."""
        if self._failure is not None:
            raise engine_failed_from(self._failure)
        if self._engine is None:
            raise EngineFailed("the engine is not there yet")
        return self._engine

    async def start(self) -> None:
        """Start the thread and build the engine in it. Raises the error if building fails."""
        self._thread.start()
        try:
            await self.call(lambda engine: None)
        except EngineFailed as failure:
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_SECONDS)
            if failure.__cause__ is not None and self._engine is None:
                raise failure.__cause__ from None
            raise

    def order(self, command: Callable[..., None], *args: Any) -> None:
        """Queue a command to run between two steps, without waiting for it. An error in it stops the engine."""

        def carry_out(_: HFEngine) -> None:
            try:
                command(*args)
            except Exception as error:
                raise EngineFailed(f"a request could not be handled: {error!r}") from error

        self._post(carry_out)

    async def call(self, function: Callable[[HFEngine], Any]) -> Any:
        """Run a function between two steps and return its result. Raises its exception, or ``EngineFailed`` if the
        thread has ended."""
        return await asyncio.wrap_future(self._post(function))

    async def call_while_still(self, function: Callable[[HFEngine], Any], name: str) -> Any:
        """Like `call`, but raise ``RuntimeError`` unless the engine is paused or idle. ``name`` is for the message."""

        def command(engine: HFEngine) -> Any:
            busy = engine.running + engine.waiting
            if self._state != "paused" and busy:
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
        """Abort all requests and join the thread. Raises ``EngineFailed`` if it does not end in time."""
        with suppress(EngineFailed):
            self._post(self._close)
        await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            raise EngineFailed(f"a step of the engine did not end within {_JOIN_TIMEOUT_SECONDS:.0f} s of shutdown")
        self._engine = None

    def _post(self, command: Callable[[HFEngine], Any]) -> Future[Any]:
        """Queue a command. Its answer arrives after the report of the requests that it ended."""
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
        """Run one iteration: all queued commands, then one step. Block for a command if there is nothing to compute."""
        with self._arrived:
            while not self._commands and not self._can_step(engine):
                self._arrived.wait()
        while self._commands:
            self._carry_out(engine, *self._commands.popleft())
        if self._can_step(engine):
            engine.step(admit=self._state == "running")
        if self._state == "draining" and not engine.running:
            self._state = "paused"
            self._send_report()
            self._end_drains()
        self._send_report()

    def _carry_out(self, engine: HFEngine, command: Callable[[HFEngine], Any], answer: Future[Any]) -> None:
        """Run a command. Its exceptions are raised in the caller; an ``EngineFailed`` also ends the thread."""
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
        if self._closing or engine.asleep or self._state == "paused":
            return False
        return bool(engine.running or (engine.waiting and self._state == "running"))

    def _send_report(self) -> None:
        events = [] if self._engine is None else self._engine.take_events()
        if self._loop.is_closed():
            self._closing = True
        elif events or self._failure is not None:
            self._loop.call_soon_threadsafe(self._receive, events, self._failure)

    def _begin_drain(self, engine: HFEngine) -> Future[None]:
        drained: Future[None] = _uncancellable()
        self._drains.append(drained)
        self._state = "draining"
        return drained

    def _pause(self, engine: HFEngine, mode: PauseMode) -> None:
        self._end_drains(f"pause({mode!r})")
        self._state = "paused"
        if mode == "resume":
            engine.drop_caches()

    def _resume(self, engine: HFEngine) -> None:
        if engine.asleep:
            raise RuntimeError("the engine sleeps; wake it before resume")
        self._end_drains("resume()")
        self._state = "running"

    def _end_drains(self, interrupted_by: str | None = None) -> None:
        for drained in self._drains:
            if interrupted_by is None:
                drained.set_result(None)
            else:
                drained.set_exception(RuntimeError(f"the drain was interrupted by {interrupted_by}"))
        self._drains.clear()

    def _close(self, engine: HFEngine) -> None:
        self._end_drains("shutdown()")
        engine.abort()
        self._closing = True


def _uncancellable() -> Future[Any]:
    """Return a future that cannot be cancelled: a queued command runs even if its caller is cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class HFInferStrategy(InferStrategy):
    """One replica of the embedded engine. Call all methods in the event loop that called `start`.

    Every instance can sleep, and weights always arrive in buckets, so ``shares_devices`` and ``transport`` have no
    effect."""

    _thread: EngineThread | None = None

    async def start(self) -> None:
        """Load the model (as version 0) and accept requests. Raises ``ConfigError`` for an invalid ``strategy_config``,
        more than one GPU, or an unsupported model."""
        if self._thread is not None:
            raise RuntimeError("this engine was started before")
        if self._devices > 1:
            raise problem("actor_infer.num_gpus_per_engine", "hf_infer computes on one GPU", "write 1")
        self._read_options()
        self._requests: dict[str, ActiveRequest] = {}
        self._thread = EngineThread(self._build_engine, self._receive)
        await self._thread.start()

    def _read_options(self) -> None:
        self._options = made("hf_infer", HFInferConfig, self._strategy_config, "strategy_args.strategy_config")

    async def generate(self, request: GenerateRequest) -> Completion:
        with self._running(request, streaming=False) as active:
            completion: Completion = await _next_event(active)
            return completion

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield the tokens of a request, one chunk per step; see `InferStrategy.stream`."""
        known = 0
        with self._running(request, streaming=True) as active:
            while not isinstance(event := await _next_event(active), Completion):
                known += len(event.token_ids)
                yield event
            yield event.after(known)

    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        chunks = await self._live_thread().call(lambda engine: engine.progress(known))
        names = ((active.request.request_id, active, chunk) for active, chunk in chunks)
        return {name: chunk for name, active, chunk in names if self._requests.get(name) is active}

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        return await self._live_thread().call(lambda engine: engine.score(token_ids))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._live_thread().call(lambda engine: engine.abort(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        await self._live_thread().pause(mode)

    async def resume(self) -> None:
        await self._live_thread().resume()

    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> HeldWeights:
        """Receive a weight update (see `HFEngine.stage_weights`) in a separate thread, while decoding continues."""
        engine = self._live_thread().engine
        self._prepared = None
        self._prepared = await asyncio.to_thread(engine.stage_weights, buckets, version)
        return self._prepared.held

    async def base_checksums(self) -> Mapping[str, int]:
        return await self._live_thread().call(lambda engine: engine.base_checksums())

    async def load_weights(self, version: int) -> HeldWeights:
        thread, prepared = self._live_thread(), self._prepared_for(version)
        held: HeldWeights = await thread.call_while_still(lambda engine: engine.load_weights(prepared), "load_weights")
        self._prepared = None
        return held

    async def sleep(self, discard: bool = False) -> bool:
        await self._live_thread().call_while_still(lambda engine: engine.sleep(), "sleep")
        return False

    async def wake(self) -> None:
        await self._live_thread().call(lambda engine: engine.wake())

    def stats(self) -> dict[str, Any]:
        """See `InferStrategy.stats` and `HFEngine.figures`."""
        engine = self._live_thread().engine
        running = engine.running
        return {
            "running": running,
            "waiting": max(len(self._requests) - running, 0),
            "version": engine.version,
            "generated_tokens": engine.generated_tokens,
            **engine.figures(),
            **engine.clock.stats(),
        }

    async def shutdown(self) -> None:
        if self._thread is not None:
            await self._thread.shutdown()

    def _build_engine(self) -> HFEngine:
        """Build the engine. Runs in the engine's thread."""
        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)
        model = load_model(self._spec)
        self._read_facts(model.config)
        engine = HFEngine(model, self._spec.max_length, self._options, self._end_tokens, self._adapter_rank)
        if self._records_routing:
            engine.record_routing()
        return engine

    def _live_thread(self) -> EngineThread:
        if self._thread is None:
            raise EngineFailed("the engine has not been started")
        return self._thread

    @contextmanager
    def _running(self, request: GenerateRequest, *, streaming: bool) -> Iterator[ActiveRequest]:
        """Submit a request. Abort it at the end of the block, if it is still running."""
        thread, name = self._live_thread(), request.request_id
        engine = thread.engine
        if name in self._requests:
            raise ValueError(f"request {name!r} cannot run: another one with this id is running")
        self._check_request(request)
        active = ActiveRequest(request, streaming=streaming)
        thread.order(self._submit, engine, active)
        self._requests[name] = active
        try:
            yield active
        finally:
            if self._ended(active):
                with suppress(EngineFailed):
                    thread.order(engine.abort, [name])

    def _submit(self, engine: HFEngine, active: ActiveRequest) -> None:
        """Submit a request. Runs in the engine's thread, because loading a tokenizer would block the event loop."""
        try:
            active.matcher = self._matcher_for(active.request)
        except Exception as error:
            engine.refuse(active, error)
        else:
            engine.submit(active)

    def _ended(self, active: ActiveRequest) -> bool:
        """Remove a request from the open ones. Return False if it was removed before."""
        if self._requests.get(active.request.request_id) is not active:
            return False
        del self._requests[active.request.request_id]
        return True

    def _receive(self, events: Events, failure: BaseException | None) -> None:
        for active, event in events:
            if not isinstance(event, TokenChunk):
                self._ended(active)
            active.events.put_nowait(event)
        if failure is not None:
            for active in self._requests.values():
                active.events.put_nowait(engine_failed_from(failure))
            self._requests.clear()


async def _next_event(active: ActiveRequest) -> Any:
    """Wait for the next event of a request. Return it, or raise it if it is an exception."""
    event = await active.events.get()
    if isinstance(event, Exception):
        raise event
    return event
