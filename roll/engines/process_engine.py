"""Base class of engines whose library computes in its own processes: the common part of `vllm` and `sglang`.

`ProcessEngine` keeps the engine's state; its subclasses call the library. A weight update is checked for completeness
and shapes before the engine is paused.

Requests wait outside the library for a free slot, first come, first served. None enters while the gate is shut, so a
weight update never waits for requests that have not begun. This module also handles an abort of a request that is not
inside yet, requests that must restart with priority, and interrupted drains.

The library reports which weights produced which tokens only when a request ends. Until then, a token's version may be
too old, but never too new. Stop strings are matched here, token by token, because the libraries get token ids only.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import numpy as np
import torch

from roll.algorithms.routing import RoutingShape
from roll.engines.base import (
    BusyClock,
    Completion,
    EngineFailed,
    EngineLoad,
    FinishReason,
    GenerateRequest,
    InferStrategy,
    Layout,
    PauseMode,
    PreparedWeights,
    SamplingParams,
    StopStringMatcher,
    TokenChunk,
    checked,
    model_facts,
    no_tokens,
)
from roll.weights.adapters import adapted_layers, adapter_shapes, file_checksums
from roll.weights.buckets import HeldWeights, WeightBucket, WeightMismatch, manifest

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class AdmissionGate:
    """A first-come, first-served semaphore for requests that can be closed."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._open = True
        self._waiting: deque[tuple[str, asyncio.Future[bool]]] = deque()

    @property
    def waiting(self) -> int:
        """Number of requests that wait to enter."""
        return len(self._waiting)

    async def enter(self, request_id: str, *, first: bool = False) -> bool:
        """Wait for a slot; release it with `leave`. Return False if the request was turned away.

        ``first``: queue it before all others, because it had a slot before."""
        entry = (request_id, asyncio.get_running_loop().create_future())
        if first:
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)
        self._admit()
        try:
            return await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not entry[1].cancelled() and entry[1].result():
                self.leave()
            raise

    def leave(self) -> None:
        """Release a slot."""
        self._free += 1
        self._admit()

    def turn_away(self, request_ids: Collection[str]) -> None:
        """Remove these requests from the queue; their `enter` returns False."""
        for entry in [entry for entry in self._waiting if entry[0] in request_ids]:
            self._waiting.remove(entry)
            if not entry[1].done():
                entry[1].set_result(False)

    def shut(self) -> None:
        """Admit no request until `open`."""
        self._open = False

    def open(self) -> None:
        """Admit waiting requests again, up to the number of free slots."""
        self._open = True
        self._admit()

    def _admit(self) -> None:
        while self._open and self._free and self._waiting:
            _, admitted = self._waiting.popleft()
            if admitted.cancelled():
                continue
            self._free -= 1
            admitted.set_result(True)


class EngineRequests:
    """All requests of one engine: those that wait for a slot, and those inside its library (vLLM or SGLang)."""

    def __init__(self, slots: int, on_change: Callable[[], None]) -> None:
        """``slots``: maximum number of requests inside the library. ``on_change`` is called when a request enters or
        leaves it."""
        self.gate = AdmissionGate(slots)
        self.inside: dict[str, Response] = {}
        """Requests inside the library by id, in order of entry."""
        self._known: dict[str, Response] = {}
        self._drains: list[asyncio.Future[None]] = []
        self._numbers = itertools.count()
        self._on_change = on_change

    def engine_id(self) -> str:
        """Return a new request id for the library. No id is a prefix of another, because SGLang aborts by prefix."""
        return f"roll-{next(self._numbers):016d}"

    async def run(
        self,
        request: GenerateRequest,
        matcher: StopStringMatcher | None,
        updates_of: Callable[[Response], AsyncGenerator[Response, None]],
    ) -> AsyncGenerator[Response, None]:
        """Run a request. Yield its response after each message from the library; nothing if it was aborted before it
        began.

        ``updates_of`` runs the request in the library until it ends or has to restart. Raises ``ValueError`` if a
        request with this id exists already.
        """
        name = request.request_id
        if name in self._known:
            raise ValueError(f"request {name!r} cannot run: another one with this id is running")
        had_a_slot = False
        try:
            while True:
                response = self._known[name] = Response(request, self.engine_id(), matcher)
                if not await self.gate.enter(name, first=had_a_slot):
                    return
                try:
                    if not response.aborted:
                        self.inside[name] = response
                        self._on_change()
                        async with aclosing(updates_of(response)) as updates:
                            async for update in updates:
                                yield update
                finally:
                    self._leave(name)
                if response.aborted or not response.begins_again:
                    return
                had_a_slot = True
        finally:
            del self._known[name]

    def _leave(self, name: str) -> None:
        self.inside.pop(name, None)
        self.gate.leave()
        self._on_change()
        if not self.inside:
            for drain in self._drains:
                if not drain.done():
                    drain.set_result(None)

    def abort(self, names: Iterable[str] | None = None) -> list[Response]:
        """Abort these requests (None: all). Turn away waiting ones, mark all as aborted, and return those inside."""
        names = self._known.keys() if names is None else self._known.keys() & set(names)
        self.gate.turn_away(names)
        for name in names:
            self._known[name].aborted = True
            self._known[name].wake()
        return [response for name, response in self.inside.items() if name in names]

    def begin_again(self) -> list[Response]:
        """Mark the requests inside that have no token yet to restart, and return them. They enter again with priority
        when the gate opens."""
        waiting = [response for response in self.inside.values() if not response.token_ids]
        for response in waiting:
            response.begins_again = True
            response.wake()
        return waiting

    async def drained(self) -> None:
        """Wait until no request is inside. Raises ``RuntimeError`` if `interrupt_drains` is called meanwhile."""
        if not self.inside:
            return
        drain: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drains.append(drain)
        try:
            await drain
        finally:
            self._drains.remove(drain)

    def interrupt_drains(self, by: str) -> None:
        """Make pending `drained` calls fail with an error that names ``by`` as the cause."""
        for drain in self._drains:
            if not drain.done():
                drain.set_exception(RuntimeError(f"the drain was interrupted by {by}"))


VersionSpan = tuple[int, int, int]
"""(Weight version, first token, end token (exclusive)) of a part of a response."""


@dataclass
class Response:
    """The state of a request: its tokens so far."""

    request: GenerateRequest
    engine_id: str
    """Id of the request inside the library."""
    matcher: StopStringMatcher | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    routed_experts: np.ndarray | None = None
    """Experts of all tokens but the last, as the library told them at the end."""
    aborted: bool = False
    """True if an abort was requested."""
    begins_again: bool = False
    """True if the request must restart in the library: it had no token when weights were replaced, and its cached
    prompt is outdated."""
    wake: Callable[[], None] = lambda: None
    """Callback after `aborted` or `begins_again` was set."""
    _last_version: int | None = None
    """The engine's version at the last message."""

    @property
    def withdrawn(self) -> bool:
        """True if the library must not run the request any longer."""
        return self.aborted or self.begins_again

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        spans: Sequence[VersionSpan] = (),
        finish_reason: FinishReason | None = None,
    ) -> bool:
        """Add new tokens from an engine with weights of ``version``. Return True if a stop string ended the request
        while the library was still generating.

        Libraries delay some tokens, so the first message after a weight update may contain tokens of the previous
        version. All tokens of that message get the previous version, until the request ends and the library reports
        the exact ``spans`` of the whole response. Raises `EngineFailed` if the spans do not match the number of tokens,
        or if a token has no log-probability.
        """
        if len(logprobs) != len(token_ids):
            raise EngineFailed(f"the engine gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
        if is_greedy(self.request.sampling):
            logprobs = [0.0] * len(token_ids)  # certain, whatever the engine says
        require_numbers(logprobs)
        self.token_ids += token_ids
        self.logprobs += logprobs
        oldest = version if self._last_version is None else self._last_version
        self.versions += [oldest] * len(token_ids)
        self._last_version = version
        if spans:
            self.versions = [version for version, start, end in spans for _ in range(start, end)]
            if len(self.versions) != len(self.token_ids):
                known, count = len(self.versions), len(self.token_ids)
                raise EngineFailed(f"the engine tells the weight versions of {known} tokens out of {count}")
        if finish_reason is not None:
            self.finish_reason = finish_reason
        return self._stop_at_string(len(token_ids))

    def chunk(self, known: int, finish_reason: FinishReason | None = None) -> TokenChunk:
        """Return the tokens after the first ``known`` ones."""
        return TokenChunk(
            np.array(self.token_ids[known:], dtype=np.int32),
            np.array(self.logprobs[known:], dtype=np.float32),
            np.array(self.versions[known:], dtype=np.int32),
            finish_reason,
        )

    def completion(self) -> Completion:
        """Return the response as a completion; ``abort`` if it has no finish reason.

        Raises `EngineFailed` if experts were requested, and the library did not tell those of all tokens."""
        whole = self.chunk(0).completion(self.request.request_id, self.finish_reason or "abort")
        if self.request.with_routing and whole.finish_reason != "abort":
            told = 0 if self.routed_experts is None else len(self.routed_experts)
            expected = len(self.request.prompt_token_ids) + len(self.token_ids) - 1
            if told != expected:
                raise EngineFailed(f"the engine tells the experts of {told} tokens out of {expected}")
            whole.routed_experts = self.routed_experts
        return whole

    def _stop_at_string(self, new: int) -> bool:
        if self.matcher is None or not new:
            return False
        for end in range(len(self.token_ids) - new + 1, len(self.token_ids) + 1):
            if self.matcher.push([self.token_ids[end - 1]]):
                going_on = self.finish_reason is None
                del self.token_ids[end:], self.logprobs[end:], self.versions[end:]
                self.finish_reason = "stop"
                return going_on
        return False


def require_numbers(logprobs: Iterable[float | None]) -> None:
    """Raise ``EngineFailed`` if a log-probability is NaN, or None (NaN in JSON)."""
    if any(logprob is None or math.isnan(logprob) for logprob in logprobs):
        raise EngineFailed("the engine's logits are NaN: there is no distribution to sample from")


def is_greedy(sampling: SamplingParams) -> bool:
    """Return True if sampling is deterministic (temperature 0 or top-k 1)."""
    return sampling.temperature == 0 or sampling.top_k == 1


Engine = TypeVar("Engine")
"""Type of the library's engine object."""


class ProcessEngine(InferStrategy, Generic[Engine]):
    """One engine replica whose library computes in its own processes.

    Subclasses implement the abstract methods, from `_launch` on."""

    _engine: Engine | None = None
    _paused = _asleep = _without_weights = False
    _version = _generated_tokens = 0
    _routing: RoutingShape | None = None
    """Sizes of the records of experts; None: they are not recorded."""
    _known_load: Collection[str] = ()
    """Fields of the load that the library tells."""
    _loads = 0
    """Number of weight updates so far, used as cache salt. The version would not do: after a restart of the trainer,
    the same version may have other weights."""

    async def start(self) -> None:
        if self._engine is not None:
            raise RuntimeError("this engine was started before")
        config, self._names, self._layers = model_facts(self._spec)
        self._shapes, self._buffers = self._names.shapes, self._names.uncast
        self._read_facts(config)
        self._routing = RoutingShape.of(config) if self._records_routing else None
        self._clock, self._load_totals = BusyClock(), EngineLoad()
        self._scoring = asyncio.Lock()
        self._engine, slots = await self._launch(config)
        # One slot is reserved for scoring, which follows a weight update and must not wait for requests.
        self._requests = EngineRequests(slots - 1, self._tick)

    async def generate(self, request: GenerateRequest) -> Completion:
        last: Response | None = None
        async with aclosing(self._responses(request)) as responses:
            async for response in responses:
                last = response
        return no_tokens().completion(request.request_id, "abort") if last is None else last.completion()

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        known = 0
        async with aclosing(self._responses(request)) as responses:
            async for response in responses:
                ended = response.finish_reason
                if ended is not None or len(response.token_ids) > known:
                    yield response.chunk(known, ended)
                known = len(response.token_ids)
                if ended is not None:
                    return
        yield no_tokens()

    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        await self._sign_of_life()
        return {
            name: response.chunk(known.get(name, 0), response.finish_reason)
            for name, response in self._requests.inside.items()
            if len(response.token_ids) > known.get(name, 0)
        }

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._live_engine()
        await self._withdraw(self._requests.abort(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; see `InferStrategy.pause`. Cached prefixes are not reused across weight updates, because a
        request's cache salt is that of the weights with which it began."""
        self._live_engine()
        if mode not in get_args(PauseMode):
            raise ValueError(f"pause mode {mode!r} is unknown; one of {', '.join(get_args(PauseMode))}")
        self._requests.gate.shut()
        if mode == "drain":
            if self._paused and self._requests.inside:
                await self._continue()  # frozen requests would never finish
                self._paused = False
            await self._requests.drained()
        else:
            self._requests.interrupt_drains(f"pause({mode!r})")
        await self._halt(mode)
        self._paused = True
        self._tick()

    async def resume(self) -> None:
        self._live_engine()
        if self._asleep:
            raise RuntimeError("the engine sleeps; wake it before resume")
        if self._without_weights:
            raise RuntimeError("the engine has discarded its weights; load some before resume")
        self._requests.interrupt_drains("resume()")
        await self._continue()
        self._paused = False
        self._tick()
        self._requests.gate.open()

    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> HeldWeights:
        self._prepared = None
        self._prepared = await asyncio.to_thread(lambda: self._prepare(list(buckets), version))
        return self._prepared.held

    def _prepare(self, buckets: list[WeightBucket], version: int) -> PreparedWeights:
        shapes = self._shapes if self._adapter_rank is None else self._shapes_of_adapter(buckets, self._adapter_rank)
        entries = checked((entry for bucket in buckets for entry in bucket.tensors), shapes)
        layout = {name: (dtype, tuple(shape)) for name, dtype, shape, _ in entries}
        return PreparedWeights(HeldWeights(version, *manifest(buckets)), self._stage(buckets), layout)

    def _shapes_of_adapter(self, buckets: list[WeightBucket], rank: int) -> Mapping[str, Sequence[int]]:
        adapted = adapted_layers((name for bucket in buckets for name, *_ in bucket.tensors), self._layers)
        return adapter_shapes(adapted, self._layers, rank)

    async def base_checksums(self) -> Mapping[str, int]:
        """See `InferStrategy.base_checksums`. The checksums are computed from the files that the library has loaded."""
        dtype = getattr(torch, self._spec.dtype)
        return await asyncio.to_thread(file_checksums, self._spec.model_path, self._names, dtype)

    async def load_weights(self, version: int) -> HeldWeights:
        """See `InferStrategy.load_weights`. Checksums are those of the loaded bytes; a sample of tensors, different for
        each version, is read back from the engine as far as possible. Raises ``WeightMismatch`` if the update did not
        reach the engine's weights. If loading fails, the engine stays paused."""
        self._live_engine()
        prepared = self._prepared_for(version)
        self._prepared = None
        self._require_still("load_weights")
        was_open = not self._paused
        if was_open:
            await self.pause("resume")
        await self._begin_again()
        try:
            await self._load(prepared)
        except (EngineFailed, WeightMismatch):
            raise
        except Exception as error:
            raise EngineFailed(f"weights of version {version} were only partly loaded: {error!r}") from error
        self._without_weights = False
        self._version = version
        self._loads += 1
        held_weights = await self._inspected(prepared.held, prepared.layout)
        if was_open:
            await self.resume()
        return held_weights

    async def _begin_again(self) -> None:
        """Remove requests without a token from the library, because their cached prompts are outdated."""
        await self._withdraw(self._requests.begin_again())

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._live_engine()
        async with self._scoring:
            return [await self._score(tokens) for tokens in token_ids]

    async def sleep(self, discard: bool = False) -> bool:
        """See `InferStrategy.sleep`. An engine that does not share its devices only frees the KV cache."""
        self._live_engine()
        self._require_still("sleep")
        if not self._asleep:
            self._requests.gate.shut()
            self._without_weights = await self._offload(discard)
            self._paused |= self._without_weights
            self._asleep = True
            self._tick()
        return self._without_weights

    async def wake(self) -> None:
        self._live_engine()
        if not self._asleep:
            return
        await self._reload()
        if not self._paused:
            await self._continue()
            self._requests.gate.open()
        self._asleep = False
        self._tick()

    def stats(self) -> dict[str, Any]:
        """See `InferStrategy.stats`. Libraries do not report their computing time, so the engine counts as busy while
        it has requests inside and is not paused."""
        self._live_engine()
        self._tick()
        return {
            "running": len(self._requests.inside),
            "waiting": self._requests.gate.waiting,
            "version": self._version,
            "generated_tokens": self._generated_tokens,
            "load": {name: total for name, total in vars(self._load_totals).items() if name in self._known_load},
            **self._clock.stats(),
        }

    async def memory(self) -> Mapping[str, float]:
        return {}

    async def shutdown(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._requests.interrupt_drains("shutdown()")
        self._prepared = None
        await self._stop(engine, self._requests.abort())

    def _responses(self, request: GenerateRequest) -> AsyncGenerator[Response, None]:
        """Yield the response after each message from the library; nothing if it was aborted before it began."""
        self._live_engine()
        self._check_request(request)
        self._check_sampling(request)
        if request.with_routing and request.sampling.watches_text:
            raise ValueError(
                f"request {request.request_id!r} cannot run: stop strings end it outside the engine, which tells the "
                "experts of its tokens only when it ends a request itself"
            )
        matcher = self._matcher_for(request)
        return self._requests.run(request, matcher, self._updates)

    def _require_still(self, what: str) -> None:
        if not self._paused and self._requests.inside:
            raise RuntimeError(
                f"{what} needs a paused or idle engine; {len(self._requests.inside)} requests are running"
            )

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise EngineFailed("the engine is not running: it was not started, or it was shut down")
        return self._engine

    def _tick(self) -> None:
        self._clock.set(bool(self._requests.inside) and not self._paused and not self._asleep)

    @abstractmethod
    async def _launch(self, config: PretrainedConfig) -> tuple[Engine, int]:
        """Start the library. Return its engine object, and the maximum number of requests that it runs at once."""

    @abstractmethod
    def _check_sampling(self, request: GenerateRequest) -> None:
        """Raise ``ValueError`` for sampling parameters that the library would change, or for which it does not report
        the log-probabilities of the sampled distribution."""

    @abstractmethod
    def _updates(self, response: Response) -> AsyncGenerator[Response, None]:
        """Run a request in the library until it ends or has to restart. Yield the response after each message."""

    @abstractmethod
    async def _sign_of_life(self) -> None:
        """Wait for an answer from the library's own process, which answers between two steps."""

    async def _withdraw(self, responses: Sequence[Response]) -> None:
        """Abort these requests in the library. Not needed if `_updates` does so when woken."""

    @abstractmethod
    async def _halt(self, mode: PauseMode) -> None:
        """Stop decoding in this mode, and return when no step is running. In mode ``drain``, no request is inside."""

    @abstractmethod
    async def _continue(self) -> None:
        """Undo `_halt`."""

    @abstractmethod
    def _stage(self, buckets: list[WeightBucket]) -> Any:
        """Put a validated weight update where the library can read it. Return it in the form that `_load` takes. Runs
        in its own thread."""

    @abstractmethod
    async def _load(self, prepared: PreparedWeights) -> None:
        """Load a weight update into the halted library."""

    @abstractmethod
    async def _inspected(self, sent: HeldWeights, layout: Layout) -> HeldWeights:
        """Return the weights that the library holds after an update. Tensors that cannot be read back have the checksum
        in ``sent``."""

    @abstractmethod
    async def _score(self, tokens: np.ndarray) -> np.ndarray:
        """Score one sequence; see `InferStrategy.score`."""

    @abstractmethod
    async def _offload(self, discard: bool) -> bool:
        """Stop decoding and free the KV cache; if other roles share the devices, also move the weights off them.

        Return True if the weights were dropped, which ``discard`` allows. Then `_load` completes the `_reload`."""

    @abstractmethod
    async def _reload(self) -> None:
        """Undo `_offload`, without resuming decoding."""

    @abstractmethod
    async def _stop(self, engine: Engine, running: Sequence[Response]) -> None:
        """End the ``running`` requests, which are marked as aborted, and then the library's processes."""
