"""The process of one engine replica.

Requests come in batches and completions leave in batches through one long poll, so the cost of crossing processes is
paid per event, not per request. An error of the engine travels as data to every request it ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.distributed.weights import TRANSPORTS
from roll.distributed.worker import Worker
from roll.strategies.infer import infer_strategy_class
from roll.strategies.infer.base import Completion, GenerateRequest, InferStrategy, PauseMode, WeightReceipt


@dataclass(frozen=True)
class EngineSpec:
    """What an engine process needs to build its strategy."""

    strategy_name: str
    strategy_config: dict[str, Any]
    model_path: str
    dtype: str
    attn_implementation: str
    trust_remote_code: bool
    max_length: int


@dataclass(frozen=True)
class RequestFailed:
    """A request that the engine could not run."""

    request_id: str
    cause: str


class InferWorker(Worker):
    """Wraps an `InferStrategy`."""

    _strategy: InferStrategy

    async def start(self, spec: EngineSpec) -> None:
        """Load the model."""
        self._finished: list[Completion | RequestFailed] = []
        self._any_finished = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.set_threads()
        self._strategy = infer_strategy_class(spec.strategy_name)(
            spec.model_path,
            device=self.identity.place.device,
            dtype=spec.dtype,
            attn_implementation=spec.attn_implementation,
            max_length=spec.max_length,
            trust_remote_code=spec.trust_remote_code,
            strategy_config=spec.strategy_config,
        )
        await self._strategy.start()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take requests on, in order. Their ends come out of `collect`."""
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._run(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, request: GenerateRequest) -> None:
        try:
            ended: Completion | RequestFailed = await self._strategy.generate(request)
        except Exception as error:
            ended = RequestFailed(request.request_id, f"{type(error).__name__}: {error}")
        self._finished.append(ended)
        self._any_finished.set()

    async def collect(self, wait_seconds: float) -> list[Completion | RequestFailed]:
        """Requests that ended since the last call; waits for one at most ``wait_seconds``."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._any_finished.wait()
        except TimeoutError:
            return []
        finished, self._finished = self._finished, []
        self._any_finished.clear()
        return finished

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._strategy.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        await self._strategy.pause(mode)

    async def resume(self) -> None:
        await self._strategy.resume()

    async def load_weights(
        self, transport: str, handles: Sequence[Any], version: int, mode: PauseMode
    ) -> tuple[WeightReceipt, dict[str, float]]:
        """Fetch a publication, stop decoding for the load only, and say what is held afterwards."""
        started = time.perf_counter()
        receiver = TRANSPORTS[transport]()
        buckets = await self.in_thread(lambda: list(receiver.receive(handles)))
        fetched = time.perf_counter()
        await self._strategy.pause(mode)
        paused = time.perf_counter()
        receipt = await self._strategy.load_weights(buckets, version)
        loaded = time.perf_counter()
        await self._strategy.resume()
        resumed = time.perf_counter()
        return receipt, {"fetch": fetched - started, "load": loaded - paused, "stall": resumed - fetched}

    async def sleep(self) -> None:
        await self._strategy.pause("resume")
        await self._strategy.sleep()

    async def wake(self) -> None:
        await self._strategy.wake()
        await self._strategy.resume()

    async def stats(self) -> dict[str, Any]:
        return self._strategy.stats()
