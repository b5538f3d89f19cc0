"""The timeline: a record of states over time, for the timeline file, the idle shares and the current states.

An actor (a stage) is in exactly one state at a time; the workers of a role have intervals in which they were busy.
Spans are written to the file as they end. The file is valid JSON after every write, so that of a killed run can be
opened. Only current states and recent busy intervals are kept in memory. Not thread-safe: only the driver's event loop
writes.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any

from roll.tracking.files import naming

JOINED_SECONDS = 0.005
"""Longest pause between two spans of work that is ignored."""
_EVENTS_PER_WRITE = 64
_SECONDS_PER_WRITE = 1.0
_PROCESSES = {"stages": 1, "roles": 2}


class BusyIntervals:
    """The union of time intervals, as sorted, disjoint intervals.

    Gaps of at most ``joined`` seconds count as covered. Only the newest ``remembered`` intervals are kept.
    """

    def __init__(self, remembered: int, joined: float = 0.0) -> None:
        self._remembered = remembered
        self._joined = joined
        self.spans: list[tuple[float, float]] = []
        self._forgotten_until = float("-inf")

    def add(self, start: float, end: float) -> list[tuple[float, float]]:
        """Add an interval. Return the intervals that are newly covered, in order."""
        start = max(start, self._forgotten_until)
        if end <= start:
            return []
        touched = self._touched(start - self._joined, end + self._joined)
        edges = [start, *chain.from_iterable(self.spans[touched]), end]
        self.spans[touched] = [(min(edges[:2]), max(edges[-2:]))]
        if len(self.spans) > self._remembered:
            self._forgotten_until = self.spans.pop(0)[1]
        return [(left, right) for left, right in zip(edges[::2], edges[1::2], strict=True) if left < right]

    def share_within(self, start: float, end: float) -> float:
        """Return the covered share (0 to 1) of a window, leaving out time whose intervals were forgotten."""
        start = max(start, self._forgotten_until)
        if start >= end:
            return 0.0
        covered = self.spans[self._touched(start, end)]
        return sum(min(end, right) - max(start, left) for left, right in covered) / (end - start)

    def _touched(self, start: float, end: float) -> slice:
        first = bisect_left(self.spans, start, key=itemgetter(1))
        return slice(first, bisect_right(self.spans, end, key=itemgetter(0)))


class BusySpans:
    """Recent spans in which a worker was busy, in order. A reader gets them once per step, from any thread.

    ``clock`` returns seconds since 1970. Only the newest ``kept`` spans are kept.
    """

    def __init__(self, clock: Callable[[], float] = time.time, kept: int = 4000) -> None:
        self._clock = clock
        self._spans = BusyIntervals(kept, JOINED_SECONDS)
        self._lock = Lock()
        self._working = 0
        self._since = 0.0

    def add(self, start: float, end: float) -> None:
        """Add a busy span from ``start`` to ``end``."""
        with self._lock:
            self._spans.add(start, end)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Record a busy span during a block. Several blocks may overlap, all in one thread."""
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
        """Return the recent spans. A span that is still open is returned up to now."""
        if self._working:
            now = self._clock()
            self.add(self._since, now)
            self._since = now
        with self._lock:
            return list(self._spans.spans)


@dataclass(frozen=True)
class ActorState:
    """The current state of an actor."""

    state: str
    since: float
    details: Mapping[str, Any] = field(default_factory=dict)


class Timeline:
    """Recorder of state changes and busy intervals, with queries for current states and idle shares.

    ``path``: Chrome trace file for the spans; None: write no file. ``clock``: returns seconds; it must be the wall
    clock to fit the intervals measured by workers on other hosts. If the clock is set back, spans are still never
    negative and never overlap. ``remembered``: number of intervals per worker to keep in memory.
    """

    def __init__(
        self, path: Path | None = None, clock: Callable[[], float] = time.time, remembered: int = 10_000
    ) -> None:
        self._clock = clock
        self._remembered = remembered
        self._current: dict[str, ActorState] = {}
        self._busy: dict[str, dict[str, BusyIntervals]] = {}
        origin = clock()
        self._trace = None if path is None else _TraceFile(path, origin)
        self._last_write = origin

    def transition(self, actor: str, state: str, at: float | None = None, **details: Any) -> None:
        """Record that the actor enters ``state`` at time ``at`` (default: now), which ends its previous span.

        ``details`` (such as the step or group) are recorded with the span. A call with the same state and details as
        before changes nothing. A time before the actor's last change is replaced by the time of that change. Raises
        `OSError` with the path if the timeline file cannot be written.
        """
        now = self._clock() if at is None else at
        current = self._current.get(actor)
        if current is not None:
            if (current.state, current.details) == (state, details):
                return
            now = max(now, current.since)
            self._trace_stay(actor, current, now)
        self._current[actor] = ActorState(state, now, details)
        self._write_if_due(now)

    def busy(self, role: str, start: float, end: float, worker: str | int = 0) -> None:
        """Record that a worker of ``role`` was busy from ``start`` to ``end``.

        Intervals may overlap and come in any order. One that ends before it starts (a clock was set back) is ignored.
        """
        intervals = self._busy.setdefault(role, {}).setdefault(str(worker), BusyIntervals(self._remembered))
        for left, right in intervals.add(start, end):
            if self._trace is not None:
                self._trace.add("roles", f"{role}/{worker}", "busy", left, right, {})
        self._write_if_due(end)

    def idle_share(self, role: str, window: tuple[float, float]) -> float:
        """Return the share of a window (0 to 1) in which the role's workers were idle, as a mean over the workers.

        Workers that were never busy are not counted; a role without any other has share 1. Time whose intervals were
        forgotten is left out of the window. The share of an empty window is 0.
        """
        start, end = window
        if end <= start:
            return 0.0
        known = self._busy.get(role, {}).values()
        return 1.0 - sum(intervals.share_within(start, end) for intervals in known) / max(len(known), 1)

    def last_states(self) -> dict[str, ActorState]:
        """Return the current state of each actor, with its start time."""
        return dict(self._current)

    def close(self, at: float | None = None) -> None:
        """End all open spans and close the file. Later changes are not written. Safe to call twice."""
        now = self._clock() if at is None else at
        for actor, current in self._current.items():
            self._trace_stay(actor, current, max(now, current.since))
        self._current.clear()
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def _trace_stay(self, actor: str, stay: ActorState, end: float) -> None:
        if self._trace is not None:
            self._trace.add("stages", actor, stay.state, stay.since, end, stay.details)

    def _write_if_due(self, now: float) -> None:
        due = now - self._last_write >= _SECONDS_PER_WRITE
        if self._trace is not None and (due or len(self._trace.pending) >= _EVENTS_PER_WRITE):
            self._trace.flush()
            self._last_write = now


class _TraceFile:
    """A Chrome trace file (a JSON array of events) that is valid after every write.

    Each write replaces the closing bracket by new events and a new bracket, in one call. Each actor or worker is a
    thread of the trace, whose name is written when it is first used. Times are whole microseconds since ``origin``.
    Start and end of a span are rounded separately, so that rounding never makes spans overlap.
    """

    def __init__(self, path: Path, origin: float) -> None:
        self._path = path
        self._origin = origin
        self._threads: dict[tuple[int, str], int] = {}
        self.pending: list[str] = []
        for process, pid in _PROCESSES.items():
            self._push_name("process_name", pid, 0, process)
        with naming(path):
            self._file = open(path, "wb", buffering=1 << 20)
            self._file.write(b"[\n]")
            self._file.flush()
        self._end = 1
        """Byte position of the next event: after the last one, or after the opening bracket."""

    def add(self, process: str, thread: str, name: str, start: float, end: float, details: Mapping[str, Any]) -> None:
        pid = _PROCESSES[process]
        if (pid, thread) not in self._threads:
            self._threads[pid, thread] = len(self._threads) + 1
            self._push_name("thread_name", pid, self._threads[pid, thread], thread)
        tid, begin = self._threads[pid, thread], self._microseconds(start)
        event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": self._microseconds(end) - begin}
        args = {key: _plain(value) for key, value in details.items()}
        self._push({**event, "args": args} if args else event)

    def flush(self) -> None:
        if not self.pending:
            return
        separator = "\n" if self._end == 1 else ",\n"
        events = (separator + ",\n".join(self.pending)).encode("utf-8", errors="backslashreplace")
        with naming(self._path):
            self._file.seek(self._end)
            self._file.write(events + b"\n]")
            self._file.flush()
        self._end += len(events)
        self.pending.clear()

    def close(self) -> None:
        self.flush()
        with naming(self._path):
            self._file.close()

    def _push_name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._push({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})

    def _push(self, event: Mapping[str, Any]) -> None:
        self.pending.append(json.dumps(event, ensure_ascii=False, allow_nan=False))

    def _microseconds(self, at: float) -> int:
        return round((at - self._origin) * 1e6)


def _plain(value: Any) -> str | int | float | None:
    """Convert a detail for JSON: everything except None, texts and finite numbers becomes a text."""
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
