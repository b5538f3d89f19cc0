"""Simulated engines: continuous batching, event by event, behind the real router and the real weight buffers.

Between two events a replica runs a fixed set of n requests, each of which gets a token a step. A step takes a fixed
time and a share for each cached token, and every step adds n of these, so k steps take ``a k + b n k^2 / 2`` seconds.
This is solved for the next event: a request ends, or the room for keys and values does. No token is ever visited.

Beyond that room the request that was admitted last is interrupted, and computes its cache again later, as in vLLM
(Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023).
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from roll.configs import derived
from roll.configs.run import PipelineConfig
from roll.rollout.clock import VirtualTimeLoop
from roll.rollout.router import Lease, Router
from roll.simulation.costs import Costs, EngineCosts
from roll.weights.buffers import WeightBuffers

NEVER = 1e6
"""Seconds that a request waits for a replica."""
WATERMARK = 0.99
"""Share of the room for keys and values up to which requests are admitted, as in vLLM."""


class Host:
    """The time of work. It passes more slowly than the loop's while more threads compute than there are cores.

    Its events happen in turn within one callback of the loop, as long as the loop has nothing to do before them: an
    event then costs a few microseconds.
    """

    def __init__(self, cores: float, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self._cores, self._threads, self._speed = cores, 0.0, 1.0
        self._done, self._seen = 0.0, loop.time()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._firing = False

    def now(self) -> float:
        """Return the seconds of work that a thread could have done so far."""
        return self._done + (self._loop.time() - self._seen) * self._speed

    def at(self, when: float, call: Callable[[float], None]) -> None:
        """Call a function with ``when`` at the moment when `now` is that."""
        self._number += 1
        heapq.heappush(self._events, (when, self._number, call))
        if not self._firing and self._events[0][0] == when:
            self._arm()

    def compute(self, threads: float) -> None:
        """Add threads that compute from now on; less than 0: they have ended."""
        if self._cores == math.inf:
            return
        self._done, self._seen = self.now(), self._loop.time()
        self._threads += threads
        self._speed = min(1.0, self._cores / self._threads) if self._threads > 0 else 1.0
        if not self._firing:
            self._arm()

    async def work(self, seconds: float, threads: float) -> None:
        """Do so many seconds of work with so many threads."""
        if seconds <= 0:
            return
        ended = self._loop.create_future()
        self.compute(threads)
        try:
            self.at(self.now() + seconds, lambda when: None if ended.done() else ended.set_result(None))
            await ended
        finally:
            self.compute(-threads)

    def _time_of(self, when: float) -> float:
        return self._loop.time() + max(0.0, when - self.now()) / self._speed

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._events:
            self._timer = self._loop.call_at(self._time_of(self._events[0][0]), self._fire)

    def _fire(self) -> None:
        self._timer, self._firing = None, True
        events, loop = self._events, self._loop
        due = events[0][0]
        while True:
            # Rounding must not leave the event that time was advanced for in the future.
            self._done, self._seen = max(self.now(), due), loop.time()
            while events and events[0][0] <= self._done:
                when, _, call = heapq.heappop(events)
                call(when)
            if not events:
                break
            due, now = events[0][0], loop.time()
            at = now + max(0.0, due - self._done) / self._speed
            if at >= loop.idle_until():
                break
            loop.advance(at - now)
        self._firing = False
        self._arm()


class Request:
    """A request to generate some tokens."""

    __slots__ = ("context", "end", "ended", "lease", "over", "prefill", "prompt", "since", "spans", "tokens")

    def __init__(
        self, tokens: float, context: float, prefill: float, prompt: int, ended: Callable[[Request], None]
    ) -> None:
        self.tokens = tokens
        """Tokens still to generate."""
        self.context = context
        """Tokens that are cached once it runs."""
        self.prefill = prefill
        """Those of them that have to be computed."""
        self.prompt = prompt
        """A replica that runs another request of the same prompt has it cached."""
        self.ended = ended
        self.spans: list[tuple[int, float]] = []
        """Version and number of the tokens that it sampled, in order."""
        self.lease: Lease | None = None
        self.since = 0.0
        """Step of the replica from which on tokens are in no span."""
        self.end = -1.0
        """Step of the replica at which it ends; -1 while it does not run."""
        self.over = False


class Replica:
    """One replica of the engine."""

    def __init__(self, name: str, costs: EngineCosts, host: Host) -> None:
        self.name, self.version = name, 0
        self.generated = self.recomputed = self.busy_seconds = 0.0
        self._costs, self._host, self._loop = costs, host, asyncio.get_running_loop()
        self._steps = self._cached = self._stall = 0.0
        self._seen, self._seen_at = host.now(), self._loop.time()
        self._ends: list[tuple[float, int, Request]] = []
        """Heap of the steps at which requests end; those that were interrupted leave it late."""
        self._running: dict[Request, None] = {}
        """Running requests in the order of admission."""
        self._prompts: Counter[int] = Counter()
        self._waiting: deque[Request] = deque()
        self._paused = 0
        self._computes = self._scheduled = False
        self._next: float | None = None
        """Time of the next event; an event at another time is over."""
        self._number = 0

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)
        self._soon()

    def abort(self, request: Request) -> None:
        """Forget a request that nobody waits for any more."""
        self.advance()
        request.over = True
        if request.end >= 0:
            self._leave(request)
        self._soon()

    def pause(self) -> None:
        """Stand still until `resume`. Pauses are counted."""
        self.advance()
        self._paused += 1
        self._note_computing()

    def resume(self, *, caches_lost: bool = False) -> None:
        """Undo one `pause`. ``caches_lost``: keys and values of running requests are computed again first."""
        self.advance()
        self._paused -= 1
        if caches_lost:
            self._stall += self._costs.prefill_token * self._cached
            self.recomputed += self._cached
        self._soon()

    def set_version(self, version: int) -> None:
        """Sample further tokens with another version."""
        self.advance()
        for request in self._running:
            self._close_span(request)
        self.version = version

    def advance(self) -> None:
        """Take into account what was done up to now."""
        now, at = self._host.now(), self._loop.time()
        seconds, self._seen = now - self._seen, now
        if self._computes:
            self.busy_seconds += at - self._seen_at
        self._seen_at = at
        requests = len(self._running)
        if self._paused or not requests:
            return
        if self._stall:
            spent = min(self._stall, seconds)
            self._stall -= spent
            seconds -= spent
        if seconds > 0:
            first, growth = self._rate(requests)
            if growth:
                steps = (math.sqrt(first * first + 2 * growth * seconds) - first) / growth
            else:
                steps = seconds / first
            self._steps += steps
            self._cached += requests * steps
            self.generated += requests * steps

    def _rate(self, requests: int) -> tuple[float, float]:
        """Return the seconds of the next step, and by how much each step takes longer than the one before."""
        growth = self._costs.cached_token
        return self._costs.step[requests] + growth * self._cached + 1e-12, growth * requests

    def _soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _event(self, when: float) -> None:
        if self._next == when:
            self._turn()

    def _turn(self) -> None:
        """End, interrupt and admit requests, and set the time of the next event."""
        self._scheduled = False
        self.advance()
        ends, running, costs = self._ends, self._running, self._costs
        while ends and ends[0][0] <= self._steps + 1e-6:
            end, _, request = heapq.heappop(ends)
            if request.end == end:
                self._leave(request)
                request.over = True
                request.ended(request)
        while self._cached >= costs.cache_tokens - 1e-6 and len(running) > 1:
            self._interrupt(next(reversed(running)))
        if self._waiting and not self._paused:
            self._admit()
        self._note_computing()
        if not self._computes:
            self._next = None
            return
        while ends[0][2].end != ends[0][0]:
            heapq.heappop(ends)
        requests = len(running)
        steps = ends[0][0] - self._steps
        if requests > 1:
            steps = min(steps, (costs.cache_tokens - self._cached) / requests)
        first, growth = self._rate(requests)
        self._next = self._seen + self._stall + (first + growth * steps / 2) * steps
        self._host.at(self._next, self._event)

    def _admit(self) -> None:
        room = WATERMARK * self._costs.cache_tokens
        while self._waiting and len(self._running) < self._costs.max_running:
            request = self._waiting[0]
            if request.over:
                self._waiting.popleft()
                continue
            if self._running and self._cached + request.context > room:
                return
            self._waiting.popleft()
            if not self._prompts[request.prompt]:
                self._stall += self._costs.prefill_token * request.prefill
            self._prompts[request.prompt] += 1
            self._cached += request.context
            request.since = self._steps
            request.end = self._steps + request.tokens
            self._running[request] = None
            self._number += 1
            heapq.heappush(self._ends, (request.end, self._number, request))

    def _leave(self, request: Request) -> None:
        """Take a request out of those that run."""
        del self._running[request]
        self._close_span(request)
        done = request.tokens - (request.end - self._steps)
        self._cached = max(0.0, self._cached - request.context - done)
        request.context += done
        request.tokens -= done
        request.end = -1.0
        left = self._prompts[request.prompt] - 1
        if left:
            self._prompts[request.prompt] = left
        else:
            del self._prompts[request.prompt]

    def _interrupt(self, request: Request) -> None:
        self._leave(request)
        request.prefill, request.prompt = request.context, -id(request)  # its cache is that of no other
        self.recomputed += request.context
        self._waiting.appendleft(request)

    def _close_span(self, request: Request) -> None:
        made = self._steps - request.since
        if made > 0:
            request.spans.append((self.version, made))
        request.since = self._steps

    def _note_computing(self) -> None:
        computes = bool(self._running) and not self._paused
        if computes != self._computes:
            self._computes = computes
            self._seen_at = self._loop.time()
            self._host.compute(self._costs.threads if computes else -self._costs.threads)


class Engines:
    """The replicas behind the real router: a pool without processes."""

    def __init__(self, config: PipelineConfig, costs: Costs, host: Host) -> None:
        names = [f"actor_infer/{index}" for index in range(derived.engine_replicas(config))]
        own = [costs.slowest_engine, *[costs.engine] * (len(names) - 1)]
        self.replicas = {name: Replica(name, each, host) for name, each in zip(names, own, strict=True)}
        self.buffers = WeightBuffers(derived.weight_buffers(config))
        self.wasted = 0.0
        """Tokens of requests that were aborted."""
        self._costs, self._update, self._loop = costs, config.weight_update, asyncio.get_running_loop()
        self._router = Router(names)
        for name in names:
            self._router.mark_live(name, 0)

    async def generate(
        self,
        requests: Sequence[Request],
        *,
        sticky_key: str | None = None,
        min_version: int | None = None,
        pinned: bool = False,
    ) -> None:
        """Run requests to their end. With a ``sticky_key`` they go to one replica, as all others of that key."""
        left, all_ended = len(requests), self._loop.create_future()

        def ended(request: Request) -> None:
            nonlocal left
            assert request.lease is not None
            self._router.release(request.lease)
            left -= 1
            tell[request](request)
            if not left and not all_ended.done():
                all_ended.set_result(None)

        tell = {request: request.ended for request in requests}
        try:
            for request in requests:
                request.lease = await self._router.acquire(
                    timeout=NEVER, sticky_key=sticky_key, min_version=min_version
                )
                request.ended = ended
                self.replicas[request.lease.replica_id].submit(request)
            await all_ended
        finally:
            if left:
                self._abort(requests)

    def forget(self, sticky_key: str) -> None:
        """Drop the routing of a key."""
        self._router.forget(sticky_key)

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.lease is not None and not request.over:
                self.replicas[request.lease.replica_id].abort(request)
                self._router.release(request.lease)
            self.wasted += sum(tokens for _, tokens in request.spans)

    async def publish(self, version: int) -> None:
        """Load a version that was sent into every replica, a share of them at a time."""
        self.buffers.publishing(version)
        turns = asyncio.Semaphore(max(1, int(len(self.replicas) * self._update.max_unavailable)))

        async def load(replica: Replica) -> None:
            async with turns:
                self.buffers.hold(version, replica)
                drains = self._update.in_flight == "drain"
                with self._router.draining(replica.name) if drains else nullcontext():
                    await asyncio.sleep(self._costs.fetch)
                    if drains:
                        await self._router.idle(replica.name)
                    replica.pause()
                    await asyncio.sleep(self._costs.load)
                    replica.set_version(version)
                    replica.resume(caches_lost=self._update.in_flight == "resume")
                # With one buffer each engine copies the weights out of it.
                self.buffers.keep_only(replica, version if self._update.dual_buffer else None)
                self._router.set_version(replica.name, version)

        async with asyncio.TaskGroup() as tasks:
            for replica in self.replicas.values():
                tasks.create_task(load(replica))
        self.buffers.published(version)

    async def keep(self, number: int, seconds: float) -> None:
        """Give some replicas no requests but those of a validation, which takes ``seconds`` on all replicas."""
        self._router.reserve(list(self.replicas)[-number:])
        await asyncio.sleep(seconds * len(self.replicas) / number)
        self._router.reserve(())

    async def offload_states(self) -> None:
        """Leave shared devices."""
        for replica in self.replicas.values():
            replica.pause()
        await asyncio.sleep(self._costs.exchange["actor_infer"])

    async def load_states(self) -> None:
        """Come back to shared devices, with empty caches."""
        await asyncio.sleep(self._costs.exchange["actor_infer"])
        for replica in self.replicas.values():
            replica.resume(caches_lost=True)
