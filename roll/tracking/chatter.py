"""Captured native output: everything that libraries print goes to one file per process, from Python or native code.

Engines, Ray and compilers write to the file descriptors of a process and of its children, bypassing `logging`. A
process of a role redirects both descriptors for good. The driver redirects them for the length of a run and keeps a way
to its terminal for Python, so that output of our own code or of a user's stage is still seen.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from roll.tracking.files import naming
from roll.tracking.logs import role_file
from roll.tracking.output import silence

STDOUT, STDERR = 1, 2


def give_away_output(log_dir: Path, role: str) -> Path:
    """Redirect all output of this process and its children to ``<log_dir>/<role>.out`` for good; return the file.

    For worker processes only. Raises `OSError` naming the file.
    """
    path = role_file(log_dir, role, ".out")
    target = _opened(path)
    _flush((sys.stdout, sys.stderr))
    for descriptor in (STDOUT, STDERR):
        os.dup2(target, descriptor)
    os.close(target)
    sys.stdout, sys.stderr = _stream(STDOUT, sys.stdout), _stream(STDERR, sys.stderr)
    return path


@contextmanager
def native_output_kept(log_dir: Path, role: str) -> Iterator[None]:
    """Redirect native output, children's output and library logs to ``<log_dir>/<role>.out`` while this is open.

    Output of Python code still goes where it went. Raises `OSError` naming the file.
    """
    target = _opened(role_file(log_dir, role, ".out"))
    before = {STDOUT: sys.stdout, STDERR: sys.stderr}
    kept = {descriptor: os.dup(descriptor) for descriptor in before}
    try:
        _flush(before.values())
        # Only a stream that ends at the descriptor has to bypass it: tests and notebooks have installed other streams.
        sys.stdout = _led_to(kept[STDOUT], STDOUT, before[STDOUT])
        sys.stderr = _led_to(kept[STDERR], STDERR, before[STDERR])
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


def _opened(path: Path) -> int:
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _stream(descriptor: int, like: TextIO | None) -> TextIO:
    """Return a line-buffered stream, so that the last lines of a process that dies are in the file."""
    encoding = like.encoding if like is not None else "utf-8"
    return open(descriptor, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)


def _led_to(descriptor: int, around: int, stream: TextIO) -> TextIO:
    return _stream(descriptor, stream) if _descriptor(stream) == around else stream


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None


@contextmanager
def _library_handlers_led_to(file: TextIO, terminal: Collection[TextIO | None]) -> Iterator[None]:
    """Replace handlers of library loggers that write to the terminal by handlers that write to ``file``.

    The root logger's handlers are the program's own and stay. Handlers are replaced, not redirected, because the stream
    of some (`logging.lastResort`) is fixed.
    """
    loggers = [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]
    replaced = [
        (logger, handler, _like(handler, file))
        for logger in loggers
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in terminal
    ]
    for logger, handler, stand_in in replaced:
        logger.removeHandler(handler)
        logger.addHandler(stand_in)
    try:
        yield
    finally:
        for logger, handler, stand_in in replaced:
            logger.removeHandler(stand_in)
            logger.addHandler(handler)


def _like(handler: logging.Handler, file: TextIO) -> logging.Handler:
    """Return a handler with the same level, formatter and filters that writes to ``file``."""
    stand_in = logging.StreamHandler(file)
    stand_in.setLevel(handler.level)
    stand_in.setFormatter(handler.formatter)
    for each in handler.filters:
        stand_in.addFilter(each)
    return stand_in


def _flush(streams: Iterable[TextIO | None]) -> None:
    for stream in filter(None, streams):
        try:
            stream.flush()
        except OSError:
            silence(stream)
