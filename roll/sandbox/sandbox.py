"""Execution of untrusted Python code in a separate process, with as much isolation as the system allows.

Guaranteed on every Linux system: limits of time, memory, output, files and processes; an empty environment; removal of
the program's processes and of its folder; a result within the wall-clock limit plus a short grace period. Further
isolation (network, files, users) depends on the system, and each result reports it. If untrusted code could read
secrets of the user's other processes, it is not run unless the caller accepts that. See docs/tools.md.
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
"""Isolation levels from strong to weak: new namespaces with a private file system; a separate user (needs root);
neither."""

KilledBecause = Literal["time", "cpu_time", "memory", "processes", "disk", "output"]

GRACE_SECONDS = 10.0
"""Time that the supervisor may take to clean up after the program's time limit."""
_MEBIBYTE = 2**20
_PACKAGES = str(Path(__file__).resolve().parents[2])
_START = "import sys; sys.path.append(sys.argv[1]); from roll.sandbox.supervisor import main; main()"
_VISIBLE = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache")
_logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program."""

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
    """Size of standard output and of standard error, each; a program that writes more is killed."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"the limit `{name}` of the sandbox is {value}; it must be positive")


@dataclass(frozen=True)
class Protections:
    """The isolation that was in place around a program."""

    level: Level
    network: bool
    """True if the program had no network: sockets were blocked, or not connected to anything."""
    files: bool
    """True if the program saw only its own files and the interpreter's, and its own files are gone."""
    processes: bool
    """True if the program could not access other processes: their memory, environment or signals."""
    system_calls: bool
    """True if the system call filter was on; see `roll.sandbox.kernel`."""
    process_limit: bool
    """True if the kernel limited the number of this program's processes exactly. If False, the supervisor counts
    them at intervals."""


@dataclass(frozen=True)
class SandboxResult:
    """The result of a program. Its outputs are decoded as UTF-8 with replacement characters."""

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
    """Untrusted code cannot be run safely on this machine. The message says what has to change."""


class SandboxFailed(RuntimeError):
    """The sandbox itself failed, not the program in it. The message has the cause."""


class Sandbox:
    """A sandbox that runs programs at the strongest isolation level that works on this machine.

    The level is determined at the first run. A warning is logged if it is not the strongest one.
    """

    def __init__(
        self, *, interpreter: str | None = None, levels: Sequence[Level] = LEVELS, accept_weak: bool = False
    ) -> None:
        """Choose the interpreter of the programs and the levels to try.

        The default ``interpreter`` is that of this process; programs run without its site-packages. ``accept_weak``:
        also run code as `same_user`, where it can read what this user can read, such as the environment of the user's
        other processes.
        """
        self._interpreter = os.path.realpath(interpreter or sys.executable)
        self._levels = [each for each in LEVELS if each in levels]
        self._accept_weak = accept_weak
        self._level: Level | None = None
        self._choosing = threading.Lock()

    def run(self, code: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
        """Run a program to its end and return its result, even if the program fails.

        Raises `SandboxUnavailable`, and `SandboxFailed` for errors of the sandbox itself.
        """
        return _from_outside(self.run_async(code, stdin=stdin, limits=limits))

    async def run_async(self, code: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
        """Run a program like `run`, without blocking the event loop. Cancellation ends the program."""
        level = self._level if self._level is not None else await asyncio.to_thread(self.check)
        return await _run(self._interpreter, level, code, stdin, limits or Limits())

    def check(self) -> Level:
        """Return the isolation level of this machine, determined at the first call. Raises `SandboxUnavailable`."""
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
        """Return the reason why a level is unavailable; None if a test program ran at this level."""
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
        return None if result.stdout == "42\n" else f"a test program failed: {result}"


@functools.cache
def default_sandbox() -> Sandbox:
    """Return the sandbox shared by all callers in this process, so that the level is determined only once."""
    return Sandbox()


def _from_outside(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine for a synchronous caller, in a thread if an event loop is already running in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def _run(interpreter: str, level: Level, code: str, stdin: str, limits: Limits) -> SandboxResult:
    """Run a program at a level. When this ends, even by cancellation, the program and its folder are gone."""
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
    """Return the supervisor's answer. Its standard input stays open until then, to show that the caller is waiting."""
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
    """Close the supervisor's input, so that it ends the program, and wait for it; kill it after the grace period."""
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
    """Return the paths that a program needs: system libraries and the interpreter's installation."""
    code = "import sys; print(sys.base_prefix, sys.base_exec_prefix, sep='\\n')"
    asked = subprocess.run([interpreter, "-I", "-S", "-c", code], env={}, capture_output=True, text=True, check=True)
    own = [os.path.realpath(each) for each in asked.stdout.splitlines()] + [interpreter]
    visible = list(_VISIBLE)
    for path in dict.fromkeys(own):
        if path != "/" and not any(path == each or path.startswith(each + "/") for each in visible):
            visible.append(path)
    return tuple(each for each in visible if os.path.lexists(each))
