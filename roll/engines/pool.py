"""The pool of engine replicas, used like a single engine that survives the death of a replica.

A request goes to the least loaded live replica. Every two seconds, each engine reports how many tokens it has
generated; this is its heartbeat. The tokens themselves are fetched from a few replicas at a time, in turn, so that the
load on the driver process does not grow with the number of replicas. If a replica dies, its requests continue on other
replicas from the tokens fetched so far, and a new process with the current weights replaces it. Too many restarts stop
the run with the last cause.

Weight updates are loaded by a share of the replicas at a time, and verified by checksums. They are either pushed when a
version is published, or pulled by each replica when it is ready (`Pulls`); `on_oldest` then receives the oldest version
that is still in use.

For a validation alongside training, some replicas can be pinned to a version (`InferencePool.pin`). They load no newer
weights and serve only the validation's requests until they are unpinned.

Each attempt of a response requests the missing part (`response.py`) from an engine whose weights are at least as new as
those of the last token. Versions therefore never decrease along a response, and every token is at least as new as the
request demands.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from roll.engines.base import Completion, EngineFailed, GenerateRequest, PauseMode
from roll.engines.replica import Replica
from roll.engines.response import PartialResponse
from roll.engines.updates import Loaded, Pinned, Pulls, WeightSource
from roll.engines.worker import EngineSpec
from roll.rollout.router import Router
from roll.runtime.pool import Pace, all_or_none
from roll.runtime.workers import StoppableDeadlines, WorkerDied, WorkerFailed, WorkerHandle, WorkerTimeout
from roll.tracking.waits import VALIDATION, part, waiting
from roll.weights.buckets import HeldWeights
from roll.weights.buffers import WeightBuffers
from roll.weights.publisher import EngineCallFailed, Publication, PushTarget, check_weights
from roll.weights.transports import TRANSPORTS
from roll.weights.verify import CanaryScores, compare_canaries

VERIFIERS = "replicas that verify for their node"
LOOKS_A_TURN = 64
"""Maximum number of replicas whose progress is asked for in one turn of the event loop. Asking takes about 0.4 ms."""
FETCHED_AT_ONCE = 2
"""Number of replicas from which new tokens are fetched per interval, in turn. If an engine dies, tokens that were not
fetched are generated again."""


@dataclass(frozen=True)
class PoolSettings:
    """Settings of the pool of replicas."""

    in_flight: PauseMode
    max_restarts: int
    start_timeout_seconds: float
    request_timeout_seconds: float
    publish_timeout_seconds: float
    load_bucket_bytes: int
    dual_buffer: bool
    silence_timeout_seconds: float
    max_unavailable: float
    """Share of the replicas that may load weights at the same time."""
    pinned_replicas: int = 0
    """Number of replicas that `InferencePool.pin` pins."""
    pull_after_seconds: float | None = None
    """Pull mode: maximum seconds that a replica waits to be idle before it loads newer weights. None: push mode."""


class InferencePool:
    """All engine replicas of one role."""

    weight_source: WeightSource
    """The trainer. Must be set before the first update if the transport pushes weights into engines."""

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
        self._deadlines = StoppableDeadlines()
        self._router = Router(self._names, limit=self._deadlines.limit)
        self._replicas: dict[str, Replica] = {}
        self._looks = Pace(LOOKS_A_TURN)
        self._publication: Publication | None = None
        self._canaries: CanaryScores | None = None
        self._loaded = Loaded()
        self._verified: set[tuple[str | None, int]] = set()
        """(Node, version) pairs that one replica of the node has verified for the others."""
        self._arrived = asyncio.Event()
        self._arrived.set()
        self._pinned: Pinned | None = None
        self.buffers = self._new_buffers()
        self._awake = asyncio.Event()
        self._awake.set()
        self.on_oldest: Callable[[int], None] = lambda version: None
        """In pull mode, called with the oldest version of all live replicas whenever it increases."""
        self._oldest = -1
        self._pulled = Loaded()
        """Result of the replicas' pulls since the last `publish`."""
        self._pulls: Pulls | None = None
        if settings.pull_after_seconds is not None:
            at_once = max(1, int(count * settings.max_unavailable))
            after = settings.pull_after_seconds
            self._pulls = Pulls(self._router, self._is_behind, self._pull, after_seconds=after, at_once=at_once)
        self._starting = 0
        self._none_starting = asyncio.Event()
        self._none_starting.set()
        self.restarts = 0
        self.reissued = 0
        """Number of requests that were reissued because their replica died."""
        self.resumed_tokens = 0
        """Number of tokens that reissued requests kept from earlier attempts."""
        self.abandoned_tokens = 0
        """Number of sampled tokens of requests that were cancelled before they ended."""
        self.completed = 0
        """Number of completed requests."""
        self.tokens_seen = 0
        """Number of tokens reported by engines for running requests."""

    @property
    def can_pin(self) -> bool:
        """True if replicas can be pinned to a version."""
        return self._settings.pinned_replicas > 0

    @property
    def pulls(self) -> bool:
        """True in pull mode: each replica loads new weights when it is ready."""
        return self._pulls is not None

    @property
    def dtype(self) -> str:
        """The dtype of the engines' weights."""
        return self._spec.dtype

    async def start(self) -> None:
        """Start all replicas. They serve requests after the first weight update."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._names)):
                group.create_task(self._start_replica(index))

    async def run(self) -> None:
        """Supervise the replicas and restart dead ones. Never returns; raises `WorkerDied` after too many restarts."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._names)):
                group.create_task(self._supervise(index))
            if self._pulls is not None:
                for name in self._names:
                    group.create_task(self._pulls.run(name))

    async def generate(
        self,
        request: GenerateRequest,
        *,
        sticky_key: str | None = None,
        min_version: int | None = None,
        pinned: bool = False,
    ) -> Completion:
        """Run a request to its end. If its replica dies, continue on another one.

        ``sticky_key``: requests with the same key go to the same replica, if possible. No token has an older version
        than ``min_version`` or than the token before it. ``pinned``: use the pinned replicas, if there are any."""
        response = PartialResponse(request, min_version=min_version, max_length=self._spec.max_length)
        try:
            completion = await self._attempt(response, sticky_key, pinned)
            while completion is None:
                self.resumed_tokens += response.cut_off()
                completion = response.completion
                if completion is None:
                    self.reissued += 1
                    completion = await self._attempt(response, sticky_key, pinned)
        except BaseException:
            self._count_abandoned(response.kept_tokens)
            raise
        self.completed += 1
        return completion

    async def _attempt(self, response: PartialResponse, sticky_key: str | None, pinned: bool) -> Completion | None:
        """Return the complete response, or None if the replica dies while generating it."""
        lease = await self._router.acquire(
            timeout=self._settings.start_timeout_seconds,
            sticky_key=sticky_key,
            min_version=response.min_version,
            reserved=pinned,
        )
        try:
            return response.joined_to(await self._replicas[lease.replica_id].generate(response))
        except WorkerDied:
            return None
        finally:
            self._router.release(lease)

    async def publish(self, publication: Publication, canaries: CanaryScores | None = None) -> Loaded:
        """Load a version into all live replicas, a share of them at a time, and run the log-probability parity check.

        In pull mode, only the first version is loaded here. Later ones are made available for pulling, and the result
        of the pulls since the last call is returned. Pinned replicas are skipped. The caller must have acquired the
        buffer that holds the version. A replica that dies during the update loads the version when it restarts. Raises
        `WeightsDiffer`.
        """
        is_first = not any(self._router.state(name).live for name in self._names)
        if publication is not self._publication:
            self.announce(publication, canaries)
        if self._pulls is not None and not is_first:
            self.buffers.published(publication.version)
            self._pulls.published()
            pulled, self._pulled = self._pulled, Loaded()
            return pulled
        loaded = self._loaded
        await self._verify(publication)
        at_once = self._loads_at_once(publication)
        await self._change_each(lambda replica: self._load(replica, loaded), at_once, self._names)
        self._verified.clear()
        self.buffers.published(publication.version)
        # Include what was found in replicas that restarted, or were unpinned, since the last call.
        loaded.canaries += self._pulled.canaries
        loaded.healed += self._pulled.healed
        self._pulled.canaries, self._pulled.healed = [], 0
        return loaded

    def expect_weights(self) -> None:
        """Make replicas without weights (discarded during sleep) wait for the update being sent; `announce` ends it."""
        self._arrived.clear()

    def announce(self, publication: Publication, canaries: CanaryScores | None = None) -> None:
        """Make this the version to load: at once for replicas that start or wake without weights, and in `publish` for
        all others."""
        self._publication, self._canaries, self._loaded = publication, canaries, Loaded()
        self._verified.clear()
        self.buffers.publishing(publication.version)
        self._arrived.set()

    def pin(self) -> None:
        """Pin some replicas, the least loaded ones, to the newest version until `unpin`.

        They finish their running requests, and then serve ``pinned`` requests only. If one dies, it restarts with the
        same version, which stays in its buffer. Do not call this during `publish`. Raises ``RuntimeError`` if nothing
        is published or replicas are pinned already.
        """
        if self._publication is None or self._pinned is not None:
            raise RuntimeError("one published version is kept at a time")
        version = self._publication.version
        states = {name: self._router.state(name) for name in self._names}
        ready = {name: state.live and state.version == version for name, state in states.items()}
        names = sorted(self._names, key=lambda name: (not ready[name], states[name].load))
        chosen = frozenset(names[: self._settings.pinned_replicas])
        self._pinned = Pinned(chosen, self._publication, self._canaries)
        self.buffers.hold(version, VALIDATION)
        self._router.reserve(chosen)

    async def ready_to_validate(self) -> None:
        """In pull mode, load the version to validate into the replicas that the validation uses."""
        if self._publication is not None and self.pulls:
            names = self._names if self._pinned is None else self._pinned.names
            await self._change_each(self._catch_up, self._loads_at_once(self._publication), names)

    async def unpin(self) -> None:
        """Load the newest version into the pinned replicas; then they serve all requests again."""
        pinned, self._pinned = self._pinned, None
        if pinned is None or self._publication is None:
            raise RuntimeError("no replica keeps a version")
        self.buffers.release(pinned.publication.version, VALIDATION)
        await self._change_each(self._catch_up, self._loads_at_once(self._publication), pinned.names)
        self._router.reserve(())
        self._tell_oldest()

    async def forget_weights(self) -> None:
        """Take all replicas out of service until the next `publish`, which may repeat an earlier version number.

        For a trainer that restarts from an earlier step: its weights differ from those that replicas hold under the
        same version number. Changes in progress finish first, each within its timeout. Processes keep running. Call
        this when no request is running.
        """
        self._publication = self._canaries = self._pinned = None
        self._verified.clear()
        self._router.reserve(())
        await self._change_each(self._take_out_of_service, len(self._names), self._names)
        self.buffers = self._new_buffers()
        self._loaded, self._pulled, self._oldest = Loaded(), Loaded(), -1
        self._arrived.set()

    async def offload_states(self) -> None:
        """Put all replicas to sleep: requests wait, and weights and KV caches leave the devices.

        Waits for replicas that are still starting (within their start timeout), because these cannot release the
        devices earlier.
        """
        self._awake.clear()
        self._deadlines.stop()
        with waiting("replicas that start", "the end of their start"):
            await self._none_starting.wait()
        await self._change_each(self._settle, len(self._names), self._names)

    async def load_states(self) -> None:
        """Wake all replicas. Replicas without weights load the newest ones; they wait for an update being sent."""
        self._awake.set()
        if any(replica.version < 0 for replica in self._replicas.values()):
            with waiting("weights that are being sent", "their arrival"):
                await self._arrived.wait()
            if self._publication is not None and self.buffers.has(self._publication.version):
                await self._verify(self._publication)
        await self._change_each(self._settle, len(self._names), self._names)
        self._deadlines.resume()

    async def stats(self) -> list[dict[str, Any]]:
        """Return the stats of each live replica (`InferStrategy.stats`), with its ``name`` added."""

        async def ask(replica: Replica) -> list[dict[str, Any]]:
            try:
                said = await replica.handle.call("stats", timeout=self._settings.publish_timeout_seconds)
            except WorkerDied:
                return []
            return [{**said, "name": replica.name}]

        # Side by side: an answer may wait for an engine's current step.
        answers = await asyncio.gather(*map(ask, list(self._replicas.values())))
        return [said for each in answers for said in each]

    def forget(self, sticky_key: Hashable) -> None:
        """Drop the routing entry of a sticky key that will not be used again."""
        self._router.forget(sticky_key)

    def handles(self) -> list[WorkerHandle]:
        """Return the handles of all running replicas' processes."""
        return [replica.handle for replica in self._replicas.values()]

    def kill(self) -> None:
        """Kill all processes now."""
        for replica in self._replicas.values():
            replica.handle.kill()

    def _new_buffers(self) -> WeightBuffers:
        settings = self._settings
        return WeightBuffers(2 if settings.dual_buffer else 1, spare=1 if settings.pinned_replicas else 0)

    async def _take_out_of_service(self, replica: Replica) -> None:
        replica.version = -1
        self._router.mark_dead(replica.name, "it waits for the weights of a trainer that was started again")

    async def _start_replica(self, index: int) -> None:
        """Start a replica once the engines hold the devices. `offload_states` waits until it has started."""
        while not self._awake.is_set():
            await self._awake.wait()
        self._starting += 1
        self._none_starting.clear()
        try:
            with part(self._names[index]):
                await self._start_here(index)
        finally:
            self._starting -= 1
            if not self._starting:
                self._none_starting.set()

    async def _start_here(self, index: int) -> None:
        handle = self._start_worker(index)
        turns = -(-len(self._names) // FETCHED_AT_ONCE)
        replica = Replica(
            handle,
            self._settings,
            fetches=(turn % turns == 0 for turn in itertools.count(index)),
            looks=self._looks,
            on_death=self._report_death,
            on_tokens=self._count_tokens,
            on_abandoned=self._count_abandoned,
        )
        try:
            await handle.create(self._settings.start_timeout_seconds)
            await handle.call("start", self._spec, timeout=self._settings.start_timeout_seconds)
            await replica.change(partial(self._enter, replica))
        except BaseException as error:
            # Requests may have been routed to the replica since it got its weights.
            replica.fail_all(error if isinstance(error, WorkerDied) else WorkerDied(handle.name, repr(error)))
            self._replicas.pop(self._names[index], None)
            handle.kill()
            self.buffers.keep_only(replica, None)
            raise

    async def _enter(self, replica: Replica) -> None:
        self._replicas[replica.name] = replica
        await self._catch_up(replica)
        await self._settle(replica)

    async def _supervise(self, index: int) -> None:
        name = self._names[index]
        while True:
            replica = self._replicas[name]
            death: WorkerDied | WorkerFailed = await replica.serve()
            self._replicas.pop(name).handle.kill()
            self.buffers.keep_only(replica, None)
            while name not in self._replicas:
                self.restarts += 1
                if self.restarts > self._settings.max_restarts:
                    raise death
                self._on_event(f"{death}; starting it again ({self.restarts} of {self._settings.max_restarts})")
                try:
                    await self._start_replica(index)
                except (WorkerDied, WorkerFailed) as again:
                    death = again

    async def _verify(self, publication: Publication) -> None:
        """Let one replica per node verify the bytes that several replicas of the node will map."""
        nodes: dict[str | None, list[Replica]] = {}
        is_mapped = publication.layout is None and publication.delta is None
        if is_mapped and TRANSPORTS[self._spec.transport].one_copy_per_host:
            for replica in self._replicas.values():
                known = (replica.handle.node, publication.version) in self._verified
                is_behind = self._wanted(replica)[0] is publication and replica.version < publication.version
                if is_behind and not known:
                    nodes.setdefault(replica.handle.node, []).append(replica)

        async def verify(node: str | None, replicas: list[Replica]) -> None:
            for replica in replicas:
                try:
                    seconds = await self._change(replica, "verify_weights", publication)
                except WorkerDied:
                    continue  # if none is left, restarted replicas verify for themselves
                self._loaded.seconds["fetch"] += seconds
                self._verified.add((node, publication.version))
                return

        # Hold the buffer: an engine may wake while the next version is being announced or gathered.
        self.buffers.hold(publication.version, VERIFIERS)
        try:
            await all_or_none(verify(node, replicas) for node, replicas in nodes.items() if len(replicas) > 1)
        finally:
            self.buffers.release(publication.version, VERIFIERS)

    def _wanted(self, replica: Replica) -> tuple[Publication | None, CanaryScores | None]:
        """Return the publication that a replica should have, and the trainer's scores to compare it with, if any."""
        if self._pinned is not None and replica.name in self._pinned.names:
            return self._pinned.publication, self._pinned.canaries
        return self._publication, self._canaries

    def _loads_at_once(self, publication: Publication) -> int:
        # The trainer pushes into one engine at a time, and an engine that waits for its turn would be paused.
        at_once = int(len(self._names) * self._settings.max_unavailable) if publication.layout is None else 1
        return max(1, at_once)

    async def _catch_up(self, replica: Replica) -> None:
        """Load into a replica the version that it should have. If no buffer holds it any more, do nothing: `publish`
        loads the next one."""
        while (publication := self._wanted(replica)[0]) is not None and replica.version < publication.version:
            if not self.buffers.has(publication.version):
                return
            loaded = Loaded()
            await self._load(replica, loaded)
            if self.pulls:
                self._pulled.add(loaded)
            else:
                self._pulled.canaries += loaded.canaries
                self._pulled.healed += loaded.healed
        self._tell_oldest()

    def _is_behind(self, name: str) -> bool:
        replica = self._replicas.get(name)
        publication = None if replica is None else self._wanted(replica)[0]
        return replica is not None and publication is not None and replica.version < publication.version

    async def _pull(self, name: str) -> None:
        await self._change_each(self._catch_up, 1, {name})

    def _tell_oldest(self) -> None:
        oldest = self._router.oldest() if self.pulls else None
        if oldest is not None and oldest > self._oldest:
            self._oldest = oldest
            self.on_oldest(oldest)

    async def _load(self, replica: Replica, loaded: Loaded) -> None:
        """Load into a replica the version that it should have. Requests are routed to it after verification."""
        publication, canaries = self._wanted(replica)
        if publication is None or replica.version >= publication.version:
            return
        self.buffers.hold(publication.version, replica)
        settings = self._settings
        with self._router.draining(replica.name) if settings.in_flight == "drain" else nullcontext():
            if publication.layout is not None:
                receipt, seconds = await self._push(replica, publication)
            else:
                verified = (replica.handle.node, publication.version) in self._verified
                order = (publication, settings.load_bucket_bytes, settings.in_flight, verified)
                receipt, seconds = await self._change(replica, "load_weights", *order)
        if self._replicas.get(replica.name) is not replica:
            raise WorkerDied(replica.name, "it died right after it had loaded its weights")
        check_weights(replica.name, publication, receipt)
        self.buffers.keep_only(replica, publication.version if receipt.in_place else None)
        if canaries is not None:
            asked = ("score", canaries.token_ids) if canaries.steps is None else ("score_steps", canaries.steps)
            held = await self._change(replica, *asked)
            loaded.canaries.append(compare_canaries(replica.name, canaries, held))
        if receipt.healed:
            loaded.healed += 1
            others = f" and of {len(receipt.healed) - 1} more tensors" if len(receipt.healed) > 1 else ""
            message = f"{replica.name}, version {publication.version}: the delta of {receipt.healed[0]!r}{others}"
            self._on_event(f"{message} did not give what was published; fetched whole")
        for name in ("fetch", "load"):
            loaded.seconds[name] += seconds[name]
        loaded.seconds["stall"] = max(loaded.seconds["stall"], seconds["stall"])
        replica.version = publication.version
        if self._router.state(replica.name).live:
            self._router.set_version(replica.name, publication.version)
        else:
            self._router.mark_live(replica.name, publication.version)

    async def _push(self, replica: Replica, publication: Publication) -> tuple[HeldWeights, dict[str, float]]:
        """Pause a replica and let the trainer push its weights into it. A replica that fails is replaced; a failure in
        the trainer stops the run."""
        await self._change(replica, "begin_push", self._settings.in_flight)
        target = PushTarget(replica.name, replica.handle.actor, self._spec.devices_per_engine)
        pushing = asyncio.ensure_future(self.weight_source.push(publication.version, target))
        death = asyncio.ensure_future(replica.handle.wait_for_death())
        seconds = self._settings.publish_timeout_seconds
        try:
            await asyncio.wait([pushing, death], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not pushing.done():
                # The library's transfer waits forever for a dead peer; closing the connection ends the wait.
                self.weight_source.disconnect(replica.name)
                cause = death.result().cause if death.done() else f"no push of weights ended within {seconds:g} s"
                raise replica.give_up(cause)
            failure = pushing.exception()
            if isinstance(failure, WorkerFailed) and failure.error_type == EngineCallFailed.__name__:
                raise replica.give_up(str(failure))
            if isinstance(failure, WorkerDied):
                raise RuntimeError(f"weights could not be pushed: {failure}") from failure
            pushing.result()
        finally:
            pushing.cancel()
            death.cancel()
        return await self._change(replica, "end_push", publication)

    async def _change(self, replica: Replica, method: str, *args: Any) -> Any:
        """Call a method on a replica that is being changed. If the call times out or its engine fails, kill the replica
        (`run` replaces it) and raise `WorkerDied`."""
        seconds = self._settings.publish_timeout_seconds
        try:
            return await replica.handle.call(method, *args, timeout=seconds)
        except WorkerTimeout:
            cause = f"{method} did not end within {seconds:g} s (weight_update.timeout_seconds)"
            raise replica.give_up(cause) from None
        except WorkerFailed as failure:
            if failure.error_type != EngineFailed.__name__:
                raise
            raise replica.give_up(str(failure)) from failure

    async def _change_each(
        self, change: Callable[[Replica], Awaitable[None]], at_once: int, names: Collection[str]
    ) -> None:
        """Call ``change`` on the live replicas among ``names``, at most ``at_once`` of them concurrently. Replicas that
        die meanwhile are restarted by `run`."""
        turns = asyncio.Semaphore(at_once)

        async def change_one(replica: Replica) -> None:
            try:
                async with turns:
                    await replica.change(partial(change, replica))
            except WorkerDied:
                self.buffers.keep_only(replica, None)

        await all_or_none(change_one(replica) for name, replica in list(self._replicas.items()) if name in names)

    async def _settle(self, replica: Replica) -> None:
        """Put a replica to sleep or wake it, to match the pool. A replica that has just restarted may differ."""
        if replica.asleep != self._awake.is_set():
            return
        if replica.asleep:
            await self._change(replica, "wake")
            replica.asleep = False
            wanted, _ = self._wanted(replica)
            # If no buffer holds the version, `publish` loads the next one; until then the replica gets no requests.
            if replica.version < 0 and wanted is not None and self.buffers.has(wanted.version):
                await self._load(replica, self._loaded)
        else:
            if await self._change(replica, "sleep", self._weights_follow()):
                replica.version = -1
            replica.asleep = True

    def _weights_follow(self) -> bool:
        """Return True if newer weights are being sent, and the current ones can still be loaded if these are late."""
        published = self._publication
        if published is None or published.layout is not None or not self._settings.dual_buffer:
            return False
        return self.buffers.has_newer(published.version)

    def _count_abandoned(self, number: int) -> None:
        self.abandoned_tokens += number

    def _count_tokens(self, number: int) -> None:
        self.tokens_seen += number

    def _report_death(self, replica: Replica, death: WorkerDied) -> None:
        # Ignore a late report about a process that has been replaced already.
        if self._replicas.get(replica.name) is replica:
            self._router.mark_dead(replica.name, death.cause)
            self._tell_oldest()
