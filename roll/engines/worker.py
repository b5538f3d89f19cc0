"""The worker process of one engine replica.

Requests arrive in batches, and results are returned in batches through one long poll, so remote calls are made per
batch, not per request. A failed request is reported as a result. If the engine fails, the poll raises, and the pool
replaces the whole process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from roll.configs.strategies import ENGINES, strategy_class
from roll.data.records import PictureStep
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
from roll.runtime.usage import cpu_seconds
from roll.runtime.workers import Worker
from roll.weights.buckets import HeldWeights, TransferStep, WeightBucket, manifest, split_bucket
from roll.weights.delta import DeltaReceiver
from roll.weights.publisher import Publication, check_base, check_weights
from roll.weights.transports import TRANSPORTS, WeightReceiver

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSpec:
    """Arguments for building an engine in its process."""

    strategy_name: str
    strategy_config: dict[str, Any]
    model_path: str
    dtype: str
    attn_implementation: str
    trust_remote_code: bool
    max_length: int
    devices_per_engine: int = 1
    shares_devices: bool = False
    """True if other roles use the same devices in turn, so the engine must support sleep."""
    transport: str = "object_store"
    """Name of the transport of weight updates."""
    adapter_rank: int | None = None
    """Rank of the LoRA adapters in weight updates; None: updates contain all weights."""
    records_routing: bool = False
    """True if the experts of each token will be requested."""
    strategy_cls: str | None = None
    """Import path of the user's own strategy class, to use instead of the named one."""

    def model(self) -> ModelSpec:
        """Return the model's location, for reading its tokenizer."""
        return ModelSpec(
            self.model_path, "cpu", self.dtype, self.attn_implementation, self.max_length, self.trust_remote_code
        )

    def build(self, device: Literal["cpu", "cuda"]) -> InferStrategy:
        """Build the engine, without starting it."""
        options = dict(vars(self))
        for name in ("adapter_rank", "records_routing"):
            if not options[name]:
                del options[name]  # a user's class may not accept it
        strategy = strategy_class(ENGINES, options.pop("strategy_name"), options.pop("strategy_cls"))
        engine: InferStrategy = strategy(options.pop("model_path"), device=device, **options)
        return engine


@dataclass(frozen=True)
class RequestFailed:
    """Result of a request that the engine could not run."""

    request_id: str
    cause: str


PATIENCE = 0.01
"""Maximum delay of a result, as a fraction of its request's duration, to return it together with others."""
ABORT_SECONDS = 10.0
"""Maximum wait for an engine to end an aborted request."""
LONGEST_PATIENCE_SECONDS = 1.0
"""Upper limit of that delay, whatever the request's duration."""


class Outbox:
    """Finished requests waiting to be collected.

    They are returned in batches, because one remote call costs the driver process as much as handling several results.
    """

    def __init__(self) -> None:
        self._ended: list[Completion | RequestFailed] = []
        self._leaving = asyncio.Event()
        self._next: asyncio.Handle | None = None
        self._leaves_at = 0.0

    def add(self, ended: Completion | RequestFailed, patience: float) -> None:
        """Add a result that may be delayed for up to ``patience`` seconds."""
        loop = asyncio.get_running_loop()
        self._ended.append(ended)
        leaves_at = loop.time() + patience
        if self._next is None or leaves_at < self._leaves_at:
            self._forget_next()
            self._leaves_at, self._next = leaves_at, loop.call_at(leaves_at, self._leaving.set)

    def leave(self) -> None:
        """Make `collected` return at once, even without results."""
        self._leaving.set()

    async def collected(self, wait_seconds: float) -> list[Completion | RequestFailed]:
        """Wait up to ``wait_seconds`` until a result is due, and return all results so far; [] after a timeout."""
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
    """Worker process of one engine replica: runs an `InferStrategy`."""

    _strategy: InferStrategy
    _push_began: float
    _base: Mapping[str, int] | None = None
    """Checksums of the base model, read once, before the first adapters change the model."""
    _needs_weights = False
    """True if the engine has discarded its weights and new ones have not been loaded yet."""

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
        """Start these requests, in order, without waiting for them. `collect` returns their results."""
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
        """Add the text of the whole response to the completion, if requested and a tokenizer is available. Skipped for
        aborted requests."""
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
        """Return the results since the last call; wait up to ``wait_seconds`` for some (long poll).

        Raises `EngineFailed` if the engine has failed, after all earlier results have been returned."""
        if self._failure is not None:
            self._outbox.leave()
        ended = await self._outbox.collected(wait_seconds)
        if self._failure is not None and not ended:
            raise self._failure
        return ended

    async def progress(self, known: Mapping[str, int] | None = None) -> tuple[int, dict[str, TokenChunk]]:
        """Return the number of tokens that requests were seen to get while running, and the new tokens of running
        requests if ``known`` is given (else {}); see `InferStrategy.progress`."""
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
        """Return log-probabilities of sequences under the current weights; see `InferStrategy.score`."""
        return await self._strategy.score(token_ids)

    async def score_steps(self, steps: Sequence[PictureStep]) -> list[np.ndarray]:
        """Return log-probabilities of denoising steps; see `InferStrategy.score_steps`."""
        return await self._strategy.score_steps(steps)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these requests. `collect` returns the tokens that they had sampled. Requests that the engine does not
        end within `ABORT_SECONDS` are cancelled without a result."""
        tasks = {each: self._tasks[each] for each in request_ids if each in self._tasks}
        try:
            await asyncio.sleep(0)  # engines ignore unknown ids, so let just-submitted requests start first
            await self._strategy.abort(request_ids)
            if tasks:
                await asyncio.wait(tasks.values(), timeout=ABORT_SECONDS)
        finally:
            for request_id, task in tasks.items():
                if task.cancel():
                    self._tasks.pop(request_id, None)
                    self._counted.pop(request_id, None)

    async def verify_weights(self, publication: Publication) -> float:
        """Verify a weight update on behalf of all engines of this host, which map the same bytes.

        The engine keeps decoding. Returns the seconds taken. Raises `WeightsDiffer` or `WeightMismatch` naming the
        tensor."""
        started = time.perf_counter()
        buckets = self._receiver.receive(publication.handles, publication.version)
        # Not with `in_thread`, whose thread decodes responses.
        counted = await asyncio.to_thread(manifest, buckets)
        check_weights(self.identity.name, publication, HeldWeights(publication.version, *counted))
        return time.perf_counter() - started

    async def load_weights(
        self, publication: Publication, bucket_bytes: int, mode: PauseMode, verified: bool = False
    ) -> tuple[HeldWeights, dict[str, float]]:
        """Fetch a weight update, verify its checksums and load it. Return the loaded weights' checksums and timings.

        Fetching passes ``bucket_bytes`` at a time to the engine while it decodes; decoding is paused (with ``mode``)
        only for the load. ``verified``: another engine of this host has verified the bytes, so only bytes that this
        engine copies are verified again. Timings, in seconds: ``fetch``, ``load``, and ``stall`` (from the end of the
        pause call to the end of the resume call). Raises `WeightsDiffer` or `WeightMismatch` naming the tensor: the old
        weights stay in use if the fetched ones are wrong; the engine stays paused if the loaded ones are.
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
        if publication.delta is not None:
            receipt = replace(receipt, healed=self._delta_receiver.healed)
        return receipt, {"fetch": fetched - started, "load": loaded - paused, "stall": resumed - paused}

    async def begin_push(self, mode: PauseMode) -> None:
        """Pause decoding before the trainer pushes weights."""
        await self._strategy.pause(mode)
        self._push_began = time.perf_counter()

    async def transfer_step(self, step: TransferStep, payload: Any) -> None:
        """Run one step of the engine library's own weight transfer; called by the trainer."""
        await self._strategy.transfer_step(step, payload)

    async def end_push(self, publication: Publication) -> tuple[HeldWeights, dict[str, float]]:
        """Verify the checksums of the pushed weights and resume decoding. Returns and raises as `load_weights` does."""
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

    @cached_property
    def _delta_receiver(self) -> DeltaReceiver:
        return DeltaReceiver(self._receiver)

    def _received(self, publication: Publication, bucket_bytes: int, verified: bool) -> Iterator[WeightBucket]:
        """Yield the update's buckets in parts of ``bucket_bytes``, fetched lazily as the engine consumes them."""
        if publication.delta is not None:
            for bucket in self._delta_receiver.receive(publication):
                yield from split_bucket(bucket, bucket_bytes)
            return
        checksums = publication.checksums if verified else None
        for bucket in self._receiver.receive(publication.handles, publication.version):
            yield from split_bucket(replace(bucket, verified=checksums), bucket_bytes)

    async def sleep(self, discard: bool = False) -> bool:
        """Pause and offload the engine from the devices. Requests wait, and lost KV caches are recomputed later.

        Returns True if the engine dropped its weights, which ``discard`` allows."""
        await self._strategy.pause("resume")
        self._needs_weights = await self._strategy.sleep(discard)
        return self._needs_weights

    async def wake(self) -> None:
        """Load the engine onto the devices again, and resume decoding unless weights must be loaded first."""
        await self._strategy.wake()
        if not self._needs_weights:
            await self._strategy.resume()

    async def stats(self) -> dict[str, Any]:
        """See `InferStrategy.stats`; also returns `memory` and `cpu_seconds` of the engine's processes, and the id of
        the first of them."""
        stats = self._strategy.stats()  # first: while the others are awaited, requests of the next step may come
        used = await asyncio.to_thread(cpu_seconds)
        return stats | {"memory": await self._strategy.memory(), "cpu_seconds": used, "process_id": os.getpid()}
