"""An engine that computes in processes of its own: what `vllm` and `sglang` share.

`ProcessEngine` keeps the state of such an engine; the adapter of a library makes the calls. A weight update is checked
for being complete and fitting before the engine is paused.

Requests wait outside the library until a slot is free, first come, first served, and nothing enters while the gate is
shut, so no update waits for a request that has not begun. An abort that arrives before the request is inside, a request
that must leave and enter again before all others, a drain that is interrupted: these are handled here once.

The library reports which weights produced which tokens only when the request ends; until then each token carries a
version that is never too new. Stop strings are matched here, token by token, because libraries handle token ids only.
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
    """A limited number of slots for requests, behind a gate that can be shut."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._open = True
        self._waiting: deque[tuple[str, asyncio.Future[bool]]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait to enter."""
        return len(self._waiting)

    async def enter(self, request_id: str, *, first: bool = False) -> bool:
        """Wait for a slot, which `leave` releases. Return False if the request was turned away. ``first`` puts it
        before all others, because it had a slot before."""
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
        """Stop these requests from waiting; their `enter` returns False."""
        for entry in [entry for entry in self._waiting if entry[0] in request_ids]:
            self._waiting.remove(entry)
            if not entry[1].done():
                entry[1].set_result(False)

    def shut(self) -> None:
        """Admit no request until `open`."""
        self._open = False

    def open(self) -> None:
        """Admit waiting requests, as many as there are free slots."""
        self._open = True
        self._admit()

    def _admit(self) -> None:
        while self._open and self._free and self._waiting:
            _, admitted = self._waiting.popleft()
            if admitted.cancelled():
                continue
            self._free -= 1
            admitted.set_result(True)


class AdmittedRequests:
    """Requests, from when they become known until they have ended."""

    def __init__(self, slots: int, on_change: Callable[[], None]) -> None:
        """``on_change`` is called when a request has entered or left."""
        self.gate = AdmissionGate(slots)
        self.inside: dict[str, Response] = {}
        """Requests inside the engine, in order of entry."""
        self._known: dict[str, Response] = {}
        self._drains: list[asyncio.Future[None]] = []
        self._numbers = itertools.count()
        self._on_change = on_change

    def engine_id(self) -> str:
        """Return a name that is no prefix of another: SGLang aborts all requests that begin with a given name."""
        return f"roll-{next(self._numbers):016d}"

    async def run(
        self,
        request: GenerateRequest,
        matcher: StopStringMatcher | None,
        updates_of: Callable[[Response], AsyncGenerator[Response, None]],
    ) -> AsyncGenerator[Response, None]:
        """Yield the request's state after each message from the engine; nothing if it was aborted before it began.

        ``updates_of`` runs the request until it ends or has to begin again. Raises ``ValueError`` if a request of this
        name exists already.
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
        """Abort these requests (None: all): turn away those that wait, mark the others, return those inside."""
        names = self._known.keys() if names is None else self._known.keys() & set(names)
        self.gate.turn_away(names)
        for name in names:
            self._known[name].aborted = True
            self._known[name].wake()
        return [response for name, response in self.inside.items() if name in names]

    def begin_again(self) -> list[Response]:
        """Mark and return the requests without a token. They enter again, before all others, when the gate opens."""
        waiting = [response for response in self.inside.values() if not response.token_ids]
        for response in waiting:
            response.begins_again = True
            response.wake()
        return waiting

    async def drained(self) -> None:
        """Wait until no request is inside. Raises ``RuntimeError`` if `interrupt_drains` ends the wait."""
        if not self.inside:
            return
        drain: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drains.append(drain)
        try:
            await drain
        finally:
            self._drains.remove(drain)

    def interrupt_drains(self, by: str) -> None:
        """End pending drains with an error that says what interrupted them."""
        for drain in self._drains:
            if not drain.done():
                drain.set_exception(RuntimeError(f"the drain was interrupted by {by}"))


VersionSpan = tuple[int, int, int]
"""Weight version, first token and last token (exclusive) of a part of a response."""


@dataclass
class Response:
    """The tokens of a request so far."""

    request: GenerateRequest
    engine_id: str
    """Name of the request inside the engine."""
    matcher: StopStringMatcher | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    aborted: bool = False
    """True once an abort was requested."""
    begins_again: bool = False
    """True if the request must enter the engine again: it had no token when weights were replaced under cached
    prompts."""
    wake: Callable[[], None] = lambda: None
    """Function called after `aborted` or `begins_again` was set."""
    _last_version: int | None = None
    """Version that the engine held at the last message."""

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        spans: Sequence[VersionSpan] = (),
        finish_reason: FinishReason | None = None,
    ) -> bool:
        """Add new tokens from an engine that holds ``version``. Return True if a stop string ends the request before
        the engine does.

        ``spans`` give the versions of the whole response once it has ended. Engines hold a few tokens back, so the
        first message after an update may contain tokens of the version before. All tokens of that message count as
        older until the request ends and the engine reports the spans. Raises `EngineFailed` if the spans do not cover
        the tokens, or if a token has no log-probability.
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
        """Return the tokens beyond the first ``known``."""
        return TokenChunk(
            np.array(self.token_ids[known:], dtype=np.int32),
            np.array(self.logprobs[known:], dtype=np.float32),
            np.array(self.versions[known:], dtype=np.int32),
            finish_reason,
        )

    def completion(self) -> Completion:
        """Return the whole response."""
        return self.chunk(0).completion(self.request.request_id, self.finish_reason or "abort")

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
    """Raise ``EngineFailed`` if a log-probability is NaN, or None: JSON knows no NaN."""
    if any(logprob is None or math.isnan(logprob) for logprob in logprobs):
        raise EngineFailed("the engine's logits are NaN: there is no distribution to sample from")


def is_greedy(sampling: SamplingParams) -> bool:
    """Return True if the sampling distribution is a point."""
    return sampling.temperature == 0 or sampling.top_k == 1


Engine = TypeVar("Engine")
"""Type of the object through which a library is called."""


class ProcessEngine(InferStrategy, Generic[Engine]):
    """One engine replica whose library computes in its own processes. Adapters implement what follows `_launch`."""

    _engine: Engine | None = None
    _paused = _asleep = _without_weights = False
    _version = _generated_tokens = 0
    _known_load: Collection[str] = ()
    """Fields of the load that the library tells."""
    _loads = 0
    """Number of weight updates. It tells caches apart: a version that is trained anew comes with other weights."""

    async def start(self) -> None:
        if self._engine is not None:
            raise RuntimeError("this engine was started before")
        config, self._names, self._layers = model_facts(self._spec)
        self._shapes, self._buffers = self._names.shapes, self._names.uncast
        self._read_facts(config)
        self._clock, self._load_totals = BusyClock(), EngineLoad()
        self._scoring = asyncio.Lock()
        self._engine, slots = await self._launch(config)
        # One slot is kept for scoring: a score follows an update, which must not wait for requests that have not begun.
        self._requests = AdmittedRequests(slots - 1, self._tick)

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
        """Stop decoding; see `InferStrategy.pause`. Later requests do not share what was cached before, because a
        request's cache salt names the version with which it began."""
        self._live_engine()
        if mode not in get_args(PauseMode):
            raise ValueError(f"pause mode {mode!r} is unknown; one of {', '.join(get_args(PauseMode))}")
        self._requests.gate.shut()
        if mode == "drain":
            if self._paused and self._requests.inside:
                await self._continue()  # frozen requests would never end
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
        """See `InferStrategy.base_checksums`. They are those of the files that the library has loaded."""
        dtype = getattr(torch, self._spec.dtype)
        return await asyncio.to_thread(file_checksums, self._spec.model_path, self._names, dtype)

    async def load_weights(self, version: int) -> HeldWeights:
        """See `InferStrategy.load_weights`. The checksums are those of the loaded bytes; for some tensors, which change
        with the version, of what the engine holds, as far as it can read them back. Raises ``WeightMismatch`` if the
        update did not reach the engine's weights. If it fails, the engine stays paused."""
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
        """Take requests without a token out of the library: its caches hold prompts of the old weights."""
        await self._withdraw(self._requests.begin_again())

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._live_engine()
        async with self._scoring:
            return [await self._score(tokens) for tokens in token_ids]

    async def sleep(self, discard: bool = False) -> bool:
        """See `InferStrategy.sleep`. An engine with its own devices only frees the caches."""
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
        """See `InferStrategy.stats`. Libraries do not report how long they computed: the engine counts as busy while a
        request is inside and it is not paused."""
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
        """Return the states of the request after each message; none if it was aborted before it began."""
        self._live_engine()
        self._check_request(request)
        self._check_sampling(request)
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
        """Record whether anything is being computed now."""
        self._clock.set(bool(self._requests.inside) and not self._paused and not self._asleep)

    @abstractmethod
    async def _launch(self, config: PretrainedConfig) -> tuple[Engine, int]:
        """Start the library. Return the object to call it by, and the number of requests that it runs at once."""

    @abstractmethod
    def _check_sampling(self, request: GenerateRequest) -> None:
        """Raise ``ValueError`` for parameters that the library would change, or not report the distribution of."""

    @abstractmethod
    def _updates(self, response: Response) -> AsyncGenerator[Response, None]:
        """Run a request in the library until it ends or has to begin again. Yield it after each message."""

    @abstractmethod
    async def _sign_of_life(self) -> None:
        """Wait for an answer from the library's own process, which it gives between two steps."""

    async def _withdraw(self, responses: Sequence[Response]) -> None:
        """End marked requests in the library. Nothing is to be done if `_updates` does so when it is woken."""

    @abstractmethod
    async def _halt(self, mode: PauseMode) -> None:
        """Stop decoding in this mode: no step runs after this. For a drain, no request is inside any more."""

    @abstractmethod
    async def _continue(self) -> None:
        """Undo `_halt`."""

    @abstractmethod
    def _stage(self, buckets: list[WeightBucket]) -> Any:
        """Put a weight update that fits where the library can read it, and return that. Runs in a thread of its own."""

    @abstractmethod
    async def _load(self, prepared: PreparedWeights) -> None:
        """Let the halted library take a weight update."""

    @abstractmethod
    async def _inspected(self, sent: HeldWeights, layout: Layout) -> HeldWeights:
        """Return what the library holds after an update, with the sent checksum where it cannot be read back."""

    @abstractmethod
    async def _score(self, tokens: np.ndarray) -> np.ndarray:
        """Score one sequence; see `InferStrategy.score`."""

    @abstractmethod
    async def _offload(self, discard: bool) -> bool:
        """Stop decoding and free the caches; free the devices if other roles use them too. Return True if the weights
        were dropped, which ``discard`` allows; `_load` then completes what `_reload` leaves undone."""

    @abstractmethod
    async def _reload(self) -> None:
        """Undo `_offload`, but for decoding."""

    @abstractmethod
    async def _stop(self, engine: Engine, running: Sequence[Response]) -> None:
        """End the library's processes, and before that the requests still ``running``, which are marked as aborted."""
