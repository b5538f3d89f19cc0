"""Every kind of sandbox that this machine can be asked for, behind one call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import roll
from roll.sandbox.sandbox import Level, Limits, Protections, Sandbox, SandboxResult

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
            return self._run_as_nobody(code, stdin, limits)
        interpreter = SYSTEM_PYTHON if self.level == "own_user" else None
        return Sandbox(interpreter=interpreter, levels=[self.level]).run(code, stdin=stdin, limits=Limits(**limits))

    def _run_as_nobody(self, code: str, stdin: str, limits: dict) -> SandboxResult:
        task = json.dumps({"level": self.level, "code": code, "stdin": stdin, "limits": limits})
        script = Path(__file__).with_name("run_in_sandbox.py")
        done = subprocess.run(
            [SYSTEM_PYTHON, str(script)], input=task, capture_output=True, text=True, timeout=120, cwd="/",
            env={"PYTHONPATH": str(REPOSITORY), "TMPDIR": tempfile.gettempdir(), **secrets_of_this_process()},
            user=NOBODY, group=NOBODY, extra_groups=[],
        )  # fmt: skip
        if done.returncode != 0:
            pytest.skip(f"not on this machine: {done.stderr.strip().splitlines()[-1]}")
        fields = json.loads(done.stdout)
        return SandboxResult(**fields | {"protections": Protections(**fields["protections"])})


def secrets_of_this_process() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("CANARY")}


def kinds() -> list:
    """Parameters: those this machine cannot have are skipped with the reason."""
    root = os.geteuid() == 0
    readable = os.path.exists(SYSTEM_PYTHON) and sys.platform == "linux"
    for_root = pytest.mark.skipif(not (root and readable), reason="needs root and a Python that every user may read")
    return [
        pytest.param(Kind("namespaces"), id="namespaces"),
        pytest.param(Kind("namespaces", unprivileged=True), id="namespaces-unprivileged", marks=for_root),
        pytest.param(Kind("own_user"), id="own_user", marks=for_root),
        pytest.param(Kind("same_user", unprivileged=True), id="same_user", marks=for_root),
    ]
