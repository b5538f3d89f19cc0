"""The tool `python`: the policy sends a program and reads its output. Each call runs in a new sandboxed process."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from roll.agentic.tools.base import Answer, Deadline, Tool, ToolUnavailable
from roll.sandbox.sandbox import Limits, Sandbox, SandboxFailed, SandboxResult, SandboxUnavailable, default_sandbox

_MEBIBYTE = 2**20
_REASONS = {
    "time": "it ran for too long",
    "cpu_time": "it used too much processor time",
    "memory": "it used too much memory",
    "processes": "it started too many processes",
    "disk": "it wrote too much to files",
    "output": "it printed too much",
}
_logger = logging.getLogger(__name__)


class PythonTool(Tool):
    """The tool `python`."""

    name = "python"
    description = (
        "Runs a Python program (standard library only, no network, a new process each time) and returns what it prints."
    )
    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program; print what you want to see"}},
        "required": ["code"],
        "additionalProperties": False,
    }

    def __init__(
        self,
        *,
        wall_seconds: float = 10.0,
        cpu_seconds: int = 10,
        memory_mebibytes: int = 512,
        disk_mebibytes: int = 16,
        processes: int = 16,
        output_bytes: int = 16 * 1024,
        accept_weak_sandbox: bool = False,
    ) -> None:
        """Set the limits of one call (see `sandbox.Limits`). ``accept_weak_sandbox``: see `Sandbox`."""
        self._limits = Limits(
            wall_seconds=wall_seconds,
            cpu_seconds=cpu_seconds,
            memory_bytes=memory_mebibytes * _MEBIBYTE,
            disk_bytes=disk_mebibytes * _MEBIBYTE,
            file_bytes=disk_mebibytes * _MEBIBYTE,
            processes=processes,
            output_bytes=output_bytes,
        )
        self._sandbox = Sandbox(accept_weak=True) if accept_weak_sandbox else default_sandbox()

    def tools(self) -> tuple[PythonTool]:
        """Return this tool, after checking that the sandbox works. Raises `ToolUnavailable`.

        If a broken sandbox were noticed only at the first call, only the episodes that call the tool would fail, and
        the policy would learn not to call it.
        """
        try:
            self._sandbox.check()
        except SandboxUnavailable as error:
            raise ToolUnavailable(f"the tool `python`: {error}") from error
        return (self,)

    def call(self, arguments: dict[str, Any], deadline: Deadline) -> Answer:
        """See `Tool.call`; runs ``code`` in the sandbox. Raises `ToolUnavailable` if no sandbox is available."""
        seconds = min(self._limits.wall_seconds, max(0.1, deadline.seconds_left()))
        try:
            result = self._sandbox.run(
                arguments["code"], limits=dataclasses.replace(self._limits, wall_seconds=seconds)
            )
        except SandboxUnavailable as error:
            raise ToolUnavailable(f"the tool `python`: {error}") from error
        except SandboxFailed as error:
            _logger.warning("a call of the tool `python` failed: %s", error)
            return Answer("the program could not be run; try again", is_error=True)
        return Answer(_as_text(result), is_error=result.returncode != 0 or result.killed_because is not None)


def _as_text(result: SandboxResult) -> str:
    parts = [part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip()]
    if result.killed_because is not None:
        parts.append(f"[the program was stopped: {_REASONS[result.killed_because]}]")
    elif result.returncode < 0:
        parts.append(f"[the program was ended by signal {-result.returncode}]")
    elif result.returncode != 0 and not result.stderr.strip():
        parts.append(f"[the program ended with status {result.returncode}]")
    return "\n".join(parts) or "[the program printed nothing; print what you want to see]"
