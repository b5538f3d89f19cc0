"""Plug-in trackers: their interface, their processes, and the driver's connection to them.

A tracker's process reads one JSON object per line from the driver, and writes one for each report to it. Everything
that the library prints goes to the tracker's log. At the end of the run the tracker records the status that the driver
sends, or a failure if the driver disappears. A library that hangs then is killed, so that no process is left. A resumed
run keeps its ids.

Logging never waits: records go through a bounded queue to a thread that feeds the process. Records that do not fit into
the queue are left out and counted; `metrics.jsonl` has everything. The run continues even if the process dies.
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
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any, ClassVar, Literal, Protocol

from roll.tracking.files import naming, write_atomically
from roll.tracking.logs import redact
from roll.tracking.run_directory import RunDirectory
from roll.tracking.summary import describe_error


@dataclass(frozen=True)
class TrackerRun:
    """Identity of a run, for one tracker."""

    name: str
    id: str
    """Random id of 21 lower-case letters and digits (as swanlab requires), chosen once for each tracker of a run."""
    folder: str
    """Folder for the files of this tracker alone. A tracker that needs the folder creates it."""
    resumed: bool
    """True if the tracker has seen this run before, under this id."""
    config: dict[str, Any]
    """The resolved configuration, secrets redacted."""


@dataclass(frozen=True)
class Ending:
    """The end of a run."""

    status: Literal["success", "failed", "interrupted"]
    summary: dict[str, Any]
    """Content of `summary.json`."""
    error: str | None = None

    @property
    def exit_code(self) -> int:
        """Exit code for trackers: 0 is a success."""
        return 0 if self.status == "success" else 1


class TrackerPlugIn(Protocol):
    """Interface of a plug-in tracker. All calls come from one thread, in order.

    If `log` raises, only that record is lost; the first such error is shown to the user.
    """

    Options: ClassVar[type]
    """Dataclass with the keys below `tracker_kwargs.<name>`; each field has a ``metadata["help"]``."""
    package: ClassVar[str | None]
    """Package that must be installed; None if no package is needed."""
    install: ClassVar[str]
    """Command that installs the package."""
    where: str
    """Address or folder where a user finds the metrics."""

    def __init__(self, run: TrackerRun, options: Any) -> None:
        """Begin or resume the run. Import libraries here and not before."""

    @staticmethod
    def secret(options: Any) -> str | None:
        """Return the environment variable that must have an API key with these options; None if no key is needed."""

    @staticmethod
    def mode(options: Any) -> str:
        """Return the destination of the metrics with these options, in a word or two: ``online``, ``offline``."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step. Values may be NaN or infinite; a resumed run may record a step again."""

    def finish(self, ending: Ending) -> None:
        """Write out everything. The process ends afterwards."""


def flat_summary(summary: Mapping[str, Any], prefix: str = "summary") -> dict[str, Any]:
    """Flatten a nested summary: ``{"val/last": {"math": 0.5}}`` becomes ``{"summary/val/last/math": 0.5}``.

    None values are left out.
    """
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            flat |= flat_summary(value, f"{prefix}/{key}")
        elif value is not None:
            flat[f"{prefix}/{key}"] = value
    return flat


ORPHAN_SECONDS = 60.0
"""Time in which a tracker may write out everything after the driver has disappeared."""
_LOOK_SECONDS = 1.0


def main() -> None:
    """Run a tracker's process, which the driver controls through standard input and output."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)
    # The driver handles Ctrl-C and sends the end of the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_as_an_orphan, args=(os.getppid(),), daemon=True).start()

    def reply(**words: Any) -> None:
        try:
            print(json.dumps(words, ensure_ascii=False), file=replies, flush=True)
        except OSError as error:
            print(f"the driver does not listen: {error}; {words}", file=sys.stderr)

    sys.exit(serve(sys.stdin.buffer, reply))


def serve(lines: Iterable[bytes], reply: Callable[..., None]) -> int:
    """Carry out the commands in the driver's lines; return the exit code."""
    incoming = iter(lines)
    beginning = json.loads(next(incoming))
    try:
        kind = resolve_name(beginning["class_path"])
        plug_in = kind(TrackerRun(**beginning["run"]), kind.Options(**beginning["options"]))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reply(failed=describe_error(error))
        return 1
    reply(where=plug_in.where)
    ending = Ending("failed", {}, "the process of the run died")
    for line in incoming:
        record = json.loads(line)
        if "ending" in record:
            ending = Ending(**record["ending"])
            break
        try:
            plug_in.log(record["metrics"], record["step"])
        except Exception as error:
            traceback.print_exc()
            reply(refused=describe_error(error), step=record["step"])
    try:
        plug_in.finish(ending)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reply(unfinished=describe_error(error))
        return 1
    reply(finished=True)
    return 0


def _end_as_an_orphan(driver: int) -> None:
    while os.getppid() == driver:
        time.sleep(_LOOK_SECONDS)
    time.sleep(ORPHAN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def open_plug_ins(
    classes: Mapping[str, str],
    options: Mapping[str, Mapping[str, Any]],
    run: RunDirectory,
    exp_name: str,
    config: dict[str, Any],
) -> list[TrackerProcess]:
    """Start the processes of plug-in trackers.

    ``classes``: name -> import path. ``options``: name -> its options, already checked. ``config``: the resolved
    configuration, secrets redacted.
    """
    if not classes:
        return []
    run.trackers.mkdir(exist_ok=True)
    known = json.loads(run.tracker_ids.read_text()) if run.tracker_ids.exists() else {}
    ids = {**{name: uuid.uuid4().hex[:21] for name in classes}, **known}
    write_atomically(run.tracker_ids, json.dumps(ids, indent=1) + "\n")
    trackers = []
    for name, path in classes.items():
        file_name = name.replace(":", ".")  # a name may be an import path
        folder = (run.trackers / file_name).absolute()
        identity = TrackerRun(exp_name, ids[name], str(folder), name in known, config)
        chosen = asdict(resolve_name(path).Options(**options.get(name, {})))
        trackers.append(TrackerProcess(name, path, identity, chosen, run.logs / f"tracker_{file_name}.out"))
    return trackers


_logger = logging.getLogger(__name__)

CAPACITY = 1000
"""Largest number of queued records. A record is a step, or a validation before the first step."""
_BOOT = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import main; main()"
_LAST_WORDS_SECONDS = 1.0
_START_PAUSES = (0.1, 1.0)
"""Seconds to wait after a refused start."""


class TrackerProcess:
    """The driver's handle of a plug-in tracker and its process, which starts in parallel with the run."""

    def __init__(
        self,
        name: str,
        class_path: str,
        run: TrackerRun,
        options: Mapping[str, Any],
        log: Path,
        capacity: int = CAPACITY,
    ) -> None:
        """Start the thread. ``options``: fields of the plug-in's `Options`; ``log``: file of the library's output."""
        self.name = name
        self.dropped = 0
        """Number of records that were lost."""
        self._log = log
        self._queue: queue.Queue[bytes | None] = queue.Queue(capacity)  # None: end of the records
        self._beginning = _line({"class_path": class_path, "run": asdict(run), "options": dict(options)})
        self._ending = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up: str | None = None
        """Reason why nothing is sent any more; None while records are sent."""
        self._finished = False
        self._refusals = 0
        self._thread = threading.Thread(target=self._feed, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the metrics of a step. Does not wait."""
        # JSON cannot encode numpy numbers.
        plain = {name: value if type(value) is int else float(value) for name, value in metrics.items()}
        record = _line({"metrics": plain, "step": int(step)})
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
        """Send the end of the run after all queued metrics. Returns at once; `wait` waits for the tracker."""
        self._ending = _line({"ending": asdict(ending)})
        self._stop_feeding()

    def wait(self, deadline: float) -> None:
        """Wait until the tracker has written out everything; kill it at ``deadline`` (a time of `time.monotonic`)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._give_up("was not done in time and is ended")
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)  # including processes that the library has started
            self._thread.join(_LAST_WORDS_SECONDS)
        while not self._queue.empty():
            self._leave_one_out()
        if self.dropped:
            self._warn(f"did not get {self.dropped} or more records of metrics; `metrics.jsonl` has them all")

    def _feed(self) -> None:
        try:
            self._process = process = self._start()
        except OSError as error:
            self._give_up(f"cannot start: {error}")
            return
        assert process.stdin is not None and process.stdout is not None
        listener = threading.Thread(target=self._listen, args=(process, process.stdout), daemon=True)
        listener.start()
        record: bytes | None = self._beginning
        try:
            with process.stdin as pipe:
                while record is not None:
                    pipe.write(record)
                    pipe.flush()
                    record = self._queue.get()
                pipe.write(self._ending)
        except OSError:
            # The process is gone; `_listen` reports the reason.
            self.dropped += record not in (None, self._beginning)
        listener.join()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process. A system under load refuses some starts, so two refusals are tried again."""
        command = [sys.executable, "-c", _BOOT, json.dumps([entry for entry in sys.path if entry])]
        with naming(self._log):
            output = open(self._log, "ab")
        with output:
            for pause in _START_PAUSES:
                try:
                    return _open(command, output)
                except OSError:
                    time.sleep(pause)
                    if self._given_up is not None:  # the run has ended: nothing would stop a process from now on
                        raise
            return _open(command, output)

    def _listen(self, process: subprocess.Popen[bytes], replies: IO[bytes]) -> None:
        """Read the replies until the process ends."""
        with replies:
            for line in replies:
                self._hear(json.loads(line))
        code = process.wait()
        if not self._finished:
            self._give_up(f"ended before the run did (exit code {code}): {self._log} has what it said")
        self._stop_feeding()

    def _stop_feeding(self) -> None:
        """Tell the feeding thread to stop after the queued records, without waiting. Drop records to make room."""
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
        """Stop sending, and log the reason of the first call."""
        if self._given_up is None:
            self._given_up = reason
            self._warn(reason)

    def _warn(self, text: str) -> None:
        _logger.warning("tracker %s %s", self.name, redact(text))

    def _leave_one_out(self) -> None:
        try:
            if self._queue.get_nowait() is not None:
                self.dropped += 1
        except queue.Empty:
            return


class PlugIns:
    """All plug-in trackers of a run. ``timeout_seconds``: their common time limit at the end."""

    def __init__(self, trackers: Sequence[TrackerProcess], timeout_seconds: float) -> None:
        self._trackers = trackers
        self._timeout_seconds = timeout_seconds

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the metrics of a step for each tracker. Does not wait."""
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def end(self, ending: Ending) -> None:
        """Send the end of the run to all trackers, and wait for them together. Safe to call twice."""
        trackers, self._trackers = self._trackers, ()
        deadline = time.monotonic() + self._timeout_seconds
        for tracker in trackers:
            tracker.end(ending)
        for tracker in trackers:
            tracker.wait(deadline)


def _open(command: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)


def _line(record: Mapping[str, Any]) -> bytes:
    """Return the record as a line of JSON. NaN and infinities are written as Python does, which `serve` can read."""
    return (json.dumps(record, ensure_ascii=True, default=str) + "\n").encode()
