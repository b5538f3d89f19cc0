"""The driver's end of a plug-in tracker: a bounded queue, a thread that feeds a process, and a deadline.

Logging never waits. Records that do not fit into the queue are left out and counted. This is reported once when it
begins and once at the end; `metrics.jsonl` has everything. The run continues whatever becomes of the process.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from roll.tracking.files import naming
from roll.tracking.logs import redact
from roll.tracking.plugins.contract import Ending, TrackerRun

_logger = logging.getLogger(__name__)

CAPACITY = 1000
"""Most records that wait. A record is a step, or a validation before the first step."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from roll.tracking.plugins.host import main; main()"
)  # fmt: skip
_LAST_WORDS_SECONDS = 1.0


class TrackerProcess:
    """A plug-in tracker and its process, which starts in parallel with the run."""

    def __init__(
        self,
        name: str,
        class_path: str,
        run: TrackerRun,
        options: Mapping[str, Any],
        log: Path,
        capacity: int = CAPACITY,
    ) -> None:
        """Start the thread. ``options``: fields of the plug-in's `Options`. ``log`` takes the library's output."""
        self.name = name
        self.dropped = 0
        """Number of records that did not get through."""
        self._log = log
        self._queue: queue.Queue[bytes | None] = queue.Queue(capacity)
        self._beginning = _line({"class_path": class_path, "run": asdict(run), "options": dict(options)})
        self._ending = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up: str | None = None
        """The reason why nothing is sent any more."""
        self._finished = False
        self._refusals = 0
        self._thread = threading.Thread(target=self._feed, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the metrics of a step. Does not wait."""
        record = _line({"metrics": {name: _plain(value) for name, value in metrics.items()}, "step": int(step)})
        if self._given_up is not None:
            self.dropped += 1
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._warn("does not keep up: metrics are left out from here on, and counted")

    def end(self, ending: Ending) -> None:
        """Queue the end of the run, after all that still waits. Does not wait; `wait` does."""
        self._ending = _line({"ending": asdict(ending)})
        self._stop_feeding()

    def wait(self, deadline: float) -> None:
        """Wait until the tracker has written everything out, or until the deadline (of `time.monotonic`).

        A tracker that is late is killed.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._give_up("was not done in time and is ended")
            self._kill()
            self._thread.join(_LAST_WORDS_SECONDS)
        self._count_what_waits()
        if self.dropped:
            self._warn(f"did not get {self.dropped} or more records of metrics; `metrics.jsonl` has them all")

    def _feed(self) -> None:
        try:
            with naming(self._log), open(self._log, "ab") as output:
                self._process = process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, json.dumps([entry for entry in sys.path if entry])],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            self._give_up(f"cannot start: {error}")
            return
        assert process.stdin is not None and process.stdout is not None
        listener = threading.Thread(target=self._listen, args=(process, process.stdout), daemon=True)
        listener.start()
        try:
            self._pour_into(process.stdin)
        except OSError:
            # The process is gone; the listener reports why.
            self.dropped += 1
        listener.join()

    def _pour_into(self, pipe: IO[bytes]) -> None:
        with pipe:
            pipe.write(self._beginning)
            pipe.flush()
            while (record := self._queue.get()) is not None:
                pipe.write(record)
                pipe.flush()
            pipe.write(self._ending)

    def _listen(self, process: subprocess.Popen[bytes], replies: IO[bytes]) -> None:
        """Read the replies until the process ends, which may happen at any time."""
        with replies:
            for line in replies:
                self._hear(json.loads(line))
        code = process.wait()
        if not self._finished:
            self._give_up(f"ended before the run did (exit code {code}): {self._log} has what it said")
        self._stop_feeding()

    def _stop_feeding(self) -> None:
        """Wake the feeding thread, which then stops waiting for metrics. Never waits itself."""
        while True:
            try:
                self._queue.put_nowait(None)
                return
            except queue.Full:
                self._leave_one_out()

    def _hear(self, words: Mapping[str, Any]) -> None:
        if "where" in words:
            _logger.info("tracker %s: %s", self.name, redact(str(words["where"])))
        elif "failed" in words:
            self._give_up(f"cannot begin: {words['failed']}; {self._log} has more")
        elif "unfinished" in words:
            self._give_up(f"could not write out the end of the run: {words['unfinished']}")
        elif "finished" in words:
            self._finished = True
        elif "refused" in words:
            self.dropped += 1
            self._refusals += 1
            if self._refusals == 1:
                self._warn(f"refused the metrics of step {words['step']}: {words['refused']} (said once)")

    def _give_up(self, reason: str) -> None:
        """Stop sending and report the reason, the first time only."""
        if self._given_up is None:
            self._given_up = reason
            self._warn(reason)

    def _warn(self, text: str) -> None:
        _logger.warning("tracker %s %s", self.name, redact(text))

    def _kill(self) -> None:
        """Kill the process and all that the library has started."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _count_what_waits(self) -> None:
        while not self._queue.empty():
            self._leave_one_out()

    def _leave_one_out(self) -> None:
        try:
            if self._queue.get_nowait() is not None:
                self.dropped += 1
        except queue.Empty:
            return


class PlugIns:
    """All plug-in trackers of a run."""

    def __init__(self, trackers: Sequence[TrackerProcess], timeout_seconds: float) -> None:
        """Keep the trackers. ``timeout_seconds``: their common time limit at the end."""
        self._trackers = list(trackers)
        self._timeout_seconds = timeout_seconds

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the metrics of a step for each tracker. Does not wait."""
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def end(self, ending: Ending) -> None:
        """Report the end of the run to all trackers and wait for them together. Safe to call twice."""
        trackers, self._trackers = self._trackers, []
        deadline = time.monotonic() + self._timeout_seconds
        for tracker in trackers:
            tracker.end(ending)
        for tracker in trackers:
            tracker.wait(deadline)


def _line(record: Mapping[str, Any]) -> bytes:
    """Return the record as a line of JSON. NaN and infinities are written in Python's way, which the host reads."""
    return (json.dumps(record, ensure_ascii=True, default=str) + "\n").encode()


def _plain(value: float) -> float | int:
    """Convert numpy's numbers, which JSON does not know."""
    return value if type(value) in (int, float) else float(value)
