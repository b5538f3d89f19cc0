"""Spans of work in wall-clock time, so that they fit on the timeline of another process.

Only the recent past is kept. A reader that asks once per step sees all of it, unless a step has more separate spans
than are kept; then the beginning of that step is missing. Safe between threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

JOINED_SECONDS = 0.005
"""Shorter pauses are ignored."""
KEPT_SPANS = 4000


class BusySpans:
    """Spans of work, in order. ``clock`` returns seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time, kept: int = KEPT_SPANS) -> None:
        self._clock = clock
        self._spans: deque[tuple[float, float]] = deque(maxlen=kept)
        self._lock = Lock()
        self._working = 0
        self._since = 0.0

    def add(self, start: float, end: float) -> None:
        """Add work from ``start`` to ``end``, after all spans added before.

        If a clock that was set back makes it begin earlier, the span is cut or left out.
        """
        with self._lock:
            last_start, last_end = self._spans[-1] if self._spans else (start, start)
            start = max(start, last_end)
            if end <= start:
                return
            if self._spans and start - last_end < JOINED_SECONDS:
                self._spans[-1] = (last_start, end)
            else:
                self._spans.append((start, end))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Record work while this is open. It may be open several times at once, in one thread."""
        if not self._working:
            self._since = self._clock()
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self.add(self._since, self._clock())

    def recent(self) -> list[tuple[float, float]]:
        """Return the last spans; one that is still open ends now."""
        if self._working:
            now = self._clock()
            self.add(self._since, now)
            self._since = now
        with self._lock:
            return list(self._spans)
