"""Untrusted Python code, run in a process of its own behind as many walls as the system allows.

Promised everywhere: limits of time, memory, output, files and processes; an empty environment; no process and no file
of the program left behind in its folder; an answer within the wall-clock limit and a short grace. Which further walls
stand (network, files, users) depends on the system; each result says so, and where untrusted code could read the
secrets of this user's other processes it is not run unless that is asked for. See docs/tools.md.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import logging
import marshal
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roll.sandbox.jail.folders import remove_folder

Level = Literal["namespaces", "own_user", "same_user"]
LEVELS: tuple[Level, ...] = ("namespaces", "own_user", "same_user")
"""From strong to weak: new namespaces and a file system of its own; a user of its own (from root); neither."""

KilledBecause = Literal["time", "cpu_time", "memory", "processes", "disk", "output"]

GRACE_SECONDS = 10.0
"""How long after the program's limit the supervisor may take to clean up, on a busy machine."""
_MEBIBYTE = 2**20
_PACKAGES = str(Path(__file__).resolve().parents[2])
_START = "import sys; sys.path.append(sys.argv[1]); from roll.sandbox.jail.supervisor import main; main()"
_SHOWN = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    """Of one process."""
    memory_bytes: int = 512 * _MEBIBYTE
    """Address space of one process, and memory of all of them together."""
    disk_bytes: int = 16 * _MEBIBYTE
    """All files together."""
    file_bytes: int = 8 * _MEBIBYTE
    """One file."""
    processes: int = 16
    """Processes and threads."""
    open_files: int = 64
    output_bytes: int = 64 * 1024
    """Of standard output and of standard error; a program that writes more is ended."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"the limit `{name}` of the sandbox is {value}; it must be positive")


@dataclass(frozen=True)
class Protections:
    """Which walls stood around a program."""

    level: Level
    network: bool
    """It could open no socket, or none that leads anywhere."""
    files: bool
    """It saw no files but the interpreter's and its own, and nothing of it is left anywhere."""
    processes: bool
    """It could neither see nor touch other processes: not their memory, their environment, or their lives."""
    system_calls: bool
    """Those it has no use for were closed."""
    process_limit: bool
    """The limit of processes counted this program's alone, exactly; otherwise it is watched."""


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended. The outputs are decoded with replacement characters."""

    stdout: str
    stderr: str
    returncode: int
    """Negative: the signal that ended it."""
    timed_out: bool
    """It ran into the limit of wall-clock time, or of processor time."""
    killed_because: KilledBecause | None
    """The limit for which it was ended, if it was."""
    seconds: float
    protections: Protections


class SandboxUnavailable(RuntimeError):
    """Untrusted code cannot be run here safely. The message says what would have to change."""


class SandboxFailed(RuntimeError):
    """The sandbox itself, not the program in it, failed. The message has the cause."""


class Sandbox:
    """Runs programs at the strongest level that works on this machine, found at the first run and logged if weak."""

    def __init__(
        self, *, interpreter: str | None = None, levels: Sequence[Level] = LEVELS, accept_weak: bool = False
    ) -> None:
        """``interpreter``: of the programs; default: the one that runs now, without its site-packages.
        ``levels``: to be tried. ``accept_weak``: run code even as `same_user`, where it can read what this user can
        read, such as the environment of the user's other processes.
        """
        self._interpreter = os.path.realpath(interpreter or sys.executable)
        self._levels = [each for each in LEVELS if each in levels]
        self._accept_weak = accept_weak
        self._level: Level | None = None
        self._choosing = threading.Lock()

    def run(self, code: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
        """Run a program to its end. Raises `SandboxUnavailable` and `SandboxFailed`, never for what the code does."""
        return _run(self._interpreter, self._strongest_level(), code, stdin, limits or Limits())

    async def run_async(self, code: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
        """As `run`, without blocking the event loop. Cancelling ends the program."""
        level = self._level if self._level is not None else await asyncio.to_thread(self._strongest_level)
        return await _run_async(self._interpreter, level, code, stdin, limits or Limits())

    def check(self) -> None:
        """Raise `SandboxUnavailable` if no program could be run here. Takes a moment the first time."""
        self._strongest_level()

    def _strongest_level(self) -> Level:
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
        """Why a level cannot be had; None if a program has run at it."""
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
            result = _run(self._interpreter, level, "print(6 * 7)", "", Limits())
        except (SandboxFailed, OSError) as error:
            return str(error)
        return None if result.stdout == "42\n" else f"a first program ended so: {result}"


def run_python(code: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
    """Run a program in this process' sandbox (see `Sandbox.run`)."""
    return default_sandbox().run(code, stdin=stdin, limits=limits)


async def run_python_async(code: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
    """As `run_python`, without blocking the event loop. Cancelling ends the program."""
    return await default_sandbox().run_async(code, stdin=stdin, limits=limits)


@functools.cache
def default_sandbox() -> Sandbox:
    """One for the whole process, so that what the machine allows is found out, and logged, once."""
    return Sandbox()


class _Call:
    """What both ways of running share: the folder, the task, and what the answer means."""

    def __init__(self, interpreter: str, level: Level, code: str, stdin: str, limits: Limits) -> None:
        self._level = level
        self.command = [interpreter, "-I", "-S", "-c", _START, _PACKAGES]
        self.seconds = limits.wall_seconds + GRACE_SECONDS
        shown = _shown_paths(interpreter)
        self.folder = tempfile.mkdtemp(prefix="roll-sandbox-")
        task = vars(limits) | {
            "code": code.encode("utf-8", "replace"),
            "stdin": stdin.encode("utf-8", "replace"),
            "interpreter": interpreter,
            "folder": self.folder,
            "level": level,
            "shown": shown,
        }
        message = marshal.dumps(task)
        self.message = len(message).to_bytes(8, "little") + message

    def result(self, answer: bytes) -> SandboxResult:
        if not answer:
            raise SandboxFailed("the supervisor of the sandbox ended without an answer")
        fields: dict[str, Any] = ast.literal_eval(answer.decode())
        if fields["failed"] is not None:
            raise SandboxFailed(fields["failed"])
        because = fields["killed_because"]
        namespaces = self._level == "namespaces"
        filtered = fields["unfiltered"] is None
        return SandboxResult(
            stdout=fields["stdout"].decode("utf-8", "replace"),
            stderr=fields["stderr"].decode("utf-8", "replace"),
            returncode=fields["returncode"],
            timed_out=because in ("time", "cpu_time"),
            killed_because=because,
            seconds=fields["seconds"],
            protections=Protections(
                level=self._level,
                network=namespaces or filtered,
                files=namespaces,
                processes=namespaces or fields["private_user"],
                system_calls=filtered,
                process_limit=fields["counted_apart"],
            ),
        )


def _run(interpreter: str, level: Level, code: str, stdin: str, limits: Limits) -> SandboxResult:
    call = _Call(interpreter, level, code, stdin, limits)
    try:
        with subprocess.Popen(
            call.command,
            env={},
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as supervisor:
            try:
                return call.result(_exchange(supervisor, call))
            finally:
                _dismiss(supervisor)
    finally:
        remove_folder(call.folder)


def _exchange(supervisor: subprocess.Popen[bytes], call: _Call) -> bytes:
    """The supervisor's answer; its standard input stays open all the while, as the sign that it is waited for."""
    if supervisor.stdin is None or supervisor.stdout is None:
        raise SandboxFailed("the supervisor of the sandbox has no pipes")
    try:
        supervisor.stdin.write(call.message)
        supervisor.stdin.flush()
    except BrokenPipeError:
        return b""
    deadline = time.monotonic() + call.seconds
    answer = bytearray()
    poll = select.poll()
    poll.register(supervisor.stdout, select.POLLIN)
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        chunk = os.read(supervisor.stdout.fileno(), 65536)
        if not chunk:
            return bytes(answer)
        answer += chunk
    raise SandboxFailed(f"the supervisor of the sandbox did not answer within {call.seconds:g} s")


def _dismiss(supervisor: subprocess.Popen[bytes]) -> None:
    """Tell it that nobody waits any more, so that it ends the program, and wait until it has; at last by force."""
    try:
        if supervisor.stdin is not None:
            supervisor.stdin.close()
        supervisor.wait(GRACE_SECONDS)
    except (BrokenPipeError, subprocess.TimeoutExpired):
        supervisor.kill()


async def _run_async(interpreter: str, level: Level, code: str, stdin: str, limits: Limits) -> SandboxResult:
    call = _Call(interpreter, level, code, stdin, limits)
    try:
        supervisor = await asyncio.create_subprocess_exec(
            *call.command,
            env={},
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(call.seconds):
                return call.result(await _exchange_async(supervisor, call))
        except TimeoutError:
            raise SandboxFailed(f"the supervisor of the sandbox did not answer within {call.seconds:g} s") from None
        finally:
            await _dismiss_async(supervisor)
    finally:
        remove_folder(call.folder)


async def _exchange_async(supervisor: asyncio.subprocess.Process, call: _Call) -> bytes:
    if supervisor.stdin is None or supervisor.stdout is None:
        raise SandboxFailed("the supervisor of the sandbox has no pipes")
    try:
        supervisor.stdin.write(call.message)
        await supervisor.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        return b""
    return await supervisor.stdout.read()


async def _dismiss_async(supervisor: asyncio.subprocess.Process) -> None:
    """As `_dismiss`."""
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
def _shown_paths(interpreter: str) -> tuple[str, ...]:
    """What a program needs to see of the file system: system libraries and the interpreter's installation."""
    code = "import sys; print(sys.base_prefix, sys.base_exec_prefix, sep='\\n')"
    asked = subprocess.run([interpreter, "-I", "-S", "-c", code], env={}, capture_output=True, text=True, check=True)
    own = [os.path.realpath(each) for each in asked.stdout.splitlines()] + [interpreter]
    shown = list(_SHOWN)
    for path in dict.fromkeys(own):
        if path != "/" and not any(path == each or path.startswith(each + "/") for each in shown):
            shown.append(path)
    return tuple(each for each in shown if os.path.lexists(each))
