"""The requests of an engine that computes in its own processes: known, waiting, or inside the engine.

Every engine that is driven by messages meets the same cases: an abort that arrives before the request is inside, a
request that must leave and enter again before all others, a drain that is interrupted. They are handled here once. The
content of the messages is left to the engine's own module.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from roll.strategies.infer.admission_gate import AdmissionGate
from roll.strategies.infer.response import Response


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
