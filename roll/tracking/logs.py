"""Logs of a run: one file per role with secrets redacted, captured native output, and warnings on the terminal.

Redaction is a safety net, not a reason to print secrets. Engines, Ray and compilers bypass `logging`: they write to the
file descriptors 1 and 2 of a process and its children. A worker process redirects both permanently. The driver
redirects them during a run, but keeps its terminal for Python, so that the output of this project and of a user's
stages is still shown.

A thread of the driver follows the log files. It shows warnings and errors of this project and errors of libraries, or
everything if configured, each line with its role. It shows a limited number of lines and counts the rest, so that a
role that logs a thousand times a second does not flood the terminal. Roles on other hosts are included if they write to
the same folder.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from roll.tracking.files import naming, silence

STDOUT, STDERR = 1, 2


def give_away_output(log_dir: Path, role: str) -> None:
    """Redirect all output of this process and its children to ``<log_dir>/<role>.out``, permanently.

    Use it in worker processes only. Raises `OSError` naming the file.
    """
    target = _opened(log_dir, role)
    _flush((sys.stdout, sys.stderr))
    for descriptor in (STDOUT, STDERR):
        os.dup2(target, descriptor)
    os.close(target)
    sys.stdout, sys.stderr = _stream(STDOUT, sys.stdout), _stream(STDERR, sys.stderr)


@contextmanager
def native_output_kept(log_dir: Path, role: str) -> Iterator[None]:
    """During a block, redirect native output, output of child processes and library logs to ``<log_dir>/<role>.out``.

    Python's `sys.stdout` and `sys.stderr` still go where they went before. Raises `OSError` naming the file.
    """
    target = _opened(log_dir, role)
    before = {STDOUT: sys.stdout, STDERR: sys.stderr}
    kept = {descriptor: os.dup(descriptor) for descriptor in before}
    try:
        _flush(before.values())
        # Only streams that use these descriptors are replaced; tests and notebooks have streams of their own.
        if _descriptor(sys.stdout) == STDOUT:
            sys.stdout = _stream(kept[STDOUT], sys.stdout)
        if _descriptor(sys.stderr) == STDERR:
            sys.stderr = _stream(kept[STDERR], sys.stderr)
        for descriptor in before:
            os.dup2(target, descriptor)
        with _stream(target, None) as file, _library_handlers_led_to(file, [*before.values(), sys.stdout, sys.stderr]):
            yield
    finally:
        _flush([sys.stdout, sys.stderr])
        for descriptor, saved in kept.items():
            os.dup2(saved, descriptor)
        sys.stdout, sys.stderr = before[STDOUT], before[STDERR]
        for descriptor in (*kept.values(), target):
            os.close(descriptor)


def _opened(log_dir: Path, role: str) -> int:
    path = role_file(log_dir, role, ".out")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _stream(descriptor: int, like: TextIO | None) -> TextIO:
    """Return a line-buffered stream, so that the last lines of a process that dies are written."""
    encoding = like.encoding if like is not None else "utf-8"
    return open(descriptor, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None


@contextmanager
def _library_handlers_led_to(file: TextIO, terminal: Collection[TextIO | None]) -> Iterator[None]:
    """During a block, replace handlers of library loggers that write to the terminal by ones that write to ``file``.

    The handlers of the root logger belong to the program and are kept. Handlers are replaced rather than redirected,
    because some (`logging.lastResort`) have a fixed stream.
    """
    found = [
        (logger, handler)
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger)
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in terminal
    ]
    with ExitStack() as undo:
        for logger, handler in found:
            stand_in = logging.StreamHandler(file)
            stand_in.level, stand_in.formatter, stand_in.filters = handler.level, handler.formatter, handler.filters
            logger.removeHandler(handler)
            undo.callback(logger.addHandler, handler)
            logger.addHandler(stand_in)
            undo.callback(logger.removeHandler, stand_in)
        yield


def _flush(streams: Iterable[TextIO | None]) -> None:
    for stream in filter(None, streams):
        try:
            stream.flush()
        except OSError:
            silence(stream)


_logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
MOST_LINES = 20
"""Largest number of lines to show from one file every `LOOK_SECONDS`."""
MOST_BYTES = 256 * 1024
"""Largest number of bytes to read from one file every `LOOK_SECONDS`."""
LONGEST_LINE = 2000

Shown = Literal["warnings", "all"]

_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) (?P<logger>\S+): ")
"""Beginning of a log record in the format of this module."""
_PRINTED_ERROR = re.compile(
    r"""(?:\([^)]*\)\ ?)?\[?(?:ERROR|CRITICAL|FATAL)\b       # vLLM: (EngineCore pid=7) ERROR 06-01 12:00:00 ...
      | \[\d{4}-\d\d-\d\d[^\]]*\]\ \[(?:ERROR|CRITICAL)\]   # DeepSpeed: [2026-06-01 12:00:00,000] [ERROR] ...
      | \[\d{4}-\d\d-\d\d\ [\d:,.]+\ [EF]\                   # Ray: [2026-06-01 12:00:00,000 E 7 7] ...
      | (?:\[rank\d+\]:)?\[?[EF]\d{4}\ \d\d:\d\d:\d\d         # torch: [rank0]:[E601 12:00:00 ...
      | Fatal\ Python\ error | terminate\ called\ after
    """,
    re.VERBOSE,
)
"""Beginning of an error that a library prints."""


@dataclass
class _Grown:
    """A log file and the position up to which it has been read."""

    path: Path
    offset: int = 0
    rest: bytes = b""
    """Beginning of a line that is not complete yet."""
    showing: bool = False
    """True if the record that the last line belongs to is shown; its further lines are then shown, too."""


class LogWatch:
    """A thread that shows new lines in the logs of a folder until it is closed."""

    def __init__(self, folder: Path, shown: Shown, show: Callable[[str], None]) -> None:
        """Start the thread, which calls ``show`` with each new line. Existing content of the files is not shown."""
        self._folder = folder
        self._shown = shown
        self._show = show
        self._files = {path: _Grown(path, path.stat().st_size) for path in self._paths()}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_again_and_again, name="log watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show all lines written up to now, then stop."""
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
        """Return the files to watch.

        The driver's own log is left out, because it is on the console already. Files of trackers are left out unless
        everything is shown, because the driver reports their failures.
        """
        paths = sorted([*self._folder.glob("*.log"), *self._folder.glob("*.out")])
        hidden = ("driver.log",) if self._shown == "all" else ("driver.log", "tracker_")
        return [path for path in paths if not path.name.startswith(hidden)]

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
            ours = record["logger"].partition(".")[0] == "roll"
            file.showing = record["level"] in ("ERROR", "CRITICAL") or (record["level"] == "WARNING" and ours)
        return file.showing and bool(line.strip())


MASK = "***"

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SHORTEST_SECRET = 6
"""Length below which values of environment variables are not redacted, because they may occur in ordinary text."""

_SECRET_WORD = re.compile(r"secret|password|passwd|(?:api|wandb|access|private)[_-]?key|credential")
_TOKENIZER_WORD = re.compile(r"(?:bos|eos|pad|unk|sep|cls|mask|stop)_token")
# A name is matched only from its first character and without backtracking, so the time is linear in its length.
_NAME = re.compile(r"""(?<![\w.-])(?P<name>[\w.-]++)["']?[ \t]*+[:=][ \t]*+""")
_VALUE = re.compile(r""""[^"\n]*"|'[^'\n]*'|[^\s,;&})\]]+""")
_BEARER = re.compile(r"(?P<name>\bbearer\s+)[\w.~+/=-]+", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?P<name>\w://[^\s:/@]*:)[^\s/@]+(?=@)")


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with everything that looks like a secret replaced by ``***``.

    Redacted are values after a secret name (`is_secret_name`), values of environment variables with secret names,
    bearer tokens, and passwords in URLs. ``environ`` defaults to the process environment.
    """
    variables = (os.environ if environ is None else environ).items()
    secrets = {value for name, value in variables if len(value) >= _SHORTEST_SECRET and is_secret_name(name)}
    for value in sorted(secrets, key=len, reverse=True):  # longest first: a secret may be part of a longer one
        text = text.replace(value, MASK)
    for pattern in (_BEARER, _URL_PASSWORD):
        text = pattern.sub(rf"\g<name>{MASK}", text)
    return _mask_assignments(text)


def _mask_assignments(text: str) -> str:
    """Mask values after secret names. Names and values are searched separately, so the time is linear in the text."""
    pieces, copied = [], 0
    for name in _NAME.finditer(text):
        value = _VALUE.match(text, name.end()) if is_secret_name(name["name"]) else None
        if value is not None and name.start() >= copied:
            pieces += [text[copied : name.end()], MASK]
            copied = value.end()
    return "".join([*pieces, text[copied:]])


def is_secret_name(name: str) -> bool:
    """Return True if a name marks its value as a secret: ``hf_token``, ``api_key``; not ``max_new_tokens`` or
    ``eos_token``."""
    name = name.lower()
    named_token = name.endswith("token") and not _TOKENIZER_WORD.search(name)
    return named_token or _SECRET_WORD.search(name) is not None


class _RedactingFormatter(logging.Formatter):
    """Formatter that redacts the whole message, including the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _TerminalHandler(logging.Handler):
    """Handler that writes to the current `sys.stderr`, so that lines appear above a live view and not inside it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr)
        except OSError:
            self.handleError(record)


def configure_logging(log_dir: Path, role: str, console: bool = False) -> Path:
    """Write this process's log to ``<log_dir>/<role>.log`` and, with ``console``, also warnings to the terminal.

    The log level is INFO for this project and WARNING for libraries. Python's own warnings (`warnings`) go to the file
    only. A second call replaces the handlers of the first. Returns the path; raises `OSError` if it cannot be opened.
    """
    path = role_file(log_dir, role, ".log")
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")]
    if console:
        terminal = _TerminalHandler()
        terminal.setLevel(logging.WARNING)
        terminal.addFilter(lambda record: record.name != "py.warnings")
        handlers.append(terminal)
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler.formatter, _RedactingFormatter):  # ours; handlers of other code stay
            root.removeHandler(handler)
            handler.close()
    for handler in handlers:
        handler.setFormatter(_RedactingFormatter(_FORMAT))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("roll").setLevel(logging.INFO)
    logging.captureWarnings(True)
    return path


def last_lines(path: Path, count: int, max_bytes: int) -> list[str]:
    """Return up to ``count`` last lines of a log, reading only its last ``max_bytes``."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        lines = file.read(max_bytes).splitlines()
    return [line.decode("utf-8", errors="replace") for line in lines[-count:]]


def role_file(log_dir: Path, role: str, suffix: str) -> Path:
    """Return the path of a role's file, with a safe file name: ``rewards.math/0`` -> ``rewards.math_0.log``."""
    name = re.sub(r"[^\w.-]+", "_", role).strip(".") or "unnamed"
    return log_dir / f"{name}{suffix}"
