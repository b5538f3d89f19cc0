"""Who still needs which version of the weights, and so which half of the double buffer may be written.

A pure state machine of asyncio: no memory, no process. A half holds one version, and is free once nobody holds that
version: not the publication under way, no replica that loads it or computes with it in place, and (with two halves) not
the pool, which keeps the newest one for a replica that restarts. Promise: a half that somebody holds is never given
out; a waiter gets the first half that becomes free, in the order of asking.

With a single half nothing is kept for restarts, so that the next version need not wait: the version is there until the
half is given out again, and a replica that restarts later waits for the next publication (`has` says so).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

from roll.tracking.waits import PUBLICATION_MEMORY, PUBLISHING, waiting

NEWEST = "replicas that may restart"
"""Holds the newest published version."""


class WeightBuffers:
    """The halves and their holders. Holders are whatever can be told apart (a replica's own object)."""

    def __init__(self, halves: int, on_free: Callable[[int], None] = lambda version: None) -> None:
        """``on_free`` hears of each version that is gone."""
        self._versions: list[int | None] = [None] * halves
        self._holders: dict[int, set[Hashable]] = {}
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        self.on_free = on_free

    def __repr__(self) -> str:
        return f"WeightBuffers({self._versions}, {len(self._waiting)} waiting)"

    def has(self, version: int) -> bool:
        """Whether a half still has this version."""
        return version in self._versions

    def half_of(self, version: int) -> int:
        """The half that has a version. Raises ``KeyError`` if none does."""
        if version not in self._versions:
            raise KeyError(f"no half has version {version}; they have {self._versions}")
        return self._versions.index(version)

    async def acquire(self, version: int) -> int:
        """The half to write ``version`` into, once one is free; the caller holds it until `published`. At once if this
        version has a half already."""
        if self.has(version):
            return self.half_of(version)
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((version, waiter))
        self._serve()
        try:
            with waiting(PUBLICATION_MEMORY, f"a free half for version {version}"):
                return await waiter
        except asyncio.CancelledError:
            if (version, waiter) in self._waiting:
                self._waiting.remove((version, waiter))
            elif not waiter.cancelled():
                self.release(version, PUBLISHING)
            raise

    def holders(self) -> dict[int, list[Hashable]]:
        """Who needs which version."""
        return {version: list(holders) for version, holders in self._holders.items()}

    def hold(self, version: int, holder: Hashable) -> None:
        """``holder`` needs this version. Raises ``KeyError`` if it is in no half any more."""
        self.half_of(version)
        self._holders[version].add(holder)

    def release(self, version: int, holder: Hashable) -> None:
        """``holder`` needs this version no more. Harmless to repeat."""
        holders = self._holders.get(version, set())
        if holder in holders:
            holders.remove(holder)
            self._freed(version)

    def keep_only(self, holder: Hashable, version: int | None) -> None:
        """``holder`` needs ``version`` and no other one; None: it needs nothing (it has died)."""
        for other in [other for other, holders in self._holders.items() if holder in holders and other != version]:
            self.release(other, holder)

    def publishing(self, version: int) -> None:
        """This version is complete and the newest: it is the one that a restarting replica loads."""
        if len(self._versions) > 1:
            self.hold(version, NEWEST)
            self.keep_only(NEWEST, version)

    def published(self, version: int) -> None:
        """The publication has ended; only those who hold the version by themselves need it from here on."""
        self.release(version, PUBLISHING)

    def _freed(self, version: int) -> None:
        if self._holders[version]:
            return
        if len(self._versions) > 1:
            self._forget(version)
        self._serve()

    def _forget(self, version: int) -> None:
        self._versions[self.half_of(version)] = None
        del self._holders[version]
        self.on_free(version)

    def _serve(self) -> None:
        """Give free halves to those who wait."""
        while self._waiting:
            free = [half for half, version in enumerate(self._versions) if not self._needed(version)]
            if not free:
                return
            version, waiter = self._waiting.popleft()
            if waiter.done():
                continue
            last = self._versions[free[0]]
            if last is not None:
                self._forget(last)
            self._versions[free[0]] = version
            self._holders[version] = {PUBLISHING}
            waiter.set_result(free[0])

    def _needed(self, version: int | None) -> bool:
        return version is not None and bool(self._holders[version])
