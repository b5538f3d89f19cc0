"""The timeline: one record of states over time, for the timeline file, idle shares and the present states.

Actors (stages) are in exactly one state at a time; roles (workers) have intervals in which they were busy. Spans go to
the file as they end. The file is whole, valid JSON after every write, so the file of a killed run can be opened. Memory
holds only the present states and recent busy intervals. Not thread-safe: the driver's event loop is the one writer.
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
"""Shorter pauses are ignored."""
_EVENTS_PER_WRITE = 64
_SECONDS_PER_WRITE = 1.0
_PROCESSES = {"stages": 1, "roles": 2}


class BusyIntervals:
    """The union of time intervals, sorted and disjoint. Beyond ``remembered`` of them the oldest is forgotten.

    Pauses of at most ``joined`` seconds count as covered.
    """

    def __init__(self, remembered: int, joined: float = 0.0) -> None:
        self._remembered = remembered
        self._joined = joined
        self.spans: list[tuple[float, float]] = []
        self._forgotten_until = float("-inf")

    def add(self, start: float, end: float) -> list[tuple[float, float]]:
        """Add an interval; return what is covered now and was not before, in order."""
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
        """Return the covered share of a window, without its forgotten time."""
        start = max(start, self._forgotten_until)
        if start >= end:
            return 0.0
        covered = self.spans[self._touched(start, end)]
        return sum(min(end, right) - max(start, left) for left, right in covered) / (end - start)

    def _touched(self, start: float, end: float) -> slice:
        first = bisect_left(self.spans, start, key=itemgetter(1))
        return slice(first, bisect_right(self.spans, end, key=itemgetter(0)))


class BusySpans:
    """Spans of a worker's work in order, safe between threads, for a reader that asks once per step.

    ``clock`` returns seconds since the epoch. If a step has more than ``kept`` spans, its beginning is missing.
    """

    def __init__(self, clock: Callable[[], float] = time.time, kept: int = 4000) -> None:
        self._clock = clock
        self._spans = BusyIntervals(kept, JOINED_SECONDS)
        self._lock = Lock()
        self._working = 0
        self._since = 0.0

    def add(self, start: float, end: float) -> None:
        """Add work from ``start`` to ``end``."""
        with self._lock:
            self._spans.add(start, end)

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
            return list(self._spans.spans)


@dataclass(frozen=True)
class ActorState:
    """The present state of an actor."""

    state: str
    since: float
    details: Mapping[str, Any] = field(default_factory=dict)


class Timeline:
    """Recorder of state changes and busy intervals, with queries for present states and idle shares.

    ``path``: the Chrome trace file that spans are streamed to; without it nothing is written. ``clock``: seconds. It is
    the wall clock, because intervals measured by workers on other hosts must fit in; one that is set back never gives
    negative or overlapping spans. ``remembered``: intervals of each worker that stay in memory.
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

        ``details`` (a step, a group, what is waited for) go with the span. Repeating the same state with the same
        details changes nothing, so the start of the state stays true. A time before the actor's last change counts as
        that time. Raises `OSError` naming a timeline file that cannot be written.
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
        """Record that a worker of ``role`` computed from ``start`` to ``end``.

        Intervals may overlap and come in any order. One that ends before it starts (a clock was set back) is empty.
        """
        intervals = self._busy.setdefault(role, {}).setdefault(str(worker), BusyIntervals(self._remembered))
        for left, right in intervals.add(start, end):
            if self._trace is not None:
                self._trace.add("roles", f"{role}/{worker}", "busy", left, right, {})
        self._write_if_due(end)

    def idle_share(self, role: str, window: tuple[float, float]) -> float:
        """Return the share of a window, 0 to 1, in which the role's workers did not compute (mean over the workers).

        Only workers that were ever busy count; a role without any is wholly idle. Forgotten time is left out of the
        window; an empty window has no idle time.
        """
        start, end = window
        if end <= start:
            return 0.0
        known = self._busy.get(role, {}).values()
        return 1.0 - sum(intervals.share_within(start, end) for intervals in known) / max(len(known), 1)

    def last_states(self) -> dict[str, ActorState]:
        """Return the present state of each actor, with its start."""
        return dict(self._current)

    def close(self, at: float | None = None) -> None:
        """End every open span and complete the file. Safe to call twice; later changes are not written."""
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
    """A Chrome trace (array of events) that is complete after every write.

    Each write replaces the closing bracket by new events and a new bracket, in one go, so the file never lacks it.
    Each actor or worker is a thread, named in the file when it is first used. Times are whole microseconds since
    ``origin``. Both ends of a span are rounded, so rounding makes no overlap.
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
        """Position of the next event: after the last one, or after the opening bracket."""

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
    """Return a detail as JSON can hold it: everything except text and finite numbers becomes text."""
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
