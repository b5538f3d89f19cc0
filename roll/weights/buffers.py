"""Bookkeeping of the weight buffers: which holder needs which version, and so which buffer may be overwritten.

A pure asyncio state machine, without memory or processes. A buffer holds one version and is free once that version has
no holder. Holders are the running weight update, each replica that loads the version or computes with it in place, and
(with two buffers) the pool, which keeps the newest version for replicas that restart. Promise: a held buffer is never
handed out, and callers get free buffers in the order of their requests.

With a single buffer, no version is kept for restarts, so that the next update need not wait. A version stays available
until the buffer is handed out again; a replica that restarts after that waits for the next update (see `has`).

If replicas can stay at an older version for a validation while newer ones are published, there is one spare buffer for
it. At most three versions are then needed at a time: that of the validation, the newest one, and the one being sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from roll.tracking.waits import PUBLICATION_MEMORY, PUBLISHING, STAGE_VALIDATION, waiting

NEWEST = "replicas that may restart"
"""Holder of the newest published version."""


class WeightBuffers:
    """The buffers and their holders. A holder is any hashable object, such as a replica."""

    def __init__(self, count: int, spare: int = 0) -> None:
        """Begin with ``count`` buffers for weight updates, and ``spare`` more for versions that replicas stay at."""
        self._keeps_newest = count > 1
        self._versions: list[int | None] = [None] * (count + spare)
        self._holders: dict[int, set[Hashable]] = {}
        self._turn = asyncio.Lock()
        """The right to take the next free buffer, granted in the order of the requests."""
        self._released = asyncio.Event()
        self.on_free: Callable[[int], None] = lambda version: None
        """Callback for each discarded version."""

    def has(self, version: int) -> bool:
        """Return True if a buffer still holds this version."""
        return version in self._versions

    def has_newer(self, version: int) -> bool:
        """Return True if a buffer holds, or is being filled with, a newer version."""
        return any(other is not None and other > version for other in self._versions)

    def buffer_of(self, version: int) -> int:
        """Return the buffer that holds a version. Raises ``KeyError`` if none does."""
        if version not in self._versions:
            raise KeyError(f"no buffer has version {version}; they have {self._versions}")
        return self._versions.index(version)

    async def acquire(self, version: int) -> int:
        """Wait for a free buffer to write ``version`` into; the caller holds it until `published`.

        Returns at once if the version already has a buffer.
        """
        if self.has(version):
            return self.buffer_of(version)
        with waiting(PUBLICATION_MEMORY, f"a free buffer for version {version}"):
            async with self._turn:
                while (buffer := self._free()) is None:
                    self._released.clear()
                    await self._released.wait()
                last = self._versions[buffer]
                if last is not None:
                    self._forget(last)
                self._versions[buffer] = version
                self._holders[version] = {PUBLISHING}
                return buffer

    def holders(self) -> dict[int, list[Hashable]]:
        """Return the holders of each version."""
        return {version: list(holders) for version, holders in self._holders.items()}

    def hold(self, version: int, holder: Hashable) -> None:
        """Add ``holder`` to this version. Raises ``KeyError`` if no buffer holds the version any more."""
        self.buffer_of(version)
        self._holders[version].add(holder)

    def release(self, version: int, holder: Hashable) -> None:
        """Remove ``holder`` from this version. Calling it twice is harmless."""
        holders = self._holders.get(version, set())
        if holder in holders:
            holders.remove(holder)
            if not holders and self._keeps_newest:
                self._forget(version)
            self._released.set()

    def keep_only(self, holder: Hashable, version: int | None) -> None:
        """Remove ``holder`` from all versions except ``version``, or from all versions if that is None."""
        for other in [other for other, holders in self._holders.items() if holder in holders and other != version]:
            self.release(other, holder)

    @contextmanager
    def kept(self, version: int) -> Iterator[None]:
        """Keep a published version during a block, so that replicas that restart can load it, even with one buffer."""
        self.hold(version, STAGE_VALIDATION)
        try:
            yield
        finally:
            self.release(version, STAGE_VALIDATION)

    def publishing(self, version: int) -> None:
        """Record that this version is complete and the newest, so that restarting replicas load it."""
        if self._keeps_newest:
            self.hold(version, NEWEST)
            self.keep_only(NEWEST, version)

    def published(self, version: int) -> None:
        """Record that the weight update has ended and no longer holds the version; others may still hold it."""
        self.release(version, PUBLISHING)

    def _forget(self, version: int) -> None:
        self._versions[self.buffer_of(version)] = None
        del self._holders[version]
        self.on_free(version)

    def _free(self) -> int | None:
        """Return the free buffer with the oldest version; None if no buffer is free."""
        free = [
            (-1 if version is None else version, buffer)
            for buffer, version in enumerate(self._versions)
            if version is None or not self._holders[version]
        ]
        return min(free)[1] if free else None
