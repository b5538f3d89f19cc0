"""Seconds of work, for an engine that does not tell how long it computed."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class BusyClock:
    """Seconds during which something was computed."""

    total: float = 0.0
    since: float | None = None

    def set(self, busy: bool) -> None:
        """From now on it is busy, or not."""
        now = time.perf_counter()
        if self.since is not None:
            self.total += now - self.since
        self.since = now if busy else None

    def read(self) -> float:
        """Seconds so far."""
        self.set(self.since is not None)
        return self.total
