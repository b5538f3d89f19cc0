"""`hf_infer`: the embedded generation engine, transformers in a thread behind the `InferStrategy` protocol.

The thread owns the model; the event loop owns the requests. They meet in two places only: a queue of commands into the
thread, and one callback per step out of it. If the thread fails, every request and every later call fails with
`EngineFailed` and its cause; nothing waits for a thread that has ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll.configs.errors import ConfigError, ConfigProblem
from roll.strategies.infer.base import (
    Completion,
    EngineFailed,
    GenerateRequest,
    PauseMode,
    TokenChunk,
    WeightBucket,
    WeightReceipt,
)
from roll.strategies.infer.engine_thread import EngineReport, EngineThread, engine_failed_from
from roll.strategies.infer.hf_engine import EngineLimits, HFEngine, StagedWeights
from roll.strategies.infer.hf_model import load_model
from roll.strategies.infer.hf_options import HFInferConfig
from roll.strategies.infer.model_facts import ModelSpec, eos_token_ids, load_tokenizer
from roll.strategies.infer.stop_strings import StopStrings


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
        self._config = HFInferConfig.parse(strategy_config)
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

    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> WeightReceipt:
        """Take in a weight update (see `HFEngine.stage_weights`), in a thread of its own beside decoding."""
        engine = self._live_thread().engine
        self._staged = None
        self._staged = await asyncio.to_thread(engine.stage_weights, buckets, version)
        return self._staged.receipt

    async def load_weights(self, version: int) -> WeightReceipt:
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
        limits = EngineLimits(
            self._spec.max_length, self._config.max_running_requests, self._config.max_prefill_tokens
        )
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
