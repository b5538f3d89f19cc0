"""The process of one engine replica.

Requests arrive in batches and completions leave in batches through one long poll, so the cost of crossing processes is
paid per event, not per request. A failed request is reported as data to its sender. An engine that cannot continue
makes the poll fail, and the whole process is replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from roll.configs.strategies import ENGINES, strategy_class
from roll.engines.base import Completion, EngineFailed, GenerateRequest, InferStrategy, PauseMode, TokenChunk
from roll.runtime.workers import Worker
from roll.weights.buckets import HeldWeights, TransferStep, WeightBucket, manifest, split_bucket
from roll.weights.publisher import Publication, check_weights
from roll.weights.transports import TRANSPORTS, WeightReceiver


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
    strategy_cls: str | None = None
    """A class of the user's own, used instead of the named strategy's."""

    def build(self, device: Literal["cpu", "cuda"]) -> InferStrategy:
        """Return the engine of this process; it is not started yet."""
        options = dict(vars(self))
        strategy = strategy_class(ENGINES, options.pop("strategy_name"), options.pop("strategy_cls"))
        engine: InferStrategy = strategy(options.pop("model_path"), device=device, **options)
        return engine


@dataclass(frozen=True)
class RequestFailed:
    """A request that the engine could not run."""

    request_id: str
    cause: str


class InferWorker(Worker):
    """Worker of one engine replica: runs an `InferStrategy`."""

    _strategy: InferStrategy
    _push_began: float
    _needs_weights = False
    """True if the engine has discarded its weights and has not been given others."""

    async def start(self, spec: EngineSpec) -> None:
        """Load the model and start the engine."""
        self._finished: list[Completion | RequestFailed] = []
        self._any_finished = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: EngineFailed | None = None
        self._spec = spec
        self.set_threads()
        self._strategy = spec.build(self.identity.place.device)
        await self._strategy.start()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start these requests, in order. `collect` returns their results."""
        for request in requests:
            self._tasks[request.request_id] = asyncio.get_running_loop().create_task(self._run(request))

    async def _run(self, request: GenerateRequest) -> None:
        try:
            completion = await self._strategy.generate(request)
            self._finished.append(completion)
        except EngineFailed as failure:
            self._failure = failure
        except Exception as error:
            self._finished.append(RequestFailed(request.request_id, f"{type(error).__name__}: {error}"))
        self._tasks.pop(request.request_id, None)
        self._any_finished.set()

    async def collect(self, wait_seconds: float) -> list[Completion | RequestFailed]:
        """Return the requests that finished since the last call, waiting at most ``wait_seconds`` for the first one.
        Raises `EngineFailed` once the engine cannot continue and all earlier results have been delivered."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._any_finished.wait()
        except TimeoutError:
            return []
        finished, self._finished = self._finished, []
        if self._failure is None:
            self._any_finished.clear()
        elif not finished:
            raise self._failure
        return finished

    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        """Return new tokens of the running requests; see `InferStrategy.progress`."""
        return await self._strategy.progress(known)

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return log-probabilities under the current weights; see `InferStrategy.score`."""
        return await self._strategy.score(token_ids)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Cancel these requests, started or not; `collect` returns nothing for them."""
        for request_id in request_ids:
            task = self._tasks.pop(request_id, None)
            if task is not None:
                task.cancel()
        await self._strategy.abort(request_ids)

    async def verify_weights(self, publication: Publication) -> float:
        """Verify a weight update for all engines of this host, which map the same bytes; return the seconds it took.
        The engine decodes meanwhile. Raises `WeightsDiffer` or `WeightMismatch` naming the tensor."""
        started = time.perf_counter()
        buckets = self._receiver.receive(publication.handles, publication.version)
        counted = await self.in_thread(manifest, buckets)
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
        """See `InferStrategy.stats`."""
        return self._strategy.stats()
