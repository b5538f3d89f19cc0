"""The requests of an engine that computes in its own processes: waiting outside, admitted, and their tokens.

Admission is first come, first served while slots are free, and nothing enters while the gate is shut. The engine does
not know the requests that wait here, so a weight update never waits for them. Every such engine meets the same cases:
an abort that arrives before the request is inside, a request that must leave and enter again before all others, a drain
that is interrupted. They are handled here once; the content of the messages is left to the engine's own module.

The engine reports which weights produced which tokens only when the request ends; until then each token carries a
version that is never too new. Stop strings are matched here, token by token and across the seam of a continued
response, without decoding the whole text again. A tokenizer decodes a token differently at the start of a text than
inside it, and a character may be spread over several tokens, so a few earlier tokens are decoded along with the new
ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from roll.data.records import derive_seed
from roll.engines.base import Completion, EngineFailed, FinishReason, GenerateRequest, SamplingParams, TokenChunk
from roll.weights.buckets import WeightMismatch


class AdmissionGate:
    """A limited number of slots (``places``) for requests, behind a gate that can be shut."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._open = True
        self._waiting: deque[tuple[str, asyncio.Future[bool]]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait to enter."""
        return len(self._waiting)

    async def enter(self, request_id: str, *, first: bool = False) -> bool:
        """Wait for a slot. Return True with a slot, False if the request was turned away.

        Release the slot with `leave`. ``first`` puts the request before all others; it is for a request that had a slot
        before.
        """
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

    def turn_away(self, request_ids: set[str]) -> None:
        """Stop these requests from waiting; their `enter` returns False."""
        for entry in [entry for entry in self._waiting if entry[0] in request_ids]:
            self._waiting.remove(entry)
            if not entry[1].done():
                entry[1].set_result(False)

    def turn_all_away(self) -> None:
        """Stop all requests from waiting."""
        self.turn_away({request_id for request_id, _ in self._waiting})

    def shut(self) -> None:
        """Admit no request until `open`."""
        self._open = False

    def open(self) -> None:
        """Admit waiting requests, as many as there are free slots."""
        self._open = True
        self._admit()

    def _admit(self) -> None:
        while self._open and self._free and self._waiting:
            _, place = self._waiting.popleft()
            if place.cancelled():
                continue
            self._free -= 1
            place.set_result(True)


class Inside(Protocol):
    """A request that has a slot in the engine."""

    @property
    def response(self) -> Response:
        """The request's tokens so far."""


Place = TypeVar("Place", bound=Inside)


class AdmittedRequests(Generic[Place]):
    """Requests, from when they become known until they have ended."""

    def __init__(self, places: int, on_change: Callable[[], None]) -> None:
        """``on_change`` is called when a request has entered or left."""
        self.gate = AdmissionGate(places)
        self.inside: dict[str, Place] = {}
        """Requests inside the engine, in order of entry."""
        self._known: set[str] = set()
        self._aborted: set[str] = set()
        """Requests aborted after admission, before they were inside."""
        self._on_change = on_change

    def responses_inside(self) -> list[Response]:
        """Return the responses of the requests inside the engine."""
        return [place.response for place in self.inside.values()]

    def counts(self) -> dict[str, Any]:
        """Return `running` and `waiting`, the counts for the engine's stats."""
        return {"running": len(self.inside), "waiting": self.gate.waiting}

    def require_new(self, name: str) -> None:
        """Raise ``ValueError`` if a request of this name exists already."""
        if name in self._known:
            raise ValueError(f"request {name!r} cannot run: another one with this id is running")

    async def run(
        self, name: str, enter: Callable[[], Place], updates_of: Callable[[Place], AsyncGenerator[Response, None]]
    ) -> AsyncGenerator[Response, None]:
        """Yield the request's state after each message from the engine; nothing if it was aborted before it began.

        ``enter`` takes the request's slot. ``updates_of`` runs it until it ends or has to begin again.
        """
        self._known.add(name)
        had_a_place = False
        try:
            while await self.gate.enter(name, first=had_a_place):
                place = enter()
                try:
                    if name in self._aborted:
                        return
                    self.inside[name] = place
                    self._on_change()
                    async with aclosing(updates_of(place)) as updates:
                        async for update in updates:
                            yield update
                finally:
                    self.inside.pop(name, None)
                    self.gate.leave()
                    self._on_change()
                if place.response.aborted or not place.response.begins_again:
                    return
                had_a_place = True
        finally:
            self._known.discard(name)
            self._aborted.discard(name)

    def abort(self, names: Sequence[str]) -> list[Place]:
        """Turn away those of these requests that still wait. Return those that are inside, which the engine has to
        end."""
        self.gate.turn_away(set(names))
        self._aborted |= {name for name in names if name in self._known and name not in self.inside}
        return [self.inside[name] for name in names if name in self.inside]

    def require_none(self, what: str, *, paused: bool) -> None:
        """Raise ``RuntimeError`` if requests are being computed."""
        if not paused and self.inside:
            raise RuntimeError(f"{what} needs a paused or idle engine; {len(self.inside)} requests are running")


class Drains:
    """Pending drains; `interrupt` ends them early."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self, begin: Callable[[Callable[[Exception | None], None]], None] | None = None) -> None:
        """Wait until the drain has ended; raise its error if it failed.

        ``begin`` starts the drain if the engine itself does the waiting. It is given the function to call when the
        drain ends.
        """
        drain: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(drain)
        if begin is not None:
            begin(lambda error: _end(drain, error))
        try:
            await drain
        finally:
            self._waiting.remove(drain)

    def end(self, error: Exception | None) -> None:
        """End all drains: with success if ``error`` is None."""
        for drain in self._waiting:
            _end(drain, error)

    def interrupt(self, by: str) -> None:
        """End all drains with an error that says they were interrupted."""
        self.end(RuntimeError(f"the drain was interrupted by {by}"))


def _end(drain: asyncio.Future[None], error: Exception | None) -> None:
    """Resolve the drain, unless it is resolved already."""
    if drain.done():
        return
    if error is None:
        drain.set_result(None)
    else:
        drain.set_exception(error)


Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Hugging Face name of each tensor -> (dtype name, shape)."""

_INSPECTED_BYTES = 64 * 1024**2
"""Most bytes of weights that are read back from the engine after an update."""


def check_layout(entries: list[tuple[str, str, tuple[int, ...]]], shapes: dict[str, tuple[int, ...]]) -> Layout:
    """Check a weight update against the model's ``shapes`` and return its layout.

    Raises ``WeightMismatch`` naming a tensor that does not fit or is missing.
    """
    layout: Layout = {}
    for name, dtype, shape in entries:
        if name not in shapes:
            raise WeightMismatch(f"tensor {name!r} is not in the engine's model")
        if name in layout:
            raise WeightMismatch(f"tensor {name!r} came twice")
        if not _is_float(dtype):
            raise WeightMismatch(f"tensor {name!r} has dtype {dtype}, the engine's is a floating-point one")
        if tuple(shape) != shapes[name]:
            raise WeightMismatch(f"tensor {name!r} has shape {tuple(shape)}, the engine's has {shapes[name]}")
        layout[name] = (dtype, tuple(shape))
    missing = [name for name in shapes if name not in layout]
    if missing:
        raise WeightMismatch(f"tensor {missing[0]!r} is missing from the publication ({len(missing)} missing in all)")
    return layout


def _is_float(dtype_name: str) -> bool:
    return dtype_name.startswith(("float", "bfloat"))


def sample_of(tensors: Mapping[str, torch.Tensor], version: int) -> list[str]:
    """Return names of some tensors to read back, together at most `_INSPECTED_BYTES` (or one tensor). They differ from
    version to version."""
    sample: list[str] = []
    size = 0
    for name in sorted(tensors, key=lambda name: derive_seed(version, name)):
        size += tensors[name].nbytes
        if sample and size > _INSPECTED_BYTES:
            break
        sample.append(name)
    return sample


@dataclass(frozen=True)
class VersionSpan:
    """Tokens ``start`` to ``end`` (exclusive) of a response, produced by one version."""

    version: int
    start: int
    end: int


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
        the tokens.
        """
        self.token_ids += token_ids
        self.logprobs += logprobs
        oldest = version if self._last_version is None else self._last_version
        self.versions += [oldest] * len(token_ids)
        self._last_version = version
        if spans:
            self.versions = versions_of(spans, len(self.token_ids))
        if finish_reason is not None:
            self.finish_reason = finish_reason
        return self._stop_at_string(len(token_ids))

    def chunk(self, known: int, finish_reason: FinishReason | None = None) -> TokenChunk:
        """Return the tokens beyond the first ``known``."""
        return TokenChunk(*self._arrays(known), finish_reason=finish_reason)

    def completion(self) -> Completion:
        """Return the whole response."""
        return Completion(self.request.request_id, *self._arrays(0), finish_reason=self.finish_reason or "abort")

    def _arrays(self, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logprobs = np.array(self.logprobs[start:], dtype=np.float32)
        return (
            np.array(self.token_ids[start:], dtype=np.int32),
            np.zeros_like(logprobs) if is_greedy(self.request.sampling) else logprobs,
            np.array(self.versions[start:], dtype=np.int32),
        )

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


def is_greedy(sampling: SamplingParams) -> bool:
    """Return True if the sampling distribution is a point."""
    return sampling.temperature == 0 or sampling.top_k == 1


def versions_of(spans: Sequence[VersionSpan], count: int) -> list[int]:
    """Return the version of each of ``count`` tokens. Raises `EngineFailed` if the spans do not cover them."""
    versions = [span.version for span in spans for _ in range(span.start, span.end)]
    if len(versions) != count:
        raise EngineFailed(f"the engine tells the weight versions of {len(versions)} tokens out of {count}")
    return versions


async def completion_of(responses: AsyncGenerator[Response, None], request: GenerateRequest) -> Completion:
    """Consume a request's successive states and return its completion; an empty one if the request never began."""
    last: Response | None = None
    async with aclosing(responses):
        async for response in responses:
            last = response
    return nothing(request) if last is None else last.completion()


async def chunks_of(
    responses: AsyncGenerator[Response, None], request: GenerateRequest
) -> AsyncGenerator[TokenChunk, None]:
    """Yield a request's tokens a few at a time; the last chunk carries the finish reason.

    Leaving the iteration early closes ``responses``.
    """
    known = 0
    async with aclosing(responses):
        async for response in responses:
            ended = response.finish_reason
            if ended is not None or len(response.token_ids) > known:
                yield response.chunk(known, ended)
            known = len(response.token_ids)
            if ended is not None:
                return
    empty = nothing(request)
    yield TokenChunk(empty.token_ids, empty.logprobs, empty.versions, "abort")


def new_tokens(running: Iterable[Response], known: Mapping[str, int]) -> dict[str, TokenChunk]:
    """Return the tokens of each request beyond the first ``known[id]``; requests without new tokens are left out."""
    chunks = {}
    for response in running:
        name = response.request.request_id
        first = known.get(name, 0)
        if len(response.token_ids) > first:
            chunks[name] = response.chunk(first, response.finish_reason)
    return chunks


def nothing(request: GenerateRequest) -> Completion:
    """Return the empty completion of a request that was aborted before it began."""
    empty = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int32))
    return Completion(request.request_id, *empty, finish_reason="abort")


_UNFINISHED = "\ufffd"


class Decoder(Protocol):
    """The part of a tokenizer that matching needs."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the tokens."""


class StopStringMatcher:
    """Watches one response for its stop strings."""

    def __init__(self, decoder: Decoder, stop_strings: Iterable[str]) -> None:
        self._decoder = decoder
        self._stop_strings = tuple(stop_strings)
        self._tail_length = max(len(text) for text in self._stop_strings) - 1
        self._token_ids: list[int] = []
        self._context_start = 0
        self._settled = 0
        self._tail = ""

    def push(self, token_ids: Iterable[int]) -> bool:
        """Add tokens. Return True if the text now contains a stop string that it did not contain before."""
        self._token_ids.extend(token_ids)
        context = self._decoder.decode(self._token_ids[self._context_start : self._settled])
        text = self._decoder.decode(self._token_ids[self._context_start :])
        recent = self._tail + text[len(context) :]
        matched = any(stop in recent for stop in self._stop_strings)
        if not text.endswith(_UNFINISHED):
            self._context_start, self._settled = self._settled, len(self._token_ids)
            self._tail = recent[max(len(recent) - self._tail_length, 0) :]
        return matched


class StopStrings:
    """Makes the matchers of an engine's requests. The tokenizer is loaded for the first request that needs it."""

    def __init__(self, load_tokenizer: Callable[[], Decoder]) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Decoder | None = None

    def matcher(self, request: GenerateRequest) -> StopStringMatcher | None:
        """Return a matcher that has seen the tokens of earlier attempts; None if no stop string may end the response.

        Raises ``ValueError`` if the model has no tokenizer.
        """
        if not request.sampling.watches_text:
            return None
        if self._tokenizer is None:
            try:
                self._tokenizer = self._load_tokenizer()
            except OSError as error:
                raise ValueError(
                    f"request {request.request_id!r} has stop strings, but the model's tokenizer cannot be loaded: "
                    f"{error}"
                ) from error
        matcher = StopStringMatcher(self._tokenizer, request.sampling.stop_strings)
        if request.first_token_index:
            matcher.push(request.prompt_token_ids[-request.first_token_index :].tolist())
        return matcher
