"""The watch over a driver that is stuck or does not end: when to interrupt it, and when to kill it.

It is pure: the caller looks every second and reports what it saw. Only watched time counts. A pause of the whole
process (SIGSTOP, a laptop that sleeps) or a changed clock is no reason to end a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["preparing", "starting", "running", "ending", "ended"]
"""In order: before the event loop runs; roles start; stages run; processes are ended; nothing runs any more."""

STUCK_SECONDS = 5.0
"""Seconds after which the place of a stuck event loop, or of a long end of the run, is reported."""
ENDING_SECONDS = 240.0
"""Longest end of a run, in seconds.

It is longer than the wait for worker processes and shorter than asyncio's wait for threads. Later waits have no
deadline.
"""
DEAF_SECONDS = 60.0
"""Seconds from the limit to the kill. An event loop that is stuck in native code does not react to interrupts."""
INTERRUPTS = 2


class Attention:
    """Clock of watched time: the seconds between two looks count only up to a limit."""

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest = longest
        self._clock = clock
        self._last = clock()

    def look(self) -> float:
        """Return the seconds since the last look that count."""
        last, self._last = self._last, self._clock()
        return min(self._last - last, self._longest)


@dataclass
class DriverWatch:
    """The observed state of a driver."""

    stall_timeout_seconds: float
    ending_seconds: float = ENDING_SECONDS
    stuck: float = 0.0
    """Seconds since its event loop last came round, in phases in which it should."""
    ending: float = 0.0
    """Seconds for which the run has been ending."""
    interrupts: int = 0

    def look(self, phase: Phase, seconds: float, came_round: bool) -> Literal["go on", "interrupt", "end"]:
        """Return what to do ``seconds`` after the last look. ``came_round``: the event loop did since then."""
        self.stuck = self.stuck + seconds if phase in ("starting", "running") and not came_round else 0.0
        self.ending = self.ending + seconds if phase == "ending" else 0.0
        if self.stuck > self.stall_timeout_seconds and self.interrupts < INTERRUPTS:
            self.interrupts += 1
            return "interrupt"
        deaf = self.stuck > self.stall_timeout_seconds + DEAF_SECONDS
        return "end" if deaf or self.ending > self.ending_seconds else "go on"
