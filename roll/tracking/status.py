"""`status.json`: what a run is doing at this moment, for a reader in another process.

A thread of its own rewrites the file every second, so it tells a driver that is busy, whose event loop is stuck (and
where) or that is gone from one that works. No watch on the event loop can end a run whose event loop is stuck, so the
thread does that too. The file holds what was last known, bounded however large the run is, and stays behind when the
run ends. A run can do without it: if it cannot be written, that is logged and tried again.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from roll.tracking.files import write_atomically
from roll.tracking.processes import look_at
from roll.tracking.stacks import thread_place
from roll.tracking.waits import Wait

logger = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
STUCK_SECONDS = 5.0
"""An event loop that has not come round for so long has its place told."""

Phase = Literal["preparing", "starting", "running", "ending", "ended"]
"""Before the event loop runs; roles start; stages run; processes are ended; nothing runs any more."""


@dataclass(frozen=True)
class DriverStatus:
    """The process that conducts the run."""

    pid: int
    host: str
    started: int | None
    """See `ProcessFacts.started`."""

    @classmethod
    def of_this_process(cls) -> DriverStatus:
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
        self, path: Path, stall_timeout_seconds: float, interrupt: Callable[[], None] = lambda: None
    ) -> None:
        """To be made in the thread that the event loop will run in. ``interrupt``: ends what runs there, called when
        that is stuck for longer than a run may stall, again after a second."""
        self._path = path
        self._interrupt = interrupt
        self._interrupts_left = 2
        self.stuck_because: str | None = None
        """Why the run was interrupted from here."""
        self._loop_thread = threading.get_ident()
        now = time.time()
        self._status = RunStatus(DriverStatus.of_this_process(), "preparing", now, now, now, stall_timeout_seconds)
        self._failing = False
        self._changed = threading.Event()
        self._changed.set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_again_and_again, name="status", daemon=True)
        self._thread.start()

    def update(self, status: RunStatus, *, at_once: bool = False) -> None:
        """What the run does now."""
        self._status = status
        if at_once:
            self._changed.set()

    def ending(self) -> None:
        """The event loop watches over the run no more."""
        self._status = replace(self._status, phase="ending")

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
            current = self._seen_from_here(replace(self._status, phase="ended") if ended else self._status)
            self._write(current)
            self._end_if_stuck(current)

    def _seen_from_here(self, status: RunStatus) -> RunStatus:
        now = time.time()
        stuck = status.phase in ("starting", "running") and now - status.loop_beat > STUCK_SECONDS
        return replace(status, written=now, loop_place=thread_place(self._loop_thread) if stuck else None)

    def _end_if_stuck(self, status: RunStatus) -> None:
        stuck_for = status.written - status.loop_beat
        if status.loop_place is None or stuck_for <= status.stall_timeout_seconds or not self._interrupts_left:
            return
        if self.stuck_because is None:
            self.stuck_because = (
                f"the driver's event loop was stuck for {stuck_for:.0f} s (stall_timeout_seconds: "
                f"{status.stall_timeout_seconds:g}) in {status.loop_place}"
            )
            logger.error("%s; the run is ended", self.stuck_because)
        self._interrupts_left -= 1
        self._interrupt()

    def _write(self, current: RunStatus) -> None:
        try:
            write_atomically(self._path, _RECORD.dump_json(current, indent=1).decode() + "\n", durable=False)
        except OSError as error:
            if not self._failing:
                logger.warning("`roll doctor` will not know how the run stands: %s", error)
            self._failing = True
        else:
            self._failing = False
