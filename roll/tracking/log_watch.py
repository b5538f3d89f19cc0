"""Console output for processes that have no console: lines of the run's log files, with the role in front.

It shows warnings and errors of this project and errors of libraries, or everything if asked. A thread of the driver
reads the growth of the files. It reads and shows a bounded amount and counts the rest, so a role that logs a thousand
times a second costs a few lines. Roles on other hosts are seen if they write to the same folder.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from roll.tracking.logs import redact

_logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
MOST_LINES = 20
"""Most lines shown of one file at a look."""
MOST_BYTES = 256 * 1024
"""Most bytes read of one file at a look."""
LONGEST_LINE = 2000

Shown = Literal["warnings", "all"]

_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) (?P<logger>\S+): ")
"""The beginning of a record of `roll.tracking.logs`."""
_PRINTED_ERROR = re.compile(
    r"""(?:\([^)]*\)\ ?)?\[?(?:ERROR|CRITICAL|FATAL)\b       # vLLM: (EngineCore pid=7) ERROR 06-01 12:00:00 ...
      | \[\d{4}-\d\d-\d\d[^\]]*\]\ \[(?:ERROR|CRITICAL)\]   # DeepSpeed: [2026-06-01 12:00:00,000] [ERROR] ...
      | \[\d{4}-\d\d-\d\d\ [\d:,.]+\ [EF]\                   # Ray: [2026-06-01 12:00:00,000 E 7 7] ...
      | (?:\[rank\d+\]:)?\[?[EF]\d{4}\ \d\d:\d\d:\d\d         # torch: [rank0]:[E601 12:00:00 ...
      | Fatal\ Python\ error | terminate\ called\ after
    """,
    re.VERBOSE,
)
"""The beginnings of errors that libraries print."""


@dataclass
class _Grown:
    """A log file, as far as it has been read."""

    path: Path
    offset: int = 0
    rest: bytes = b""
    """Beginning of a line whose end is not written yet."""
    showing: bool = False
    """True if the record of the last line is shown."""


class LogWatch:
    """Thread that shows the logs of a folder as they grow, until it is closed."""

    def __init__(self, folder: Path, shown: Shown, show: Callable[[str], None]) -> None:
        """Start the thread. It calls ``show`` with each new line; the present content of the files is not shown."""
        self._folder = folder
        self._shown = shown
        self._show = show
        self._files = {path: _Grown(path, path.stat().st_size) for path in self._paths()}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_again_and_again, name="log watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show what has been written up to now, then stop."""
        self._closed.set()
        self._thread.join(timeout=10 * LOOK_SECONDS)

    def _look_again_and_again(self) -> None:
        closed = False
        while not closed:
            closed = self._closed.wait(LOOK_SECONDS)
            try:
                self.look()
            except OSError as error:
                _logger.warning("logs of roles are not shown any more: %s", error)
                return

    def look(self) -> None:
        """Show the new lines of all files."""
        for path in self._paths():
            file = self._files.setdefault(path, _Grown(path))
            lines = [line for line in self._new_lines(file) if self._is_shown(file, line)]
            for line in lines[:MOST_LINES]:
                self._show(f"{path.stem}: {redact(line[:LONGEST_LINE])}")
            if len(lines) > MOST_LINES:
                self._show(f"{path.stem}: {len(lines) - MOST_LINES} more lines in {path}")

    def _paths(self) -> list[Path]:
        """Return the files to watch: not the driver's own log, which is on the console already.

        Trackers' files are left out unless everything is shown, since the driver reports their failures.
        """
        paths = sorted([*self._folder.glob("*.log"), *self._folder.glob("*.out")])
        told = [path for path in paths if path.name != "driver.log"]
        return told if self._shown == "all" else [path for path in told if not path.name.startswith("tracker_")]

    def _new_lines(self, file: _Grown) -> Iterator[str]:
        size = file.path.stat().st_size
        if size - file.offset > MOST_BYTES:
            file.offset, file.rest = size - MOST_BYTES, b""
        with open(file.path, "rb") as stream:
            stream.seek(file.offset)
            data = stream.read(MOST_BYTES)
        file.offset += len(data)
        *lines, file.rest = (file.rest + data).split(b"\n")
        file.rest = file.rest[-MOST_BYTES:]
        yield from (line.decode("utf-8", errors="replace").rstrip("\r") for line in lines)

    def _is_shown(self, file: _Grown, line: str) -> bool:
        if self._shown == "all":
            return bool(line.strip())
        if file.path.suffix == ".out":
            return _PRINTED_ERROR.match(line) is not None
        record = _RECORD.match(line)
        if record is not None:
            file.showing = _matters(record["level"], record["logger"])
        return file.showing and bool(line.strip())


def _matters(level: str, logger: str) -> bool:
    if level in ("ERROR", "CRITICAL"):
        return True
    return level == "WARNING" and (logger == "roll" or logger.startswith("roll."))
