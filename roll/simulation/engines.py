"""Discrete-event simulation of engines with continuous batching, behind the real router and weight buffers.

Between two events, a replica runs a fixed set of n requests, each of which gets one token per decoding step. A step
takes a fixed time, plus a time per cached token, and adds n cached tokens, so k steps take ``a k + b n k^2 / 2``
seconds. The next event follows in closed form: a request ends, or the KV cache is full. Tokens are not simulated one by
one.

If the KV cache is full, the request that was admitted last is preempted, and its cache is recomputed later, as in vLLM
(Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023).
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from roll.configs import derived
from roll.configs.run import PipelineConfig
from roll.rollout.clock import VirtualTimeLoop
from roll.rollout.router import Lease, Router
from roll.simulation.costs import Costs, EngineCosts
from roll.weights.buffers import WeightBuffers

NEVER = 1e6
"""Timeout of the wait for a replica, in seconds: practically unlimited."""
WATERMARK = 0.99
"""Share of the KV cache up to which requests are admitted, as in vLLM."""


class Host:
    """The CPU cores that simulated work shares, and their clock of *work time*.

    Work time passes more slowly than the event loop's virtual time while more threads compute than there are cores, and
    a little more slowly while several cores compute: they share memory bandwidth and caches, hyperthreads even a core.
    Several events are handled within one callback of the loop if the loop has nothing else to do in between, so an
    event costs only a few microseconds.
    """

    def __init__(self, cores: float, loop: VirtualTimeLoop, slowdown: float = 0.0) -> None:
        """``slowdown``: additional share of time that work takes while all cores compute."""
        self._loop, self._slowdown = loop, slowdown
        self._cores, self._threads, self._speed = cores, 0.0, 1.0
        self._done, self._seen = 0.0, loop.time()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._firing = False

    def now(self) -> float:
        """Return the current work time: the seconds of computation that a thread could have done so far."""
        return self._done + (self._loop.time() - self._seen) * self._speed

    def at(self, when: float, call: Callable[[float], None]) -> None:
        """Schedule ``call(when)`` for work time ``when``."""
        self._number += 1
        heapq.heappush(self._events, (when, self._number, call))
        if not self._firing and self._events[0][0] == when:
            self._arm()

    def compute(self, threads: float) -> None:
        """Add threads that compute from now on. A negative number removes threads."""
        if self._cores == math.inf:
            return
        self._done, self._seen = self.now(), self._loop.time()
        self._threads += threads
        self._speed = self._speed_of(self._threads)
        if not self._firing:
            self._arm()

    def _speed_of(self, threads: float) -> float:
        if threads <= 0:
            return 1.0
        others = max(0.0, min(threads, self._cores) - 1) / max(1.0, self._cores - 1)
        return min(1.0, self._cores / threads) / (1 + self._slowdown * others)

    async def work(self, seconds: float, threads: float) -> None:
        """Keep ``threads`` threads computing until each has done ``seconds`` of work.

        This takes proportionally more virtual time while more threads compute than there are cores.
        """
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
        while True:
            due, now = events[0][0], loop.time()
            # Because of rounding, `now` may be just before the event that time was advanced to.
            self._done, self._seen = max(self._done + (now - self._seen) * self._speed, due), now
            while events and events[0][0] <= self._done:
                when, _, call = heapq.heappop(events)
                call(when)
            if not events:
                break
            seconds = max(0.0, events[0][0] - self._done) / self._speed
            if now + seconds >= loop.idle_until():
                break
            loop.advance(seconds)
        self._firing = False
        self._arm()


class Request:
    """A simulated generation request."""

    __slots__ = ("context", "end", "ended", "lease", "over", "prefill", "prompt", "since", "spans", "tokens")

    def __init__(self, tokens: float, context: float, prefill: float, prompt: int) -> None:
        self.tokens = tokens
        """Number of tokens still to generate."""
        self.context = context
        """Number of cached tokens once the request runs."""
        self.prefill = prefill
        """Number of those tokens that prefill has to compute."""
        self.prompt = prompt
        """Id of the prompt. Prefill is skipped if the replica runs another request with the same id."""
        self.ended: Callable[[Request], None] = lambda request: None
        """Function to call when the request has ended."""
        self.spans: list[tuple[int, float]] = []
        """(Version, number of tokens) of the sampled tokens, in order."""
        self.lease: Lease | None = None
        self.since = 0.0
        """Decoding step of the replica from which on sampled tokens are not yet in `spans`."""
        self.end = -1.0
        """Decoding step of the replica at which the request ends; -1 while it does not run."""
        self.over = False
        """True once the request has ended or was aborted."""


class Replica:
    """One simulated engine replica."""

    def __init__(self, name: str, costs: EngineCosts, host: Host) -> None:
        self.name, self.version = name, 0
        self.generated = self.recomputed = 0.0
        self.computed: Callable[[float, float], None] = lambda start, end: None
        """Called with the beginning and the end of each time in which it computed."""
        self._busy = self._computes_since = 0.0
        self._costs, self._host, self._loop = costs, host, asyncio.get_running_loop()
        self._steps = self._cached = self._stall = 0.0
        self._seen = host.now()
        self._ends: list[tuple[float, int, Request]] = []
        """Heap of (decoding step, number, request) by the step at which a request ends. Entries of preempted requests
        are removed lazily."""
        self._running: dict[Request, None] = {}
        """Running requests in the order of admission."""
        self._prompts: dict[int, int] = {}
        """Prompt id -> number of running requests with it."""
        self._waiting: deque[Request] = deque()
        self._paused = 0
        self._computes = self._scheduled = False
        self._next: float | None = None
        """Work time of the next event. Scheduled events with another time are outdated."""
        self._number = 0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which it has computed."""
        return self._busy + (self._loop.time() - self._computes_since if self._computes else 0.0)

    def submit(self, request: Request) -> None:
        """Queue a request for admission."""
        self._waiting.append(request)
        self._soon()

    def abort(self, request: Request) -> None:
        """Remove a request."""
        self.advance()
        request.over = True
        if request.end >= 0:
            self._leave(request)
        self._soon()

    def pause(self) -> None:
        """Stop decoding until `resume`. Calls nest."""
        self.advance()
        self._paused += 1
        self._note_computing()

    def resume(self, *, caches_lost: bool = False) -> None:
        """Undo one `pause`. ``caches_lost``: first recompute the KV caches of running requests."""
        self.advance()
        self._paused -= 1
        if caches_lost:
            self._stall += self._costs.prefill_token * self._cached
            self.recomputed += self._cached
        self._soon()

    def set_version(self, version: int) -> None:
        """Sample further tokens with weights of this version."""
        self.advance()
        for request in self._running:
            self._close_span(request)
        self.version = version

    def advance(self) -> None:
        """Advance the replica to the current simulated time: credit the tokens generated since the last call."""
        now = self._host.now()
        seconds, self._seen = now - self._seen, now
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
        """Return the seconds of the next decoding step, and the increase from each step to the next."""
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
        """End, preempt and admit requests that are due, and schedule the next event."""
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
        waiting, running, prompts = self._waiting, self._running, self._prompts
        room = WATERMARK * self._costs.cache_tokens
        while waiting and len(running) < self._costs.max_running:
            request = waiting[0]
            if request.over:
                waiting.popleft()
                continue
            if running and self._cached + request.context > room:
                return
            waiting.popleft()
            same = prompts.get(request.prompt, 0)
            if not same:
                self._stall += self._costs.prefill_token * request.prefill
            prompts[request.prompt] = same + 1
            self._cached += request.context
            request.since = self._steps
            request.end = self._steps + request.tokens
            running[request] = None
            self._number += 1
            heapq.heappush(self._ends, (request.end, self._number, request))

    def _leave(self, request: Request) -> None:
        """Remove a request from the running ones, and record its progress."""
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
        request.prefill, request.prompt = request.context, -id(request)  # no other request has the same cache
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
            if computes:
                self._computes_since = self._loop.time()
            else:
                self._busy += self._loop.time() - self._computes_since
                self.computed(self._computes_since, self._loop.time())
            self._host.compute(self._costs.threads if computes else -self._costs.threads)


class Engines:
    """Simulated replicas behind the real router: the counterpart of `roll.engines.pool.InferencePool`."""

    def __init__(self, config: PipelineConfig, costs: Costs, host: Host) -> None:
        names = [f"actor_infer/{index}" for index in range(derived.engine_replicas(config))]
        own = [costs.slowest_engine, *[costs.engine] * (len(names) - 1)]
        self.replicas = {name: Replica(name, each, host) for name, each in zip(names, own, strict=True)}
        self.buffers = WeightBuffers(derived.weight_buffers(config))
        self.wasted = 0.0
        """Number of tokens generated for requests that were aborted."""
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
        """Run requests to their end. Requests with the same ``sticky_key`` go to the same replica. ``min_version``:
        oldest weights that may serve them; ``pinned`` is ignored."""
        left, all_ended = len(requests), self._loop.create_future()

        def ended(request: Request) -> None:
            nonlocal left
            assert request.lease is not None
            self._router.release(request.lease)
            left -= 1
            if not left and not all_ended.done():
                all_ended.set_result(None)

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
        """Drop the routing entry of a sticky key."""
        self._router.forget(sticky_key)

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.lease is not None and not request.over:
                self.replicas[request.lease.replica_id].abort(request)
                self._router.release(request.lease)
            self.wasted += sum(tokens for _, tokens in request.spans)

    async def publish(self, version: int) -> None:
        """Load a sent version into every replica, at most `max_unavailable` of them at a time."""
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
                # With a single buffer, each engine copies the weights out of it.
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
        """Pause all replicas and offload them from shared devices."""
        for replica in self.replicas.values():
            replica.pause()
        await asyncio.sleep(self._costs.exchange["actor_infer"])

    async def load_states(self) -> None:
        """Load all replicas onto shared devices again, with empty KV caches, and resume."""
        await asyncio.sleep(self._costs.exchange["actor_infer"])
        for replica in self.replicas.values():
            replica.resume(caches_lost=True)
