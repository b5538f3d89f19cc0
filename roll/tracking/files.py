"""Files that stay readable after a crash, errors that say which file could not be written, and printing.

A file is either replaced as a whole (the old content stays until the new one is on disk) or grows by whole lines, each
flushed, so a reader meets at most one torn line, at the end. The reader of what is printed may be gone (`| head`, a
closed terminal), or its disk full.
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
    """Make every `OSError` of the block name ``path``: a failed write knows only a file number."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror or error}", str(path)) from error


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file by ``text`` (UTF-8), in one step.

    A reader sees the old content or the new; if ``durable``, also after a power cut. Raises `OSError` with the path; no
    temporary file is left behind.
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
    """Wait until a file is on the disk; ``on_synced`` is called with the bytes synced, piece by piece for a large file.

    A single call for all of it may take half an hour on a slow disk, which would look like a dead one. Raises `OSError`
    with the path.
    """
    with naming(path):
        size = path.stat().st_size
        synced = _sync_pieces(path, size, on_synced) if size > SYNC_PIECE else 0
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    on_synced(size - synced)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk: a new file that is synced may still lose its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_pieces(path: Path, size: int, on_synced: Callable[[int], None]) -> int:
    """Sync the file in pieces and return the bytes synced: 0 if the file system has no shared mappings."""
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
    """Delete the temporary files of processes that were killed while they replaced this file."""
    for partial in path.parent.glob(f".{path.name}.*.partial"):
        if f".{os.getpid()}." not in partial.name:
            partial.unlink(missing_ok=True)


def json_number(value: object) -> float | int | None:
    """Return a number (numpy's too) as JSON can hold it: None for NaN and infinities. Raises `TypeError` for others."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"{value!r} ({type(value).__name__}) is no number")


class JsonLines:
    """Writer that appends one JSON object per line, each flushed before `append` returns.

    An existing file is continued. A line torn by a crash is cut off first, so that it cannot damage the next one.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        with naming(self.path):
            _mend_last_line(self.path)
            self._file = open(self.path, "ab")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. Raises `ValueError` for numbers that are not finite, and `OSError` with the path.

        Text stays readable, not escaped. Half of a surrogate pair, which UTF-8 cannot hold, becomes its JSON escape.
        """
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with naming(self.path):
            self._file.write(line.encode("utf-8", errors="backslashreplace"))
            self._file.flush()

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Raises `OSError` with its path if the last writes failed."""
        with naming(self.path):
            self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines of a file that `JsonLines` wrote; a torn last line is left out.

    Raises `ValueError` with path and line number for a broken line anywhere else.
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
    """Rewrite a file of `JsonLines` with the wanted records, in one step.

    The lines of the other records, if any, are passed to ``put_aside`` first. Without a file, nothing happens.
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
    """Print ``text`` at once, on standard output or, with ``error``, on standard error. Failures are ignored."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        silence(stream)


def silence(stream: TextIO | None) -> None:
    """Redirect a broken stream to nowhere, with what it still buffers. Otherwise the interpreter fails at exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]  # None has no descriptor, as others that are no files
        os.close(nowhere)


def printed(command: Callable[[], int]) -> int:
    """Return the exit code of a command that prints its result; 1 if the output could not be written.

    A reader that stops reading early (`| head`) gets no message.
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
