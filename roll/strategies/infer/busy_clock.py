"""Time of work, for an engine that does not tell when it computed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from roll.tracking.busy_spans import BusySpans


@dataclass
class BusyClock:
    """Seconds during which something was computed, and when that was."""

    total: float = 0.0
    since: float | None = None
    spans: BusySpans = field(default_factory=BusySpans)

    def set(self, busy: bool) -> None:
        """From now on it is busy, or not."""
        now = time.perf_counter()
        if self.since is not None:
            self.total += now - self.since
            ended = time.time()
            self.spans.add(ended - (now - self.since), ended)
        self.since = now if busy else None

    def read(self) -> float:
        """Seconds so far."""
        self.set(self.since is not None)
        return self.total

    def stats(self) -> dict[str, Any]:
        """`busy_seconds` and `busy_spans`, as an engine's stats have them."""
        return {"busy_seconds": self.read(), "busy_spans": self.spans.recent()}
