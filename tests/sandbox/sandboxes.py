"""Every kind of sandbox that this machine can be asked for, behind one call."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import roll
from roll.sandbox.sandbox import Level, Limits, Protections, Sandbox, SandboxResult, SandboxUnavailable

REPOSITORY = Path(roll.__file__).resolve().parent.parent
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534


@dataclass(frozen=True)
class Kind:
    """A level of the sandbox, as the user of the tests or, started by root, as a user without rights."""

    level: Level
    unprivileged: bool = False

    @property
    def name(self) -> str:
        return f"{self.level}-unprivileged" if self.unprivileged else self.level

    def run(self, code: str, stdin: str = "", **limits) -> SandboxResult:
        if self.unprivileged:
            refused = refused_to_nobody(self.level)
            if refused:
                pytest.skip(f"not on this machine: {refused}")
            return self._run_as_nobody(code, stdin, limits)
        return sandbox_of(self.level).run(code, stdin=stdin, limits=Limits(**limits))

    def _run_as_nobody(self, code: str, stdin: str, limits: dict) -> SandboxResult:
        task = json.dumps({"level": self.level, "code": code, "stdin": stdin, "limits": limits})
        script = Path(__file__).with_name("run_in_sandbox.py")
        done = subprocess.run(
            [SYSTEM_PYTHON, str(script)], input=task, capture_output=True, text=True, timeout=120, cwd="/",
            env={"PYTHONPATH": str(REPOSITORY), "TMPDIR": tempfile.gettempdir(), **secrets_of_this_process()},
            user=NOBODY, group=NOBODY, extra_groups=[],
        )  # fmt: skip
        if done.returncode != 0:
            raise SandboxUnavailable(done.stderr.strip().splitlines()[-1])
        fields = json.loads(done.stdout)
        return SandboxResult(**fields | {"protections": Protections(**fields["protections"])})


@functools.cache
def sandbox_of(level: Level) -> Sandbox:
    """The sandbox of a level, which tries once whether this machine has it."""
    return Sandbox(interpreter=SYSTEM_PYTHON if level == "own_user" else None, levels=[level])


@functools.cache
def refused_to_nobody(level: Level) -> str:
    """Why a user without rights cannot have a level on this machine; ``""`` where they can."""
    try:
        Kind(level, unprivileged=True)._run_as_nobody("", "", {})
    except SandboxUnavailable as error:
        return str(error)
    return ""


def secrets_of_this_process() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("CANARY")}


_NAMESPACES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
REC, PRIVATE = 0x4000, 0x40000
def done(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
done(libc.unshare(NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET | (NEWUSER if os.geteuid() else 0)))
done(libc.mount(b"none", b"/", None, REC | PRIVATE, None))
done(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
"""


@functools.cache
def namespaces_refused() -> str:
    """What the kernel says to a process of this user that asks for namespaces, without the sandbox's code; or ``""``.

    Some containers allow none, and some distributions none to users without rights.
    """
    if sys.platform != "linux":
        return "no Linux"
    asked = subprocess.run([sys.executable, "-I", "-S", "-c", _NAMESPACES], capture_output=True, text=True, timeout=60)
    return asked.stderr.strip().splitlines()[-1] if asked.returncode else ""


@functools.cache
def no_sandbox_here() -> str:
    """Why untrusted code cannot be run by this user; ``""`` where it can."""
    refused = namespaces_refused()
    if not refused or os.geteuid() != 0:
        return refused
    apart = not_run_by_another_user(os.path.realpath(sys.executable))
    return f"{refused}; {apart}" if apart else ""


@functools.cache
def not_run_by_another_user(interpreter: str) -> str:
    """Why a user without rights cannot be made to run an interpreter; ``""`` where that works."""
    if os.geteuid() != 0:
        return "only root can become another user"
    command = [interpreter, "-I", "-S", "-c", ""]
    try:
        subprocess.run(command, check=True, cwd="/", user=NOBODY, group=NOBODY, extra_groups=[])
    except (OSError, subprocess.CalledProcessError) as error:
        return f"another user cannot run {interpreter}: {error}"
    return ""


needs_sandbox = pytest.mark.skipif(bool(no_sandbox_here()), reason=f"no sandbox here: {no_sandbox_here()}")
"""For tests that run programs as a user of `roll` would."""


def kinds() -> list:
    """Parameters: those this machine cannot have are skipped with the reason. The quick tests try the kind that runs
    use."""
    refused = namespaces_refused()
    for_namespaces = pytest.mark.skipif(bool(refused), reason=f"no namespaces here: {refused}")
    alone = not_run_by_another_user(SYSTEM_PYTHON)
    for_root = (
        pytest.mark.tier("all"),
        pytest.mark.skipif(bool(alone) or sys.platform != "linux", reason=alone or "no Linux"),
    )
    return [
        pytest.param(Kind("namespaces"), id="namespaces", marks=for_namespaces),
        pytest.param(Kind("namespaces", unprivileged=True), id="namespaces-unprivileged", marks=for_root),
        pytest.param(Kind("own_user"), id="own_user", marks=for_root),
        pytest.param(Kind("same_user", unprivileged=True), id="same_user", marks=for_root),
    ]
