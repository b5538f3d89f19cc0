"""The requests of an engine that computes in its own processes: waiting outside, admitted, and their tokens.

Admission is first come, first served while slots are free, and nothing enters while the gate is shut. The engine does
not know the requests that wait here, so a weight update never waits for them. Every such engine meets the same cases:
an abort that arrives before the request is inside, a request that must leave and enter again before all others, a drain
that is interrupted. They are handled here once.

The engine reports which weights produced which tokens only when the request ends; until then each token carries a
version that is never too new. Stop strings are matched here, token by token, because the engine handles token ids only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from roll.engines.base import (
    Completion,
    EngineFailed,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StopStringMatcher,
    TokenChunk,
)


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
        self._known: set[str] = set()
        self._aborted: set[str] = set()
        """Requests aborted after admission, before they were inside."""
        self._drains: list[asyncio.Future[None]] = []
        self._on_change = on_change

    def require_new(self, name: str) -> None:
        """Raise ``ValueError`` if a request of this name exists already."""
        if name in self._known:
            raise ValueError(f"request {name!r} cannot run: another one with this id is running")

    async def run(
        self,
        name: str,
        enter: Callable[[], Response],
        updates_of: Callable[[Response], AsyncGenerator[Response, None]],
    ) -> AsyncGenerator[Response, None]:
        """Yield the request's state after each message from the engine; nothing if it was aborted before it began.

        ``enter`` makes the response once there is a slot. ``updates_of`` runs the request until it ends or has to begin
        again.
        """
        self._known.add(name)
        had_a_slot = False
        try:
            while await self.gate.enter(name, first=had_a_slot):
                response = enter()
                try:
                    if name in self._aborted:
                        return
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
            self._known.discard(name)
            self._aborted.discard(name)

    def _leave(self, name: str) -> None:
        self.inside.pop(name, None)
        self.gate.leave()
        self._on_change()
        if not self.inside:
            for drain in self._drains:
                if not drain.done():
                    drain.set_result(None)

    def abort(self, names: Iterable[str]) -> list[Response]:
        """Abort these requests: turn away those that wait, mark those that are inside and return them."""
        names = set(names)
        self.gate.turn_away(names)
        self._aborted |= names & self._known - self.inside.keys()
        inside = [response for name, response in self.inside.items() if name in names]
        for response in inside:
            response.aborted = True
            response.wake()
        return inside

    def abort_all(self) -> list[Response]:
        """Abort every request; see `abort`."""
        return self.abort(self._known)

    def begin_again(self) -> list[Response]:
        """Mark the requests without a token and return them. They enter again, before all others, when the gate
        opens."""
        waiting = [response for response in self.inside.values() if not response.token_ids]
        for response in waiting:
            response.begins_again = True
            response.wake()
        return waiting

    def require_none(self, what: str, *, paused: bool) -> None:
        """Raise ``RuntimeError`` if requests are being computed."""
        if not paused and self.inside:
            raise RuntimeError(f"{what} needs a paused or idle engine; {len(self.inside)} requests are running")

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
        the tokens.
        """
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
