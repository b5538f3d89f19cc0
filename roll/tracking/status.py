"""`status.json`: what a run is doing at this moment, for a reader in another process.

A thread of its own rewrites the file every second, so it tells a driver that is busy, whose event loop is stuck (and
where) or that is gone from one that works. No watch on the event loop can end a run whose event loop is stuck, and the
disk that the file lies on may be what hangs, so a second thread does that (`driver_watch`). The file holds what was
last known, bounded however large the run is, and stays behind when the run ends. A run can do without it: if it cannot
be written, that is logged and tried again.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from roll.tracking.driver_watch import STUCK_SECONDS, Attention, DriverWatch, Phase
from roll.tracking.files import write_atomically
from roll.tracking.processes import look_at
from roll.tracking.stacks import busy_threads, thread_place
from roll.tracking.waits import Wait

logger = logging.getLogger(__name__)

WRITE_SECONDS = 1.0


@dataclass(frozen=True)
class DriverStatus:
    """The process that conducts the run."""

    pid: int
    host: str
    started: int | None
    """See `ProcessFacts.started`."""

    @classmethod
    def of_this_process(cls) -> DriverStatus:
        """The facts of the process that asks."""
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
    """The line in which it waits."""


@dataclass(frozen=True)
class ChannelStatus:
    """Who puts into a channel and who takes out of it."""

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
    """When its last sign of life came, or the process was first asked for one."""
    started: int | None = None
    """See `ProcessFacts.started`; None: on another host."""
    has_answered: bool = True
    loop_lag: float = 0.0
    place: str | None = None


@dataclass(frozen=True)
class SchedulerStatus:
    """How rollouts stand."""

    in_flight: int
    buffered: int
    refusal: str
    """Why no group starts now."""
    holding_up: tuple[str, ...]
    """Groups that the next batch cannot do without; none: any will do."""


@dataclass(frozen=True)
class RunStatus:
    """Everything in the file. Times are seconds since 1970."""

    driver: DriverStatus
    phase: Phase
    written: float
    """When this was written: the driver's sign of life."""
    loop_beat: float
    """When the driver's event loop last came round."""
    moved_at: float
    """When anything last made progress."""
    stall_timeout_seconds: float
    step: int = 0
    max_steps: int = 0
    loop_place: str | None = None
    """Where the event loop is stuck, if it is."""
    ending_since: float | None = None
    ending_threads: tuple[str, ...] = ()
    """What is still done while a run does not come to its end."""
    stages: tuple[StageStatus, ...] = ()
    channels: tuple[ChannelStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    scheduler: SchedulerStatus | None = None
    memory_holders: tuple[str, ...] = ()
    """Who needs the halves of the publication's memory."""
    waits: tuple[Wait, ...] = ()
    holdings: tuple[Wait, ...] = ()
    groups_by_wait: Mapping[str, int] = field(default_factory=dict)
    """What groups in flight wait for -> how many do; ``waits`` has the oldest of them only."""


_RECORD = TypeAdapter(RunStatus)


class DamagedStatus(ValueError):
    """The file is there and says nothing that can be understood."""


def read_status(path: Path) -> RunStatus | None:
    """None: there is no such file. Raises `DamagedStatus`, and `OSError` if it cannot be read."""
    try:
        return _RECORD.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DamagedStatus(f"{path} cannot be understood: {error.errors()[0]['msg']}") from error


class StatusFile:
    """Keeps the file up to date with what `update` was last given, until `close`."""

    def __init__(
        self,
        path: Path,
        watch: DriverWatch,
        interrupt: Callable[[], None] = lambda: None,
        end: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """To be made in the thread that the event loop will run in. As ``watch`` decides, ``interrupt`` ends what runs
        there, and ``end``, with a reason, the process."""
        self._path = path
        self._interrupt = interrupt
        self._end = end
        self._watch = watch
        self.stuck_because: str | None = None
        """Why the run was interrupted from here."""
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
        """What the run does now: the event loop has come round."""
        self._status = status
        self._rounds += 1
        if at_once:
            self._changed.set()

    def ending(self) -> None:
        """Something is ended now that the event loop does not watch over; it has its own time for that."""
        self._watch.ending = 0.0
        self._status = replace(self._status, phase="ending", ending_since=time.time())

    def __enter__(self) -> StatusFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Say that the run has ended; what was last known stays."""
        self._closed.set()
        self._changed.set()
        self._thread.join(timeout=10 * WRITE_SECONDS)

    def _write_again_and_again(self) -> None:
        ended = False
        while not ended:
            self._changed.wait(WRITE_SECONDS)
            self._changed.clear()
            ended = self._closed.is_set()
            self._write(self._seen_from_here(replace(self._status, phase="ended") if ended else self._status))

    def _seen_from_here(self, status: RunStatus) -> RunStatus:
        return replace(
            status,
            written=time.time(),
            loop_place=thread_place(self._loop_thread) if self._watch.stuck > STUCK_SECONDS else None,
            ending_threads=tuple(busy_threads()) if self._watch.ending > STUCK_SECONDS else (),
        )

    def _look_again_and_again(self) -> None:
        attention = Attention(2 * WRITE_SECONDS)
        rounds = self._rounds
        while not self._closed.wait(WRITE_SECONDS):
            rounds, before = self._rounds, rounds
            self._act(self._watch.look(self._status.phase, attention.look(), rounds != before))

    def _act(self, decision: str) -> None:
        if decision == "interrupt":
            self.stuck_because = self.stuck_because or self._stuck_because()
            self._interrupt()
        elif decision == "end":
            self._end(self._late_because() if self._status.phase == "ending" else self._stuck_because())

    def _stuck_because(self) -> str:
        limit = self._watch.stall_timeout_seconds
        return (
            f"the driver's event loop was stuck for {self._watch.stuck:.0f} s (stall_timeout_seconds: {limit:g}) in "
            f"{thread_place(self._loop_thread)}"
        )

    def _late_because(self) -> str:
        threads = "; ".join(busy_threads()) or "no thread of Python"
        return f"the run had not come to its end after {self._watch.ending:.0f} s; still at work: {threads}"

    def _write(self, current: RunStatus) -> None:
        # Texts come from exceptions, and may hold what UTF-8 cannot: halves of surrogate pairs.
        text = json.dumps(asdict(current), indent=1, ensure_ascii=False, default=str)
        try:
            write_atomically(self._path, text.encode("utf-8", "replace").decode() + "\n", durable=False)
        except OSError as error:
            if not self._failing:
                logger.warning("`roll doctor` will not know how the run stands: %s", error)
            self._failing = True
        else:
            self._failing = False
