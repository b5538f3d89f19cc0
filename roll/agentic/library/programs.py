"""Helper programs for environments. They end with all their descendants, even if this process is killed.

`Shared` keeps one program per key in this process, for all environments that use it. The first user starts it, and it
is ended after the last. A program that died is replaced at the next use; the episodes that were using it fail.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import IO, Any, Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

_GUARD = """
import os, signal, subprocess, sys, threading
program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
def end():
    try:
        os.killpg(program.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
threading.Thread(target=lambda: (sys.stdin.read(), end()), daemon=True).start()
code = program.wait()
end()
sys.exit(code if code >= 0 else 128 - code)
"""
"""Wrapper program: kills the wrapped program's group at the end of its own input, so also when this process dies."""
_LAST_LINES = 20


def guarded(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in a new process group, which is killed when ``stdin`` of the returned process is closed.

    ``options`` are those of `subprocess.Popen`. The exit code is the program's, or 128 plus the signal that killed it.
    """
    guard = [sys.executable, "-I", "-S", "-c", _GUARD, *command]
    return subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True, **options)


class LastWords:
    """Reads the output of a program, passes it to the log, and keeps the last lines."""

    def __init__(self, output: IO[bytes], name: str) -> None:
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._name = name
        self._thread = threading.Thread(target=self._read, args=[output], name=f"output of {name[:40]}", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        """Return the end of the output on one line. It is complete if the program has ended."""
        self._thread.join(0.5)
        told = " | ".join(self._lines)[-600:]
        return f"the end of its output: {told}" if told else "it wrote nothing"

    def _read(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                text = line.decode(errors="replace").rstrip()
                if text:
                    self._lines.append(text)
                    logger.info("%s: %s", self._name, text)


class Program(Protocol):
    """A running program."""

    def is_alive(self) -> bool:
        """Return True if the program can be used."""

    def end(self) -> None:
        """End the program and all its descendants. May be called twice."""


Started = TypeVar("Started", bound=Program)


class Shared(Generic[Started]):
    """Programs of one kind in this process, by the arguments of `take`."""

    def __init__(self, start: Callable[..., Started]) -> None:
        """``start`` starts a program from the arguments of `take`, which identify it."""
        self._start = start
        self._lock = threading.Lock()
        self._starting: dict[Hashable, threading.Lock] = {}
        self._running: dict[Hashable, Started] = {}
        self._users: dict[int, int] = {}
        """Number of users by `id` of the program."""

    def take(self, *key: Hashable) -> Started:
        """Return the program for this key, starting it if necessary. Raises the errors of ``start``."""
        with self._lock:
            starting = self._starting.setdefault(key, threading.Lock())
        with starting:
            with self._lock:
                found = self._running.get(key)
                if found is not None and found.is_alive():
                    self._users[id(found)] += 1
                    return found
            made = self._start(*key)
            with self._lock:
                self._running[key] = made
                self._users[id(made)] = 1
            return made

    def give_back(self, program: Started) -> None:
        """Release the program, and end it if this was its last user."""
        with self._lock:
            self._users[id(program)] -= 1
            if self._users[id(program)]:
                return
            del self._users[id(program)]
            for key, each in list(self._running.items()):
                if each is program:
                    del self._running[key]
        program.end()
