"""Printing to a reader that may be gone (`| head`, a closed terminal) or to a full disk."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_NOT_PRINTED = {errno.EPIPE, errno.ENOSPC, errno.EIO}


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
        if problem.errno not in _NOT_PRINTED or problem.filename is not None:
            raise
        silence(sys.stdout)
        if problem.errno != errno.EPIPE:
            say(f"cannot print: {problem.strerror}", error=True)
        return 1
