"""Engine replicas without processes: the real pool and the real worker around a scripted engine, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from roll.engines import worker as infer_worker
from roll.engines.base import (
    Completion,
    EngineFailed,
    GenerateRequest,
    InferStrategy,
    SamplingParams,
    TokenChunk,
)
from roll.engines.pool import InferencePool, PoolSettings
from roll.engines.updates import Loaded
from roll.engines.worker import EngineSpec, InferWorker
from roll.runtime.placement import WorkerPlace
from roll.runtime.workers import WorkerDied, WorkerFailed, WorkerIdentity, WorkerTimeout
from roll.weights.buckets import HeldWeights
from roll.weights.publisher import Publication
from roll.weights.transports import TRANSPORTS, WeightTransport
from roll.weights.verify import CanaryScores
from tests.witness import Witness

TOKEN_SECONDS = 1.0
LOAD_SECONDS = 2.0
"""Half of them taking the publication in, half of them swapping."""
START_SECONDS = 5.0


@dataclass
class RunningRequest:
    request: GenerateRequest
    versions: list[int] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def chunk(self, start: int = 0) -> TokenChunk:
        """Token number i of a response is i, its log-probability -i: so a gap or a token taken twice shows."""
        numbers = self.request.first_token_index + np.arange(start, len(self.versions))
        return TokenChunk(
            numbers.astype(np.int32), -numbers.astype(np.float32), np.array(self.versions[start:], dtype=np.int32)
        )


class ScriptedEngine(InferStrategy):
    """An `InferStrategy` whose tokens take a second each and whose loads take two."""

    def __init__(self, *_args, in_place=True, discards=False, witness=None, **_options):
        self.version = 0
        self.witness = witness or Witness()
        """Of calls in an order that no engine allows: the pool replaces an engine that fails."""
        self.running: dict[str, RunningRequest] = {}
        self.seen: list[GenerateRequest] = []
        self.stuck = asyncio.Event()
        """While set, what decodes does not come back from its step; the event loop of the process does not notice."""
        self.scores_at: list[int] = []
        """Versions at which it was asked to score."""
        self.shift = 0.0
        """Its log-probabilities are off by so much."""
        self.going = asyncio.Event()
        self.going.set()
        self.asleep = False
        self.moves: list[str] = []
        self.discards = discards
        """Whether it drops its weights in a sleep if it may."""
        self.without_weights = False
        self.fail_next: EngineFailed | None = None
        self.in_place = in_place
        """Whether it computes with the publication's own memory."""
        self.slots = asyncio.Semaphore(1000)
        """A request that has none is queued."""
        self.stalled: set[str] = set()
        """Requests that get no more tokens."""

    async def start(self):
        await asyncio.sleep(START_SECONDS)

    async def generate(self, request):
        if request.request_id in self.running:
            raise ValueError(f"another request {request.request_id!r} is running")
        self.seen.append(request)
        mine = self.running[request.request_id] = RunningRequest(request)
        try:
            async with self.slots:
                while len(mine.versions) < request.sampling.max_new_tokens and not mine.aborted.is_set():
                    await asyncio.sleep(TOKEN_SECONDS)
                    await self.going.wait()
                    await self.unstuck()
                    if self.fail_next is not None:
                        raise self.fail_next
                    with self.witness.watching():
                        assert not self.asleep and not self.without_weights
                    if request.request_id.partition("#")[0] not in self.stalled:
                        mine.versions.append(self.version)
        finally:
            del self.running[request.request_id]
        got, reason = mine.chunk(), "abort" if mine.aborted.is_set() else "length"
        return Completion(request.request_id, got.token_ids, got.logprobs, got.versions, reason)

    def stream(self, request):
        raise NotImplementedError("no pool streams")

    async def unstuck(self):
        if self.stuck.is_set():
            await asyncio.Event().wait()

    async def progress(self, known):
        await self.unstuck()
        return {name: mine.chunk(known.get(name, 0)) for name, mine in self.running.items()}

    async def score(self, token_ids):
        self.scores_at.append(self.version)
        return [scripted_scores(tokens, self.version) + np.float32(self.shift) for tokens in token_ids]

    async def abort(self, request_ids):
        for request_id in request_ids:
            if request_id in self.running:
                self.running[request_id].aborted.set()

    async def pause(self, mode):
        if mode == "drain":
            before = set(self.running)
            while before & set(self.running):
                await asyncio.sleep(TOKEN_SECONDS / 2)
        self.going.clear()

    async def resume(self):
        if self.asleep:
            raise RuntimeError("the engine sleeps; wake it before resume")
        if self.without_weights:
            raise RuntimeError("the engine has no weights")
        self.going.set()

    async def prepare_weights(self, buckets, version):
        with self.witness.watching():
            assert not list(buckets)
        self.preparing = version
        await self.unstuck()
        await asyncio.sleep(LOAD_SECONDS / 2)
        return self.receipt(version)

    async def load_weights(self, version):
        with self.witness.watching():
            assert version == self.preparing and not self.going.is_set() and not self.asleep
        await asyncio.sleep(LOAD_SECONDS / 2)
        self.without_weights = False
        self.version = version
        return self.receipt(version)

    async def transfer_step(self, step, payload):
        with self.witness.watching():
            assert not self.going.is_set()
        await asyncio.sleep(LOAD_SECONDS)
        self.pushed = payload

    async def weights_pushed(self, version, layout):
        with self.witness.watching():
            assert self.pushed == version
        self.version = version
        return self.receipt(version)

    def receipt(self, version):
        return HeldWeights(version, 0, {}, self.in_place)

    async def sleep(self, discard=False):
        self.asleep = True
        self.without_weights = discard and self.discards
        self.moves.append("sleep")
        return self.without_weights

    async def wake(self):
        self.asleep = False
        self.moves.append("wake")

    def stats(self):
        return {"generated_tokens": 0, "busy_seconds": 0.0, "busy_spans": []}

    async def shutdown(self):
        """It has no process of its own."""


class LocalWorker(InferWorker):
    async def in_thread(self, function, *args):
        return function(*args)


class LocalHandle:
    """What `WorkerHandle` is to a process, for a worker on this event loop."""

    pid = 0
    node = "node"

    def __init__(self, index: int):
        self.name = f"actor_infer/{index}"
        self.calls: Counter[str] = Counter()
        self.dies_at: str | None = None
        """Method whose call the process does not survive."""
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = WorkerPlace(0, "cpu", (index,), 1)
        self.worker = LocalWorker(WorkerIdentity("actor_infer", index, 1, place, None))

    @property
    def engine(self) -> ScriptedEngine:
        return self.worker._strategy

    async def create(self, timeout):
        await asyncio.sleep(0)
        if self.dies_at == "create":
            self.kill()
            raise WorkerDied(self.name, "it was killed by the test")

    async def call(self, method, *args, timeout=None):
        self.calls[method] += 1
        if method == self.dies_at:
            self.kill()
        work = asyncio.ensure_future(getattr(self.worker, method)(*args))
        try:
            await asyncio.wait([work, self._death], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                raise WorkerDied(self.name, "it was killed by the test")
            if not work.done():
                raise WorkerTimeout(self.name, method, timeout)
            if work.exception() is not None:
                error = work.exception()
                raise WorkerFailed(self.name, method, repr(error), type(error).__name__)
            return work.result()
        finally:
            work.cancel()

    @property
    def actor(self):
        return self

    async def wait_for_death(self):
        await asyncio.wait([self._death])
        return WorkerDied(self.name, "it was killed by the test")

    def tell(self, method, *args):
        self.told = asyncio.ensure_future(getattr(self.worker, method)(*args))

    def kill(self):
        if not self._death.done():
            self._death.set_result(None)


class NothingToCarry:
    """The receiver of publications without buckets."""

    def receive(self, handles, version):
        return iter(handles)


def nothing_to_send(spec):
    raise NotImplementedError("these pools have no trainer")


def scripted_scores(tokens: np.ndarray, version: int) -> np.ndarray:
    """What weights of a version say of a sequence."""
    scores = -(version + 1) * tokens.astype(np.float32)
    scores[:1] = 0
    return scores


def publication(version: int) -> Publication:
    return Publication(version, [], 0, {}, 0)


def request(name: str = "r", tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(name, np.array([1, 2]), SamplingParams(max_new_tokens=tokens))


class LocalPool:
    """A pool over scripted engines. ``handles`` holds every process ever started, in order."""

    def __init__(self, monkeypatch, replicas: int = 1, *, in_place: bool = True, discards: bool = False, **settings):
        self.witness = Witness()
        engine = partial(ScriptedEngine, in_place=in_place, discards=discards, witness=self.witness)
        monkeypatch.setattr(infer_worker, "strategy_class", lambda kind, name, own: engine)
        monkeypatch.setitem(TRANSPORTS, "nothing", WeightTransport(nothing_to_send, NothingToCarry))
        self.handles: list[LocalHandle] = []
        self.prepare_next = lambda handle: None
        chosen = {
            "in_flight": "keep",
            "max_restarts": 3,
            "start_timeout_seconds": 100.0,
            "request_timeout_seconds": 50.0,
            "publish_timeout_seconds": 100.0,
            "load_bucket_bytes": 1,
            "dual_buffer": True,
            "silence_timeout_seconds": 20.0,
            "max_unavailable": 0.25,
            **settings,
        }
        spec = EngineSpec("scripted", {}, "", "float32", "sdpa", False, 64, transport="nothing")
        self.events: list[str] = []
        self.pool = InferencePool(
            "actor_infer",
            replicas,
            self._start_worker,
            spec,
            PoolSettings(**chosen),
            self.events.append,
        )

    def _start_worker(self, index: int) -> LocalHandle:
        handle = LocalHandle(index)
        self.handles.append(handle)
        self.prepare_next(handle)
        return handle

    async def __aenter__(self) -> LocalPool:
        await self.pool.start()
        self._running = asyncio.create_task(self.pool.run())
        await self.publish(0)
        return self

    async def publish(self, version: int, canaries: CanaryScores | None = None) -> Loaded:
        """What the last stage of a step does, the gathering before it."""
        await self.pool.buffers.acquire(version)
        return await self.pool.publish(publication(version), canaries)

    async def __aexit__(self, *_):
        self._running.cancel()
        await asyncio.wait([self._running])
        self.witness.testify()
