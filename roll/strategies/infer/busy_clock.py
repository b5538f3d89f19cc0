"""Busy time of an engine that does not report when it computed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from roll.tracking.busy_spans import BusySpans


@dataclass
class BusyClock:
    """Total seconds of computing, and when they were."""

    total: float = 0.0
    since: float | None = None
    spans: BusySpans = field(default_factory=BusySpans)

    def set(self, busy: bool) -> None:
        """Record that the engine is busy, or idle, from now on."""
        now = time.perf_counter()
        if self.since is not None:
            self.total += now - self.since
            ended = time.time()
            self.spans.add(ended - (now - self.since), ended)
        self.since = now if busy else None

    def read(self) -> float:
        """Return the busy seconds so far."""
        self.set(self.since is not None)
        return self.total

    def stats(self) -> dict[str, Any]:
        """Return `busy_seconds` and `busy_spans` for the engine's stats."""
        return {"busy_seconds": self.read(), "busy_spans": self.spans.recent()}
