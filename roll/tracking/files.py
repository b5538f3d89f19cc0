"""Files that stay readable after a crash, write errors with the path of the file, and safe printing.

A file is either replaced as a whole (the old content stays until the new content is on disk), or grows by whole lines
that are flushed one by one. So a reader finds at most one incomplete line, at the end. Printing tolerates a reader that
is gone (`| head`, a closed terminal) and a full disk.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TextIO

SYNC_PIECE = 64 * 1024 * 1024  # bytes


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to every `OSError` raised in the block, because a failed write does not know its path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror or error}", str(path)) from error


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace the content of a file by ``text`` (UTF-8), in one step.

    A reader sees either the old content or the new one; if ``durable``, this holds even after a power failure. Raises
    `OSError` with the path. No temporary file is left behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with naming(path):
        try:
            with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def sync_file(path: Path, on_synced: Callable[[int], None]) -> None:
    """Wait until a file is on disk. ``on_synced`` is called with the number of bytes of each synced piece.

    Large files are synced in pieces: a single call may take half an hour on a slow disk, which would look like a disk
    that hangs. Raises `OSError` with the path.
    """
    with naming(path):
        size = path.stat().st_size
        synced = _sync_pieces(path, size, on_synced) if size > SYNC_PIECE else 0
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    on_synced(size - synced)


def sync_folder(path: Path) -> None:
    """Wait until the entries of a folder are on disk. Without this, a new file may be missing after a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_pieces(path: Path, size: int, on_synced: Callable[[int], None]) -> int:
    """Sync the file in pieces and return the number of bytes: 0 if the file system does not support shared mappings."""
    with open(path, "r+b") as file:
        try:
            view = mmap.mmap(file.fileno(), size)
        except OSError as refusal:
            if refusal.errno != errno.ENODEV:
                raise
            return 0
        with view:
            for start in range(0, size, SYNC_PIECE):
                piece = min(SYNC_PIECE, size - start)
                view.flush(start, piece)
                on_synced(piece)
    return size


def remove_partials(path: Path) -> None:
    """Delete temporary files of other processes that were killed in `write_atomically` of this file."""
    for partial in path.parent.glob(f".{path.name}.*.partial"):
        if f".{os.getpid()}." not in partial.name:
            partial.unlink(missing_ok=True)


def json_number(value: object) -> float | int | None:
    """Convert a number (also of numpy) for JSON; NaN and infinities become None. Raises `TypeError` for non-numbers."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"{value!r} ({type(value).__name__}) is no number")


class JsonLines:
    """Writer that appends JSON objects to a file, one per line. Each is flushed before `append` returns.

    An existing file is continued. If a crash left an incomplete last line, it is removed first.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        with naming(self.path):
            _mend_last_line(self.path)
            self._file = open(self.path, "ab")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. Raises `ValueError` for numbers that are not finite, and `OSError` with the path.

        Texts are not escaped, except for single surrogates, which UTF-8 cannot encode.
        """
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with naming(self.path):
            self._file.write(line.encode("utf-8", errors="backslashreplace"))
            self._file.flush()

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Raises `OSError` with its path if the last writes failed."""
        with naming(self.path):
            self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file written by `JsonLines`. An incomplete last line is ignored.

    Raises `ValueError` with path and line number for any other invalid line.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse_object(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise ValueError(f"{path}, line {number}: not a JSON object")
    return records


def keep_lines(
    path: Path, wanted: Callable[[dict[str, Any]], bool], put_aside: Callable[[str], None] = lambda text: None
) -> None:
    """Rewrite a file of `JsonLines` in one step, with only the records for which ``wanted`` returns True.

    The lines of all others, if any, are first passed to ``put_aside`` as one text. Does nothing without a file.
    """
    if not path.is_file():
        return
    kept: list[str] = []
    others: list[str] = []
    for record in read_json_lines(path):
        (kept if wanted(record) else others).append(json.dumps(record, ensure_ascii=False) + "\n")
    if others:
        put_aside("".join(others))
    write_atomically(path, "".join(kept))


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _mend_last_line(path: Path) -> None:
    if not path.is_file():
        return
    content = path.read_bytes()
    tail = content.rpartition(b"\n")[2]
    if _parse_object(tail) is not None:
        with open(path, "ab") as file:
            file.write(b"\n")
    elif tail:
        os.truncate(path, len(content) - len(tail))


def say(text: str, *, error: bool = False) -> None:
    """Print ``text`` and flush, on standard error if ``error``, else on standard output. Ignore `OSError`."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        silence(stream)


def silence(stream: TextIO | None) -> None:
    """Redirect a broken stream and its buffered text to /dev/null, so that the interpreter does not fail at exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]  # `None.fileno` raises the suppressed error
        os.close(nowhere)


def printed(command: Callable[[], int]) -> int:
    """Run a command that prints its result. Return its exit code, or 1 if the output could not be written.

    No message is printed if the reader stopped reading early (`| head`).
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except OSError as problem:
        if problem.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO) or problem.filename is not None:
            raise
        silence(sys.stdout)
        if problem.errno != errno.EPIPE:
            say(f"cannot print: {problem.strerror}", error=True)
        return 1
