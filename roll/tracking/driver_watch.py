"""When a driver that is stuck, or does not come to its end, is to be interrupted, and when to be ended for good.

Pure: somebody looks every second and says what he saw. Time counts only as far as somebody watched: a pause of the
whole process (SIGSTOP, a laptop that sleeps) and a clock that is set are no reason to end a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["preparing", "starting", "running", "ending", "ended"]
"""Before the event loop runs; roles start; stages run; processes are ended; nothing runs any more."""

STUCK_SECONDS = 5.0
"""An event loop that has not come round for so long, or an end that takes so long, has its place told."""
ENDING_SECONDS = 240.0
"""Longest end of a run. Longer than worker processes are waited for, shorter than asyncio waits for threads: what comes
after that would wait for ever."""
DEAF_SECONDS = 60.0
"""An event loop that is stuck in native code does not hear interrupts; after so long the process is ended."""
INTERRUPTS = 2


class Attention:
    """Seconds from look to look, but none longer than somebody who is awake takes."""

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest = longest
        self._clock = clock
        self._last = clock()

    def look(self) -> float:
        """Seconds since the last look, as far as they count."""
        last, self._last = self._last, self._clock()
        return min(self._last - last, self._longest)


@dataclass
class DriverWatch:
    """What has been seen of a driver so far."""

    stall_timeout_seconds: float
    ending_seconds: float = ENDING_SECONDS
    stuck: float = 0.0
    """Seconds since its event loop last came round, while that should."""
    ending: float = 0.0
    """Seconds for which the run has been ending."""
    interrupts: int = 0

    def look(self, phase: Phase, seconds: float, came_round: bool) -> Literal["go on", "interrupt", "end"]:
        """What is to be done ``seconds`` after the last look. ``came_round``: whether the event loop did since then."""
        self.stuck = self.stuck + seconds if phase in ("starting", "running") and not came_round else 0.0
        self.ending = self.ending + seconds if phase == "ending" else 0.0
        if self.stuck > self.stall_timeout_seconds and self.interrupts < INTERRUPTS:
            self.interrupts += 1
            return "interrupt"
        deaf = self.stuck > self.stall_timeout_seconds + DEAF_SECONDS
        return "end" if deaf or self.ending > self.ending_seconds else "go on"
