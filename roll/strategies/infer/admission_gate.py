"""Admission to an engine: first come, first served while slots are free, and nothing enters while the gate is shut.

The engine does not know the requests that wait here. A weight update therefore never waits for them, and each begins
with the weights and the cache that the engine has when it enters.
"""

from __future__ import annotations

import asyncio
from collections import deque


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
