"""Who may enter an engine: as many requests as have a place there, first come, first served, and none while it is shut.

A request that waits here is unknown to the engine, so a weight update never waits for it, and it begins with whatever
weights and cache the engine has when it enters.
"""

from __future__ import annotations

import asyncio
from collections import deque


class AdmissionGate:
    """Places for requests, with a door."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._open = True
        self._waiting: deque[tuple[str, asyncio.Future[bool]]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait to be let in."""
        return len(self._waiting)

    async def enter(self, request_id: str, *, first: bool = False) -> bool:
        """Wait for a place; true with one, false if the request was turned away. Give a place back with `leave`.
        ``first``: before all others, for one that had a place."""
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
        """Give a place back."""
        self._free += 1
        self._admit()

    def turn_away(self, request_ids: set[str]) -> None:
        """End the waiting of these requests."""
        for entry in [entry for entry in self._waiting if entry[0] in request_ids]:
            self._waiting.remove(entry)
            if not entry[1].done():
                entry[1].set_result(False)

    def turn_all_away(self) -> None:
        """End the waiting of every request."""
        self.turn_away({request_id for request_id, _ in self._waiting})

    def shut(self) -> None:
        """Nobody enters until `open`."""
        self._open = False

    def open(self) -> None:
        """Let the waiting ones in, as far as there are places."""
        self._open = True
        self._admit()

    def _admit(self) -> None:
        while self._open and self._free and self._waiting:
            _, place = self._waiting.popleft()
            if place.cancelled():
                continue
            self._free -= 1
            place.set_result(True)
