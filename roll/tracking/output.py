"""What is printed for a reader who may have gone away (`| head`, a closed terminal) or a disk that is full."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_NOT_PRINTED = {errno.EPIPE, errno.ENOSPC, errno.EIO}


def say(text: str, *, error: bool = False) -> None:
    """Print ``text`` at once, on the standard output or ``error``. Where that is not possible nothing else happens."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        silence(stream)


def silence(stream: TextIO | None) -> None:
    """Lead a stream that cannot be written to nowhere, with what it still holds: else the interpreter fails when it
    ends."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]  # None has no descriptor, as others that are no files
        os.close(nowhere)


def printed(command: Callable[[], int]) -> int:
    """The exit code of a command that prints what it found; 1 where that did not arrive. A reader who has read enough
    is not told so."""
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
