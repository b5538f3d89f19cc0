"""The requests of an engine that computes in processes of its own: who is known, who waits, who is inside.

An engine that is spoken to by messages meets the same cases whoever made it: an abort that comes before the request is
inside, a request that has to leave and enter again before all others, a drain that somebody interrupts. They are here
once; what the messages say is the engine's own module's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from roll.strategies.infer.admission_gate import AdmissionGate
from roll.strategies.infer.response import Response


class Inside(Protocol):
    """A request that has a place in the engine."""

    @property
    def response(self) -> Response:
        """Its tokens so far."""


Place = TypeVar("Place", bound=Inside)


class AdmittedRequests(Generic[Place]):
    """Requests from the moment they are known until they have ended."""

    def __init__(self, places: int, on_change: Callable[[], None]) -> None:
        """``on_change`` is called when a request has entered or left."""
        self.gate = AdmissionGate(places)
        self.inside: dict[str, Place] = {}
        """In the order in which they entered."""
        self._known: set[str] = set()
        self._aborted: set[str] = set()
        """Requests aborted between being let in and being inside."""
        self._on_change = on_change

    def responses_inside(self) -> list[Response]:
        """Of the requests that are inside."""
        return [place.response for place in self.inside.values()]

    def counts(self) -> dict[str, Any]:
        """`running` and `waiting`, as the engine's stats have them."""
        return {"running": len(self.inside), "waiting": self.gate.waiting}

    def require_new(self, name: str) -> None:
        """Raises ``ValueError`` if a request of this name is there already."""
        if name in self._known:
            raise ValueError(f"request {name!r} cannot run: another one with this id is running")

    async def run(
        self, name: str, enter: Callable[[], Place], updates_of: Callable[[Place], AsyncGenerator[Response, None]]
    ) -> AsyncGenerator[Response, None]:
        """A request's state after each message of the engine; nothing if it was aborted before it began. ``enter``
        makes its place, ``updates_of`` runs it to its end or until it is to begin again."""
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
        """Turn these requests away where they wait; those that are inside, for the engine to end."""
        self.gate.turn_away(set(names))
        self._aborted |= {name for name in names if name in self._known and name not in self.inside}
        return [self.inside[name] for name in names if name in self.inside]

    def require_none(self, what: str, *, paused: bool) -> None:
        """Raises ``RuntimeError`` if requests are being computed."""
        if not paused and self.inside:
            raise RuntimeError(f"{what} needs a paused or idle engine; {len(self.inside)} requests are running")


class Drains:
    """Waits for an engine to be empty, which end early where somebody interrupts them."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self, begin: Callable[[Callable[[Exception | None], None]], None] | None = None) -> None:
        """Return when the drain has ended, or raise what it ended with. ``begin`` starts it, where the engine waits
        itself, and is given what is to be called at its end."""
        drain: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(drain)
        if begin is not None:
            begin(lambda error: _end(drain, error))
        try:
            await drain
        finally:
            self._waiting.remove(drain)

    def end(self, error: Exception | None) -> None:
        """End all of them, with success if there is no ``error``."""
        for drain in self._waiting:
            _end(drain, error)

    def interrupt(self, by: str) -> None:
        """End all of them as interrupted."""
        self.end(RuntimeError(f"the drain was interrupted by {by}"))


def _end(drain: asyncio.Future[None], error: Exception | None) -> None:
    """Resolve it, unless it is resolved already."""
    if drain.done():
        return
    if error is None:
        drain.set_result(None)
    else:
        drain.set_exception(error)
