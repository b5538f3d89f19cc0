"""All replicas of the generating engine, as one engine that survives the death of a replica.

A request goes to the least loaded live replica. When a replica dies its requests are issued again elsewhere, a new
process takes its place with the current weights, and the restart is counted; too many restarts end the run with the
last cause. Weights reach the replicas one after the other, each update followed by an attestation.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.distributed.deadlines import StoppableDeadlines
from roll.distributed.errors import WorkerDied, WorkerFailed, WorkerTimeout
from roll.distributed.group import WorkerHandle
from roll.distributed.infer_worker import EngineSpec, LoadPlan, RequestFailed
from roll.distributed.weight_buffers import WeightBuffers
from roll.distributed.weights import Publication, attest
from roll.rollout.router import Router
from roll.strategies.infer.base import Completion, GenerateRequest, PauseMode

COLLECT_WAIT_SECONDS = 10.0
SILENCE_SECONDS = 60.0
"""A replica whose long poll is this late is taken for dead (a stopped process does not close its connections)."""


class RequestError(RuntimeError):
    """The engine refused or lost a request for a reason that a retry does not cure."""


class Replica:
    """One engine process and the requests it works on."""

    def __init__(self, handle: WorkerHandle, on_death: Callable[[Replica, WorkerDied], None]) -> None:
        self.handle = handle
        self.version = -1
        self.asleep = False
        self.changing = asyncio.Lock()
        """Held while its weights change or it goes to sleep or wakes: one of these at a time."""
        self._on_death = on_death
        self._numbers = itertools.count()
        self._pending: dict[str, asyncio.Future[Completion]] = {}
        self._outgoing: list[GenerateRequest] = []
        self._submitting: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return self.handle.name

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request; all requests of one turn of the event loop leave in one call.

        The engine knows it by a name of its own, so that a request which is tried again is never answered with what
        is left of its aborted first try.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        sent = replace(request, request_id=f"{request.request_id}#{next(self._numbers)}")
        self._pending[sent.request_id] = future
        if not self._outgoing:
            loop.call_soon(self._submit_outgoing)
        self._outgoing.append(sent)
        try:
            return replace(await future, request_id=request.request_id)
        except asyncio.CancelledError:
            self._abandon(sent)
            raise
        finally:
            del self._pending[sent.request_id]

    def _submit_outgoing(self) -> None:
        requests, self._outgoing = self._outgoing, []
        task = asyncio.get_running_loop().create_task(self._submit(requests))
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)

    async def _submit(self, requests: Sequence[GenerateRequest]) -> None:
        try:
            await self.handle.call("submit", requests)
        except WorkerDied as error:
            self.fail_all(error)
        except WorkerFailed as error:
            for request in requests:
                self._deliver(RequestFailed(request.request_id, str(error)))

    def _abandon(self, request: GenerateRequest) -> None:
        if any(request is waiting for waiting in self._outgoing):
            self._outgoing = [waiting for waiting in self._outgoing if waiting is not request]
            return
        # Not at once: the call that submits the request may itself be about to leave.
        asyncio.get_running_loop().call_soon(self.handle.tell, "abort", [request.request_id])

    async def collect_forever(self) -> WorkerDied:
        """Deliver ended requests until the process dies or its engine cannot go on; then every open request ends with
        `WorkerDied`."""
        try:
            while True:
                ended = await self.handle.call(
                    "collect", COLLECT_WAIT_SECONDS, timeout=COLLECT_WAIT_SECONDS + SILENCE_SECONDS
                )
                for item in ended:
                    self._deliver(item)
        except WorkerDied as error:
            death = error
        except (WorkerFailed, WorkerTimeout) as error:
            death = WorkerDied(self.name, str(error))
        self.fail_all(death)
        return death

    def _deliver(self, ended: Completion | RequestFailed) -> None:
        future = self._pending.get(ended.request_id)
        if future is None or future.done():
            return
        if isinstance(ended, RequestFailed):
            future.set_exception(RequestError(f"{self.name}, request {ended.request_id}: {ended.cause}"))
        else:
            future.set_result(ended)

    def fail_all(self, death: WorkerDied) -> None:
        """End every open request with this error, and say that the replica is gone."""
        self._on_death(self, death)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerDied(death.worker, death.cause))


@dataclass(frozen=True)
class PoolSettings:
    """What the pool of replicas needs to know."""

    transport: str
    in_flight: PauseMode
    max_restarts: int
    start_timeout_seconds: float
    request_timeout_seconds: float
    publish_timeout_seconds: float
    load_bucket_bytes: int
    dual_buffer: bool


class InferencePool:
    """The replicas of one role."""

    def __init__(
        self,
        role: str,
        count: int,
        start_worker: Callable[[int], WorkerHandle],
        spec: EngineSpec,
        settings: PoolSettings,
        on_event: Callable[[str], None],
    ) -> None:
        self._names = [f"{role}/{index}" for index in range(count)]
        self._start_worker = start_worker
        self._spec = spec
        self._settings = settings
        self._on_event = on_event
        self._router = Router(self._names)
        self._replicas: dict[str, Replica] = {}
        self._publication: Publication | None = None
        self.buffers = WeightBuffers(halves=2 if settings.dual_buffer else 1)
        self._asleep = False
        self._deadlines = StoppableDeadlines()
        self.restarts = 0
        self.reissued = 0
        self.completed = 0

    @property
    def dtype(self) -> str:
        """The dtype in which the engines hold their weights."""
        return self._spec.dtype

    async def start(self) -> None:
        """Start every replica. They serve requests from the first publication on."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._names)):
                group.create_task(self._start_replica(index))

    async def run(self) -> None:
        """Look after the replicas; returns never, raises `WorkerDied` when they die too often."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._names)):
                group.create_task(self._supervise(index))

    async def generate(
        self, request: GenerateRequest, *, sticky_key: str | None = None, min_version: int | None = None
    ) -> Completion:
        """Run a request to its end, on another replica if the first one dies; none of its tokens is older than
        ``min_version``."""
        timeout = self._settings.start_timeout_seconds
        while True:
            async with self._router.lease(timeout=timeout, sticky_key=sticky_key, min_version=min_version) as name:
                try:
                    async with self._deadlines.limit(self._settings.request_timeout_seconds):
                        completion = await self._replicas[name].generate(request)
                    self.completed += 1
                    return completion
                except WorkerDied:
                    self.reissued += 1
                except TimeoutError:
                    raise RequestError(
                        f"{name}, request {request.request_id}: no end after "
                        f"{self._settings.request_timeout_seconds:g} s (actor_infer.request_timeout_seconds)"
                    ) from None

    async def publish(self, publication: Publication) -> dict[str, float]:
        """Bring every live replica to this version, one after the other. Its half of the buffers was acquired before.

        Returns seconds: ``fetch`` and ``load`` (sums) and ``stall`` (longest pause of a replica). A replica that dies
        meanwhile comes back with this version by itself.
        """
        self._publication = publication
        self.buffers.publishing(publication.version)
        seconds = {"fetch": 0.0, "load": 0.0, "stall": 0.0}
        for replica in list(self._replicas.values()):
            try:
                async with replica.changing:
                    timings = await self._load(replica, publication)
            except WorkerDied:
                self.buffers.keep_only(replica, None)
                continue
            seconds["fetch"] += timings.get("fetch", 0.0)
            seconds["load"] += timings.get("load", 0.0)
            seconds["stall"] = max(seconds["stall"], timings.get("stall", 0.0))
        self.buffers.published(publication.version)
        return seconds

    async def offload_states(self) -> None:
        """Put every replica to sleep: its requests wait, its weights and caches leave the devices."""
        self._asleep = True
        self._deadlines.stop()
        await self._settle_all()

    async def load_states(self) -> None:
        """Wake every replica."""
        self._asleep = False
        await self._settle_all()
        self._deadlines.resume()

    async def stats(self) -> list[dict[str, Any]]:
        """What each live replica says of itself."""
        answers = []
        for replica in list(self._replicas.values()):
            try:
                answers.append(await replica.handle.call("stats", timeout=self._settings.publish_timeout_seconds))
            except WorkerDied:
                continue
        return answers

    def forget(self, sticky_key: Hashable) -> None:
        """No request with this key will come any more."""
        self._router.forget(sticky_key)

    def kill(self) -> None:
        for replica in self._replicas.values():
            replica.handle.kill()

    async def _start_replica(self, index: int) -> None:
        handle = self._start_worker(index)
        replica = Replica(handle, self._report_death)
        try:
            await handle.create(self._settings.start_timeout_seconds)
            await handle.call("start", self._spec, timeout=self._settings.start_timeout_seconds)
            async with replica.changing:
                self._replicas[self._names[index]] = replica
                while (publication := self._publication_for(replica)) is not None:
                    await self._load(replica, publication)
                await self._settle(replica)
        except BaseException as error:
            # Requests may have come as soon as its weights were there.
            replica.fail_all(error if isinstance(error, WorkerDied) else WorkerDied(handle.name, repr(error)))
            self._replicas.pop(self._names[index], None)
            handle.kill()
            self.buffers.keep_only(replica, None)
            raise

    async def _supervise(self, index: int) -> None:
        name = self._names[index]
        while True:
            replica = self._replicas[name]
            death = await replica.collect_forever()
            self._replicas.pop(name).handle.kill()
            self.buffers.keep_only(replica, None)
            while name not in self._replicas:
                self.restarts += 1
                if self.restarts > self._settings.max_restarts:
                    raise death
                self._on_event(f"{death}; starting it again ({self.restarts} of {self._settings.max_restarts})")
                try:
                    await self._start_replica(index)
                except WorkerDied as again:
                    death = again

    def _publication_for(self, replica: Replica) -> Publication | None:
        """What a replica that has just started is to load; None while that is not there: the next `publish` brings
        it."""
        publication = self._publication
        if publication is None or replica.version >= publication.version:
            return None
        return publication if self.buffers.has(publication.version) else None

    async def _load(self, replica: Replica, publication: Publication) -> dict[str, float]:
        if replica.version >= publication.version:
            return {}
        self.buffers.hold(publication.version, replica)
        settings = self._settings
        receipt, seconds = await replica.handle.call(
            "load_weights",
            publication,
            LoadPlan(settings.transport, settings.load_bucket_bytes, settings.in_flight),
            timeout=settings.publish_timeout_seconds,
        )
        if self._replicas.get(replica.name) is not replica:
            raise WorkerDied(replica.name, "it died right after it had loaded its weights")
        attest(replica.name, publication, receipt)
        self.buffers.keep_only(replica, publication.version if receipt.in_place else None)
        replica.version = publication.version
        if self._router.state(replica.name).live:
            self._router.set_version(replica.name, publication.version)
        else:
            self._router.mark_live(replica.name, publication.version)
        return seconds

    async def _settle_all(self) -> None:
        for replica in list(self._replicas.values()):
            try:
                async with replica.changing:
                    await self._settle(replica)
            except WorkerDied:
                continue

    async def _settle(self, replica: Replica) -> None:
        """Let a replica sleep or wake as the pool does; one that has just been restarted may be behind."""
        if replica.asleep != self._asleep:
            method = "sleep" if self._asleep else "wake"
            await replica.handle.call(method, timeout=self._settings.publish_timeout_seconds)
            replica.asleep = method == "sleep"

    def _report_death(self, replica: Replica, death: WorkerDied) -> None:
        # A late report about a predecessor says nothing about the process that took its place.
        if self._replicas.get(replica.name) is replica:
            self._router.mark_dead(replica.name, death.cause)
