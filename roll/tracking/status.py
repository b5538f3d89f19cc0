"""`status.json`, the current state of a run for other processes; and the watch that ends a driver that is stuck.

A separate thread rewrites the file every second. So the file shows if the driver is working, is gone, or has an event
loop that is stuck (and where). It has the last known state, is of limited size for any run, and is kept when the run
ends. It is not essential: a failed write is logged and repeated.

A second thread interrupts or kills a driver that is stuck or does not end. It is separate because the event loop cannot
do this if it is stuck itself, nor the first thread if its disk hangs. Only time in which this process is running
counts: if the whole process is suspended (SIGSTOP, a sleeping laptop) or the clock changes, the run is not ended.

The place of a thread or task is the innermost line outside of libraries, plus the innermost function if that is in a
library.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from roll.tracking.files import write_atomically
from roll.tracking.waits import Wait

logger = logging.getLogger(__name__)

Phase = Literal["preparing", "starting", "running", "ending", "ended"]
"""Phases of a run: before the event loop; while roles start; while stages run; while processes are ended; after that.
"""

WRITE_SECONDS = 1.0
STUCK_SECONDS = 5.0
"""Time after which the file has the place of a stuck event loop, or the busy threads of a run that is ending."""
ENDING_SECONDS = 240.0
"""Time limit of the phase ``ending``: above the wait for worker processes, below asyncio's wait for threads."""
DEAF_SECONDS = 60.0
"""Time from the limit to the kill, for an event loop that is stuck in native code and does not react to interrupts."""
INTERRUPTS = 2


class Attention:
    """A clock that ignores suspensions: the time between two looks counts only up to a limit."""

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest = longest
        self._clock = clock
        self._last = clock()

    def look(self) -> float:
        """Return the seconds since the last look, at most the limit."""
        last, self._last = self._last, self._clock()
        return min(self._last - last, self._longest)


@dataclass
class DriverWatch:
    """The rules for ending a driver that is stuck, and its observed state."""

    stall_timeout_seconds: float
    ending_seconds: float = ENDING_SECONDS
    stuck: float = 0.0
    """Seconds since the event loop last ran, in phases in which it should run."""
    ending: float = 0.0
    """Seconds for which the run has been ending."""
    interrupts: int = 0

    def look(self, phase: Phase, seconds: float, came_round: bool) -> Literal["go on", "interrupt", "end"]:
        """Return the decision ``seconds`` after the last look. ``came_round``: the event loop has run since then."""
        self.stuck = self.stuck + seconds if phase in ("starting", "running") and not came_round else 0.0
        self.ending = self.ending + seconds if phase == "ending" else 0.0
        if self.stuck > self.stall_timeout_seconds and self.interrupts < INTERRUPTS:
            self.interrupts += 1
            return "interrupt"
        deaf = self.stuck > self.stall_timeout_seconds + DEAF_SECONDS
        return "end" if deaf or self.ending > self.ending_seconds else "go on"


@dataclass(frozen=True)
class ProcessFacts:
    """Facts about an existing process."""

    started: int | None
    """Start time in the kernel's clock ticks since boot, which tells apart processes with the same id. None: the system
    does not report it."""
    stopped: bool
    """True if the process is suspended by a signal (SIGSTOP) or a debugger."""


def look_at(pid: int) -> ProcessFacts | None:
    """Return the facts of a process; None if it no longer exists on this host."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass  # the process exists and belongs to another user
        return ProcessFacts(None, stopped=False)
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may contain anything, so fields are counted from its end.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else ProcessFacts(int(fields[18]), stopped=state in "Tt")


_POOL_THREAD = "concurrent/futures/thread.py"
_FRAME_AND_AWAITED = (("cr_frame", "cr_await"), ("ag_frame", "ag_await"), ("gi_frame", "gi_yieldfrom"))
_HERE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def thread_place(ident: int) -> str | None:
    """Return the line that a thread is executing; None for an idle pool thread, or if there is no such thread."""
    inner = sys._current_frames().get(ident)
    if inner is None or inner.f_code.co_filename.endswith(_POOL_THREAD):
        return None
    return _place([frame for frame, _ in walk_stack(inner)])


def _busy_places(threads: Iterable[threading.Thread]) -> Iterator[tuple[threading.Thread, str]]:
    for thread in threads:
        if thread.ident is not None and (place := thread_place(thread.ident)) is not None:
            yield thread, place


def busy_threads() -> list[str]:
    """Return the busy threads for which the process waits at exit, each with the line it is executing."""
    waited_for = (thread for thread in threading.enumerate() if not thread.daemon)
    return [f"{thread.name} in {place}" for thread, place in _busy_places(waited_for)]


def working_place(thread_name: str) -> str | None:
    """Return the line that a thread with a name starting with ``thread_name`` is executing; None if all are idle."""
    named = (thread for thread in threading.enumerate() if thread.name.startswith(thread_name))
    return next((place for _, place in _busy_places(named)), None)


def task_place(task: asyncio.Task[object]) -> str | None:
    """Return the line in which a task waits; None if it is unknown."""
    frames: list[FrameType] = []
    awaited: object = task.get_coro()
    while awaited is not None:
        # Coroutines, async generators and generators have different names for their frame and what they await.
        names = next((pair for pair in _FRAME_AND_AWAITED if hasattr(awaited, pair[0])), None)
        if names is None:
            break
        frame, awaited = (getattr(awaited, name) for name in names)
        if frame is not None:
            frames.insert(0, frame)
    return _place(frames)


def _place(outwards: list[FrameType]) -> str | None:
    """Return the line of the innermost frame outside of libraries. ``outwards``: frames, the innermost first."""
    if not outwards:
        return None
    own = next((frame for frame in outwards if _is_own(frame.f_code.co_filename)), outwards[0])
    line = f"{'/'.join(Path(own.f_code.co_filename).parts[-3:])}:{own.f_lineno} {own.f_code.co_name}"
    return line if own is outwards[0] else f"{line} > {outwards[0].f_code.co_name}"


def _is_own(path: str) -> bool:
    return path.startswith(_HERE) or not path.startswith(("<", *_LIBRARIES))


@dataclass(frozen=True)
class DriverStatus:
    """The driver process of the run."""

    pid: int
    host: str
    started: int | None

    @classmethod
    def of_this_process(cls) -> DriverStatus:
        """Return the status of the calling process."""
        facts = look_at(os.getpid())
        return cls(os.getpid(), socket.gethostname(), facts.started if facts is not None else None)


@dataclass(frozen=True)
class StageStatus:
    """A stage and its state."""

    name: str
    state: str
    since: float
    details: Mapping[str, Any] = field(default_factory=dict)
    place: str | None = None
    """Line of code in which the stage waits."""


@dataclass(frozen=True)
class ChannelStatus:
    """A channel between two stages."""

    name: str
    producer: str
    consumer: str
    items: int
    capacity: int


@dataclass(frozen=True)
class WorkerStatus:
    """A worker process."""

    name: str
    pid: int
    on_driver_host: bool
    asked_since: float
    """Time of the last heartbeat, or of the first request for one."""
    started: int | None = None
    """See `ProcessFacts.started`; also None for a worker on another host."""
    has_answered: bool = True
    loop_lag: float = 0.0
    place: str | None = None


@dataclass(frozen=True)
class SchedulerStatus:
    """The state of the rollouts."""

    in_flight: int
    buffered: int
    refusal: str
    """Reason why no group starts now."""
    holding_up: tuple[str, ...]
    """Groups that the next batch has to wait for; empty if it can take any groups."""


@dataclass(frozen=True)
class RunStatus:
    """Content of `status.json`. Times are seconds since 1970."""

    driver: DriverStatus
    phase: Phase
    written: float
    """Time of writing. A recent time shows that the driver is alive."""
    loop_beat: float
    """Time at which the driver's event loop last ran."""
    moved_at: float
    """Time at which any part of the run last made progress."""
    stall_timeout_seconds: float
    step: int = 0
    max_steps: int = 0
    loop_place: str | None = None
    """Line in which the event loop is stuck; None if it is not stuck."""
    ending_since: float | None = None
    ending_threads: tuple[str, ...] = ()
    """Threads that are still busy, if the run takes long to end."""
    stages: tuple[StageStatus, ...] = ()
    channels: tuple[ChannelStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    scheduler: SchedulerStatus | None = None
    memory_holders: tuple[str, ...] = ()
    """Holders of the weight buffers."""
    waits: tuple[Wait, ...] = ()
    holdings: tuple[Wait, ...] = ()
    groups_by_wait: Mapping[str, int] = field(default_factory=dict)
    """What groups wait for -> number of groups in flight. ``waits`` has only the oldest of these waits."""


def read_status(path: Path) -> RunStatus | None:
    """Read a `status.json`; None if there is no such file. Raises `ValueError` for a damaged file."""
    try:
        return TypeAdapter(RunStatus).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ValueError(f"{path} cannot be understood: {error.errors()[0]['msg']}") from error


class StatusFile:
    """Writer of `status.json`: a thread writes the last status that `update` received, until the `with` block ends."""

    def __init__(
        self,
        path: Path,
        watch: DriverWatch,
        interrupt: Callable[[], None] = lambda: None,
        end: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Start the threads. Call this in the thread that will run the event loop.

        As decided by ``watch``, ``interrupt()`` is called to interrupt that thread, or ``end(reason)`` to end the
        process.
        """
        self._path = path
        self._interrupt = interrupt
        self._end = end
        self._watch = watch
        self.stuck_because: str | None = None
        """Reason why the watch interrupted the run; None if it did not."""
        self._loop_thread = threading.get_ident()
        now = time.time()
        limit = watch.stall_timeout_seconds
        self._status = RunStatus(DriverStatus.of_this_process(), "preparing", now, now, now, limit)
        self._rounds = 0
        self._failing = False
        self._changed = threading.Event()
        self._changed.set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_again_and_again, name="status", daemon=True)
        self._thread.start()
        threading.Thread(target=self._look_again_and_again, name="status watch", daemon=True).start()

    def update(self, status: RunStatus, *, at_once: bool = False) -> None:
        """Set the current status. Each call also shows the watch that the event loop is running."""
        self._status = status
        self._rounds += 1
        if at_once:
            self._changed.set()

    def ending(self) -> None:
        """Enter the phase ``ending`` and start its time limit. The event loop need not run in this phase."""
        self._watch.ending = 0.0
        self._status = replace(self._status, phase="ending", ending_since=time.time())

    def __enter__(self) -> StatusFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Write the phase ``ended`` with the last known status, and stop."""
        self._closed.set()
        self._changed.set()
        self._thread.join(timeout=10 * WRITE_SECONDS)

    def _write_again_and_again(self) -> None:
        ended = False
        while not ended:
            self._changed.wait(WRITE_SECONDS)
            self._changed.clear()
            ended = self._closed.is_set()
            status = replace(
                self._status,
                written=time.time(),
                loop_place=thread_place(self._loop_thread) if self._watch.stuck > STUCK_SECONDS else None,
                ending_threads=tuple(busy_threads()) if self._watch.ending > STUCK_SECONDS else (),
            )
            self._write(replace(status, phase="ended") if ended else status)

    def _look_again_and_again(self) -> None:
        attention = Attention(2 * WRITE_SECONDS)
        rounds = self._rounds
        while not self._closed.wait(WRITE_SECONDS):
            rounds, before = self._rounds, rounds
            phase = self._status.phase  # read once: it may change meanwhile
            decision = self._watch.look(phase, attention.look(), rounds != before)
            if decision == "interrupt":
                self.stuck_because = self.stuck_because or self._reason(phase)
                self._interrupt()
            elif decision == "end":
                self._end(self._reason(phase))

    def _reason(self, phase: Phase) -> str:
        """Return the reason for interrupting or ending the driver in this phase."""
        watch = self._watch
        if phase == "ending":
            threads = "; ".join(busy_threads()) or "no thread of Python"
            return f"the run had not come to its end after {watch.ending:.0f} s; still at work: {threads}"
        return (
            f"the driver's event loop was stuck for {watch.stuck:.0f} s (stall_timeout_seconds: "
            f"{watch.stall_timeout_seconds:g}) in {thread_place(self._loop_thread)}"
        )

    def _write(self, current: RunStatus) -> None:
        # Texts come from exceptions and may contain single surrogates, which UTF-8 cannot encode.
        text = json.dumps(asdict(current), indent=1, ensure_ascii=False, default=str)
        try:
            write_atomically(self._path, text.encode("utf-8", "replace").decode() + "\n", durable=False)
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning("`roll doctor` will not know the state of the run: %s", error)
            self._failing = True
