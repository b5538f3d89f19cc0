"""Untrusted Python code, run in a process of its own with as much isolation as the system allows.

Guaranteed everywhere: limits of time, memory, output, files and processes; an empty environment; no process and no file
of the program left behind in its folder; an answer within the wall-clock limit and a short grace. Further isolation
(network, files, users) depends on the system, and each result reports it. If untrusted code could read the secrets of
this user's other processes, it is not run unless the caller accepts that. See docs/tools.md.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import logging
import marshal
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from roll.sandbox.filesystem import remove_folder

Level = Literal["namespaces", "own_user", "same_user"]
LEVELS: tuple[Level, ...] = ("namespaces", "own_user", "same_user")
"""From strong to weak: new namespaces and a private file system; a user of its own (from root); neither."""

KilledBecause = Literal["time", "cpu_time", "memory", "processes", "disk", "output"]

GRACE_SECONDS = 10.0
"""Time that the supervisor may take to clean up after the program's limit, on a busy machine."""
_MEBIBYTE = 2**20
_PACKAGES = str(Path(__file__).resolve().parents[2])
_START = "import sys; sys.path.append(sys.argv[1]); from roll.sandbox.supervisor import main; main()"
_VISIBLE = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache")
_logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """Upper limits of what a program may use."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    """Processor time of one process."""
    memory_bytes: int = 512 * _MEBIBYTE
    """Address space of one process, and memory of all processes together."""
    disk_bytes: int = 16 * _MEBIBYTE
    """Size of all files together."""
    file_bytes: int = 8 * _MEBIBYTE
    """Size of one file."""
    processes: int = 16
    """Number of processes and threads."""
    open_files: int = 64
    output_bytes: int = 64 * 1024
    """Bytes of standard output and of standard error each; a program that writes more is killed."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"the limit `{name}` of the sandbox is {value}; it must be positive")


@dataclass(frozen=True)
class Protections:
    """The isolation that was in place around a program."""

    level: Level
    network: bool
    """True if the program could open no socket, or none that leads anywhere."""
    files: bool
    """True if the program saw only its own files and the interpreter's, and none of its own is left."""
    processes: bool
    """True if the program could neither see nor affect other processes by memory, environment or signals."""
    system_calls: bool
    """True if system calls that the program has no use for were blocked."""
    process_limit: bool
    """True if the process limit counts exactly this program's processes; otherwise the supervisor watches the
    number."""


@dataclass(frozen=True)
class SandboxResult:
    """The end of a program. The outputs are decoded with replacement characters."""

    stdout: str
    stderr: str
    returncode: int
    """Exit status; a negative number is the signal that ended the program."""
    timed_out: bool
    """True if the program reached the limit of wall-clock time or of processor time."""
    killed_because: KilledBecause | None
    """The limit for which the program was killed, if any."""
    seconds: float
    protections: Protections


class SandboxUnavailable(RuntimeError):
    """Raised if untrusted code cannot be run here safely. The message says what would have to change."""


class SandboxFailed(RuntimeError):
    """Raised if the sandbox itself failed, not the program in it. The message has the cause."""


class Sandbox:
    """A runner of programs at the strongest level that works on this machine.

    The level is found at the first run, and logged if it is weak.
    """

    def __init__(
        self, *, interpreter: str | None = None, levels: Sequence[Level] = LEVELS, accept_weak: bool = False
    ) -> None:
        """Choose the interpreter of the programs and the levels to try.

        The default ``interpreter`` is the running one, without its site-packages. ``accept_weak``: run code even as
        `same_user`, where it can read what this user can read, such as the environment of the user's other processes.
        """
        self._interpreter = os.path.realpath(interpreter or sys.executable)
        self._levels = [each for each in LEVELS if each in levels]
        self._accept_weak = accept_weak
        self._level: Level | None = None
        self._choosing = threading.Lock()

    def run(self, code: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
        """Run a program to its end. Raises `SandboxUnavailable` and `SandboxFailed`, but never for the program's own
        errors."""
        return _from_outside(self.run_async(code, stdin=stdin, limits=limits))

    async def run_async(self, code: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
        """Run a program like `run`, without blocking the event loop. Cancelling ends the program."""
        level = self._level if self._level is not None else await asyncio.to_thread(self.check)
        return await _run(self._interpreter, level, code, stdin, limits or Limits())

    def check(self) -> Level:
        """Return the level of this machine, found at the first call. Raises `SandboxUnavailable`."""
        with self._choosing:
            if self._level is None:
                self._level = self._choose()
            return self._level

    def _choose(self) -> Level:
        refused: list[str] = []
        for level in self._levels:
            reason = self._reason_against(level)
            if reason is None:
                if refused:
                    _logger.warning("untrusted code runs at the level `%s`, because %s", level, "; ".join(refused))
                return level
            refused.append(f"`{level}` is refused: {reason}")
        remedy = (
            "allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), "
            "or run as root with an interpreter that every user may read"
        )
        raise SandboxUnavailable(f"no sandbox for untrusted code here: {'; '.join(refused)}. Remedy: {remedy}")

    def _reason_against(self, level: Level) -> str | None:
        """Return why a level is not available; None if a program has run at it."""
        if not sys.platform.startswith("linux"):
            return f"it is made for Linux, and this is {sys.platform}"
        root = os.geteuid() == 0
        if level == "own_user" and not root:
            return "only root can give a program another user"
        if level == "same_user" and root:
            return "code would run as root"
        if level == "same_user" and not self._accept_weak:
            return "code could read the secrets of this user's processes (`accept_weak` allows it)"
        try:
            result = _from_outside(_run(self._interpreter, level, "print(6 * 7)", "", Limits()))
        except (SandboxFailed, OSError) as error:
            return str(error)
        return None if result.stdout == "42\n" else f"a first program ended so: {result}"


@functools.cache
def default_sandbox() -> Sandbox:
    """Return the sandbox that all callers in this process share, so that the machine's level is found only once."""
    return Sandbox()


def _from_outside(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end for a caller that is not asynchronous, whatever runs above it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def _run(interpreter: str, level: Level, code: str, stdin: str, limits: Limits) -> SandboxResult:
    """Run a program at a level. When this returns or is cancelled, neither the program nor its folder is left."""
    visible = _visible_paths(interpreter)
    folder = tempfile.mkdtemp(prefix="roll-sandbox-")
    task = vars(limits) | {
        "code": code.encode("utf-8", "replace"),
        "stdin": stdin.encode("utf-8", "replace"),
        "interpreter": interpreter,
        "folder": folder,
        "level": level,
        "visible": visible,
    }
    pipe, seconds = asyncio.subprocess.PIPE, limits.wall_seconds + GRACE_SECONDS
    command = [interpreter, "-I", "-S", "-c", _START, _PACKAGES]
    try:
        supervisor = await asyncio.create_subprocess_exec(
            *command, env={}, start_new_session=True, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(seconds):
                return _result(level, await _answer(supervisor, marshal.dumps(task)))
        except TimeoutError:
            raise SandboxFailed(f"the supervisor of the sandbox did not answer within {seconds:g} s") from None
        finally:
            await _dismiss(supervisor)
    finally:
        remove_folder(folder)


async def _answer(supervisor: asyncio.subprocess.Process, task: bytes) -> bytes:
    """Return the supervisor's answer. Its standard input stays open meanwhile, as a sign that the caller waits."""
    if supervisor.stdin is None or supervisor.stdout is None:
        raise SandboxFailed("the supervisor of the sandbox has no pipes")
    try:
        supervisor.stdin.write(len(task).to_bytes(8, "little") + task)
        await supervisor.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        return b""
    return await supervisor.stdout.read()


def _result(level: Level, answer: bytes) -> SandboxResult:
    if not answer:
        raise SandboxFailed("the supervisor of the sandbox ended without an answer")
    fields: dict[str, Any] = ast.literal_eval(answer.decode())
    if fields["failed"] is not None:
        raise SandboxFailed(fields["failed"])
    because, filtered, namespaces = fields["killed_because"], fields["filtered"], level == "namespaces"
    return SandboxResult(
        stdout=fields["stdout"].decode("utf-8", "replace"),
        stderr=fields["stderr"].decode("utf-8", "replace"),
        returncode=fields["returncode"],
        timed_out=because in ("time", "cpu_time"),
        killed_because=because,
        seconds=fields["seconds"],
        protections=Protections(
            level=level,
            network=namespaces or filtered,
            files=namespaces,
            processes=namespaces or fields["private_user"],
            system_calls=filtered,
            process_limit=fields["counted_apart"],
        ),
    )


async def _dismiss(supervisor: asyncio.subprocess.Process) -> None:
    """Close the supervisor's input so that it ends the program, and wait for it; kill it after the grace."""
    if supervisor.stdin is not None:
        supervisor.stdin.close()
    waiting = asyncio.ensure_future(supervisor.wait())
    try:
        await asyncio.wait([waiting], timeout=GRACE_SECONDS)
    finally:
        if supervisor.returncode is None:
            supervisor.kill()
    await waiting


@functools.cache
def _visible_paths(interpreter: str) -> tuple[str, ...]:
    """Return the paths that a program must see: system libraries and the interpreter's installation."""
    code = "import sys; print(sys.base_prefix, sys.base_exec_prefix, sep='\\n')"
    asked = subprocess.run([interpreter, "-I", "-S", "-c", code], env={}, capture_output=True, text=True, check=True)
    own = [os.path.realpath(each) for each in asked.stdout.splitlines()] + [interpreter]
    visible = list(_VISIBLE)
    for path in dict.fromkeys(own):
        if path != "/" and not any(path == each or path.startswith(each + "/") for each in visible):
            visible.append(path)
    return tuple(each for each in visible if os.path.lexists(each))
