"""The process of one engine replica.

Requests arrive in batches and completions leave in batches through one long poll, so the cost of crossing processes is
paid per event, not per request. A failed request is reported as data to its sender. An engine that cannot continue
makes the poll fail, and the whole process is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from roll.configs.strategies import ENGINES, strategy_class
from roll.engines.base import (
    Completion,
    EngineFailed,
    GenerateRequest,
    InferStrategy,
    ModelSpec,
    PauseMode,
    TokenChunk,
    load_tokenizer,
)
from roll.runtime.workers import Worker
from roll.weights.buckets import HeldWeights, TransferStep, WeightBucket, manifest, split_bucket
from roll.weights.publisher import Publication, check_base, check_weights
from roll.weights.transports import TRANSPORTS, WeightReceiver

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSpec:
    """Everything an engine process needs to build its strategy. Fields after the name are arguments of the strategy."""

    strategy_name: str
    strategy_config: dict[str, Any]
    model_path: str
    dtype: str
    attn_implementation: str
    trust_remote_code: bool
    max_length: int
    devices_per_engine: int = 1
    shares_devices: bool = False
    """True if other roles use its devices in turn, so the engine has to sleep at times."""
    transport: str = "object_store"
    """Name of the transport that brings the weights."""
    adapter_rank: int | None = None
    """Rank of the adapters (LoRA) that updates bring; None if they bring all weights."""
    strategy_cls: str | None = None
    """A class of the user's own, used instead of the named strategy's."""

    def model(self) -> ModelSpec:
        """Return where the model is, to read its tokenizer."""
        return ModelSpec(
            self.model_path, "cpu", self.dtype, self.attn_implementation, self.max_length, self.trust_remote_code
        )

    def build(self, device: Literal["cpu", "cuda"]) -> InferStrategy:
        """Return the engine of this process; it is not started yet."""
        options = dict(vars(self))
        if self.adapter_rank is None:
            del options["adapter_rank"]  # a class from outside may not know it
        strategy = strategy_class(ENGINES, options.pop("strategy_name"), options.pop("strategy_cls"))
        engine: InferStrategy = strategy(options.pop("model_path"), device=device, **options)
        return engine


@dataclass(frozen=True)
class RequestFailed:
    """A request that the engine could not run."""

    request_id: str
    cause: str


PATIENCE = 0.01
"""Share of the time that a request took for which its result may wait for others that leave with it."""
ABORT_SECONDS = 10.0
"""Longest wait for an engine to end a request that was aborted."""
LONGEST_PATIENCE_SECONDS = 1.0
"""Longest such wait, also for a request that slept or was queued for long."""


class Outbox:
    """Ended requests until they are collected. A call costs the run's own process as much as several results."""

    def __init__(self) -> None:
        self._ended: list[Completion | RequestFailed] = []
        self._leaving = asyncio.Event()
        self._next: asyncio.Handle | None = None
        self._leaves_at = 0.0

    def add(self, ended: Completion | RequestFailed, patience: float) -> None:
        """Add a result that may wait for so many seconds."""
        loop = asyncio.get_running_loop()
        self._ended.append(ended)
        leaves_at = loop.time() + patience
        if self._next is None or leaves_at < self._leaves_at:
            self._forget_next()
            self._leaves_at, self._next = leaves_at, loop.call_at(leaves_at, self._leaving.set)

    def leave(self) -> None:
        """Let everything leave now, and be it nothing."""
        self._leaving.set()

    async def collected(self, wait_seconds: float) -> list[Completion | RequestFailed]:
        """Return what has ended, waiting at most ``wait_seconds`` until something leaves."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._leaving.wait()
        except TimeoutError:
            return []
        self._leaving.clear()
        self._forget_next()
        ended, self._ended = self._ended, []
        return ended

    def _forget_next(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None


class InferWorker(Worker):
    """Worker of one engine replica: runs an `InferStrategy`."""

    _strategy: InferStrategy
    _push_began: float
    _base: Mapping[str, int] | None = None
    """Checksums of the base model, read once, before the first adapters change the model."""
    _needs_weights = False
    """True if the engine has discarded its weights and has not been given others."""

    async def start(self, spec: EngineSpec) -> None:
        """Load the model and start the engine."""
        self._outbox = Outbox()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: EngineFailed | None = None
        self._counted: dict[str, int] = {}
        self._tokens_seen = 0
        self._decoder: asyncio.Future[PreTrainedTokenizerBase] | None = None
        self._cannot_decode = False
        self._spec = spec
        self.set_threads()
        self._strategy = spec.build(self.identity.place.device)
        await self._strategy.start()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start these requests, in order. `collect` returns their results."""
        if self._decoder is None and any(request.with_text for request in requests):
            self._decoder = asyncio.ensure_future(self.in_thread(load_tokenizer, self._spec.model()))
        for request in requests:
            self._tasks[request.request_id] = asyncio.get_running_loop().create_task(self._run(request))

    async def _run(self, request: GenerateRequest) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        ended: Completion | RequestFailed | None = None
        try:
            completion = await self._strategy.generate(request)
            ended = await self._decoded(request, completion)
        except EngineFailed as failure:
            self._failure = failure
        except Exception as error:
            ended = RequestFailed(request.request_id, f"{type(error).__name__}: {error}")
        self._tasks.pop(request.request_id, None)
        self._counted.pop(request.request_id, None)
        if ended is not None:
            self._outbox.add(ended, min(LONGEST_PATIENCE_SECONDS, PATIENCE * (clock() - began)))
        if ended is None or not self._tasks:
            self._outbox.leave()

    async def _decoded(self, request: GenerateRequest, completion: Completion) -> Completion:
        """Return the completion with the text of the whole response, if it is asked for and a tokenizer can be read.
        Nobody waits for the text of one that was aborted."""
        if self._decoder is None or not request.with_text or completion.finish_reason == "abort":
            return completion
        earlier = request.prompt_token_ids[len(request.prompt_token_ids) - request.first_token_index :]
        token_ids = np.concatenate([earlier, completion.token_ids]).tolist()
        try:
            decoder = await asyncio.shield(self._decoder)
        except OSError as error:
            if not self._cannot_decode:
                logger.info("responses are decoded elsewhere: %s", error)
            self._cannot_decode = True
            return completion
        text = await self.in_thread(lambda: decoder.decode(token_ids, skip_special_tokens=True))
        return replace(completion, text=text)

    async def collect(self, wait_seconds: float) -> list[Completion | RequestFailed]:
        """Return the requests that finished since the last call, waiting at most ``wait_seconds`` for the first one.
        Raises `EngineFailed` once the engine cannot continue and all earlier results have been delivered."""
        if self._failure is not None:
            self._outbox.leave()
        ended = await self._outbox.collected(wait_seconds)
        if self._failure is not None and not ended:
            raise self._failure
        return ended

    async def progress(self, known: Mapping[str, int] | None = None) -> tuple[int, dict[str, TokenChunk]]:
        """Return the number of tokens seen so far of all requests while they ran, and the new tokens of the running
        ones if ``known`` is given; see `InferStrategy.progress`."""
        before = dict(self._counted) if known is None else known
        chunks = await self._strategy.progress(before)
        for request_id, chunk in chunks.items():
            if request_id in self._tasks:
                counted = self._counted.get(request_id, 0)
                there = max(counted, before.get(request_id, 0) + len(chunk.token_ids))
                self._counted[request_id] = there
                self._tokens_seen += there - counted
        return self._tokens_seen, {} if known is None else chunks

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return log-probabilities under the current weights; see `InferStrategy.score`."""
        return await self._strategy.score(token_ids)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests, started or not; `collect` returns what they had sampled. Those that the engine does not
        end soon are cancelled, and nothing is said of them."""
        tasks = {each: self._tasks[each] for each in request_ids if each in self._tasks}
        try:
            await asyncio.sleep(0)  # engines ignore names that they do not know: what was just submitted begins first
            await self._strategy.abort(request_ids)
            if tasks:
                await asyncio.wait(tasks.values(), timeout=ABORT_SECONDS)
        finally:
            for request_id, task in tasks.items():
                if task.cancel():
                    self._tasks.pop(request_id, None)
                    self._counted.pop(request_id, None)

    async def verify_weights(self, publication: Publication) -> float:
        """Verify a weight update for all engines of this host, which map the same bytes; return the seconds it took.
        The engine decodes meanwhile. Raises `WeightsDiffer` or `WeightMismatch` naming the tensor."""
        started = time.perf_counter()
        buckets = self._receiver.receive(publication.handles, publication.version)
        # In another thread than `in_thread`, in which responses are decoded.
        counted = await asyncio.to_thread(manifest, buckets)
        check_weights(self.identity.name, publication, HeldWeights(publication.version, *counted))
        return time.perf_counter() - started

    async def load_weights(
        self, publication: Publication, bucket_bytes: int, mode: PauseMode, verified: bool = False
    ) -> tuple[HeldWeights, dict[str, float]]:
        """Fetch a weight update, verify its checksums and load it; return the receipt and the timings.

        Checksums that another engine of this host has ``verified`` are not computed again, but for bytes that this
        engine copies. The engine gets ``bucket_bytes`` at a time, and decoding stops for the load only. Timings in
        seconds: ``fetch`` (while decoding continues), ``load``, and ``stall`` (from the end of the last step before the
        load to the order for the next one). The receipt is that of the loaded weights. Raises `WeightsDiffer` or
        `WeightMismatch` naming the tensor. If the fetched weights are wrong, the old ones stay in use; if the loaded
        ones are wrong, the engine stays paused.
        """
        started = time.perf_counter()
        if publication.base is not None:
            if self._base is None:
                self._base = await self._strategy.base_checksums()
            check_base(self.identity.name, publication, self._base)
        buckets = self._received(publication, bucket_bytes, verified)
        prepared = await self._strategy.prepare_weights(buckets, publication.version)
        check_weights(self.identity.name, publication, prepared)
        fetched = time.perf_counter()
        if not self._needs_weights:
            await self._strategy.pause(mode)
        paused = time.perf_counter()
        receipt = await self._strategy.load_weights(publication.version)
        self._needs_weights = False
        loaded = time.perf_counter()
        await self._strategy.resume()
        resumed = time.perf_counter()
        return receipt, {"fetch": fetched - started, "load": loaded - paused, "stall": resumed - paused}

    async def begin_push(self, mode: PauseMode) -> None:
        """Pause decoding, because the trainer is about to push weights."""
        await self._strategy.pause(mode)
        self._push_began = time.perf_counter()

    async def transfer_step(self, step: TransferStep, payload: Any) -> None:
        """Run one step of the engine library's own weight transfer, as the trainer orders it."""
        await self._strategy.transfer_step(step, payload)

    async def end_push(self, publication: Publication) -> tuple[HeldWeights, dict[str, float]]:
        """Verify the checksums of the pushed weights and resume decoding. Raises as `load_weights` does."""
        if publication.layout is None:
            raise ValueError("a publication that was pushed has a layout, and this one has none")
        receipt = await self._strategy.weights_pushed(publication.version, publication.layout)
        check_weights(self.identity.name, publication, receipt)
        loaded = time.perf_counter()
        await self._strategy.resume()
        resumed = time.perf_counter()
        return receipt, {"fetch": 0.0, "load": loaded - self._push_began, "stall": resumed - self._push_began}

    @cached_property
    def _receiver(self) -> WeightReceiver:
        return TRANSPORTS[self._spec.transport].receiver()

    def _received(self, publication: Publication, bucket_bytes: int, verified: bool) -> Iterator[WeightBucket]:
        """Yield the update's buckets in the sizes that the engine takes, fetched as the engine consumes them."""
        checksums = publication.checksums if verified else None
        for bucket in self._receiver.receive(publication.handles, publication.version):
            yield from split_bucket(replace(bucket, verified=checksums), bucket_bytes)

    async def sleep(self, discard: bool = False) -> bool:
        """Give up the devices. Requests wait; those that lose their caches are recomputed later. Return True if the
        engine dropped its weights, which ``discard`` allows."""
        await self._strategy.pause("resume")
        self._needs_weights = await self._strategy.sleep(discard)
        return self._needs_weights

    async def wake(self) -> None:
        """Take the devices back, and resume decoding unless weights have to be loaded first."""
        await self._strategy.wake()
        if not self._needs_weights:
            await self._strategy.resume()

    async def stats(self) -> dict[str, Any]:
        """See `InferStrategy.stats`; also returns the `memory` of the engine."""
        return self._strategy.stats() | {"memory": await self._strategy.memory()}
