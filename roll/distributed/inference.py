"""All replicas of the generating engine, as one engine that survives the death of a replica.

A request goes to the least loaded live replica. When a replica dies its requests are issued again elsewhere, a new
process takes its place with the current weights, and the restart is counted; too many restarts end the run with the
last cause. Weights reach the replicas one after the other, each update followed by an attestation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roll.distributed.errors import WorkerDied, WorkerTimeout
from roll.distributed.group import WorkerHandle
from roll.distributed.infer_worker import EngineSpec, RequestFailed
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

    def __init__(self, handle: WorkerHandle, on_death: Callable[[WorkerDied], None]) -> None:
        self.handle = handle
        self.version = -1
        self._on_death = on_death
        self.weights_lock = asyncio.Lock()
        self._pending: dict[str, asyncio.Future[Completion]] = {}
        self._outgoing: list[GenerateRequest] = []
        self._submitting: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return self.handle.name

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request; all requests of one turn of the event loop leave in one call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._pending[request.request_id] = future
        if not self._outgoing:
            loop.call_soon(self._submit_outgoing)
        self._outgoing.append(request)
        try:
            return await future
        except asyncio.CancelledError:
            self._abandon(request.request_id)
            raise
        finally:
            self._pending.pop(request.request_id, None)

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

    def _abandon(self, request_id: str) -> None:
        if any(request.request_id == request_id for request in self._outgoing):
            self._outgoing = [request for request in self._outgoing if request.request_id != request_id]
            return
        self.handle.tell("abort", [request_id])

    async def collect_forever(self) -> WorkerDied:
        """Deliver ended requests until the process dies; then every open request ends with `WorkerDied`."""
        try:
            while True:
                ended = await self.handle.call(
                    "collect", COLLECT_WAIT_SECONDS, timeout=COLLECT_WAIT_SECONDS + SILENCE_SECONDS
                )
                for item in ended:
                    self._deliver(item)
        except WorkerDied as error:
            death = error
        except WorkerTimeout as error:
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
        self._on_death(death)
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
        self._asleep = False
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
                    async with asyncio.timeout(self._settings.request_timeout_seconds):
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
        """Bring every live replica to this version, one after the other. Returns seconds: ``load`` (sum) and ``stall``
        (longest pause of a replica). A replica that dies meanwhile comes back with this version by itself."""
        self._publication = publication
        seconds = {"load": 0.0, "stall": 0.0}
        for replica in list(self._replicas.values()):
            try:
                timings = await self._load(replica, publication)
            except WorkerDied:
                continue
            seconds["load"] += timings.get("load", 0.0)
            seconds["stall"] = max(seconds["stall"], timings.get("stall", 0.0))
        return seconds

    async def pause(self, mode: PauseMode) -> None:
        await self._call_live("pause", mode)

    async def resume(self) -> None:
        await self._call_live("resume")

    async def offload_states(self) -> None:
        """Put every replica to sleep: its requests wait, its weights and caches leave the devices."""
        self._asleep = True
        await self._call_live("sleep")

    async def load_states(self) -> None:
        """Wake every replica."""
        self._asleep = False
        await self._call_live("wake")

    async def stats(self) -> list[dict[str, Any]]:
        """What each live replica says of itself."""
        return await self._call_live("stats")

    def pids(self) -> dict[str, int | None]:
        return {name: replica.handle.pid for name, replica in self._replicas.items()}

    def kill(self) -> None:
        for replica in self._replicas.values():
            replica.handle.kill()

    async def _start_replica(self, index: int) -> None:
        name = self._names[index]
        handle = self._start_worker(index)
        replica = Replica(handle, lambda death: self._forget(name, death))
        try:
            await handle.create(self._settings.start_timeout_seconds)
            await handle.call("start", self._spec, timeout=self._settings.start_timeout_seconds)
            self._replicas[name] = replica
            while self._publication is not None and replica.version < self._publication.version:
                await self._load(replica, self._publication)
            if self._asleep:
                await handle.call("sleep", timeout=self._settings.start_timeout_seconds)
        except BaseException:
            self._replicas.pop(name, None)
            handle.kill()
            raise

    async def _supervise(self, index: int) -> None:
        name = self._names[index]
        while True:
            death = await self._replicas[name].collect_forever()
            self._replicas.pop(name).handle.kill()
            while name not in self._replicas:
                self.restarts += 1
                if self.restarts > self._settings.max_restarts:
                    raise death
                self._on_event(f"{death}; starting it again ({self.restarts} of {self._settings.max_restarts})")
                try:
                    await self._start_replica(index)
                except WorkerDied as again:
                    death = again

    async def _load(self, replica: Replica, publication: Publication) -> dict[str, float]:
        async with replica.weights_lock:
            if replica.version >= publication.version:
                return {}
            receipt, seconds = await replica.handle.call(
                "load_weights",
                self._settings.transport,
                publication.handles,
                publication.version,
                self._settings.in_flight,
                timeout=self._settings.publish_timeout_seconds,
            )
            attest(replica.name, publication, receipt)
            replica.version = publication.version
            if self._router.state(replica.name).live:
                self._router.set_version(replica.name, publication.version)
            else:
                self._router.mark_live(replica.name, publication.version)
            return seconds

    async def _call_live(self, method: str, *args: Any) -> list[Any]:
        answers = []
        for replica in list(self._replicas.values()):
            try:
                answers.append(
                    await replica.handle.call(method, *args, timeout=self._settings.publish_timeout_seconds)
                )
            except WorkerDied:
                continue
        return answers

    def _forget(self, name: str, death: WorkerDied) -> None:
        self._router.mark_dead(name, death.cause)
