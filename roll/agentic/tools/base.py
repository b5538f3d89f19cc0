"""The tool interface: a name, a description, a JSON schema of the arguments, and a call that returns text.

A call that fails because of the policy's text returns an answer marked as an error, which the policy can read and
correct. Exceptions are for our own mistakes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jsonschema import Draft202012Validator


class ToolUnavailable(Exception):
    """A tool cannot work at all, whatever the call. This is reported to the user, not to the policy."""


@dataclass(frozen=True)
class Answer:
    """A tool's answer."""

    text: str
    is_error: bool = False


@dataclass(frozen=True)
class Deadline:
    """The time by which a call must have ended, on the monotonic clock."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline this many seconds from now."""
        return cls(time.monotonic() + seconds)

    def seconds_left(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self.at - time.monotonic())


@runtime_checkable
class Tool(Protocol):
    """One tool. Calls may come from any thread, one at a time for each object."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, of type `object`."""

    def call(self, arguments: dict[str, Any], deadline: Deadline) -> Answer:
        """Call the tool with ``arguments`` that fit the schema, and return by the deadline.

        Raises only `ToolUnavailable`; a fault of the policy's text is an answer.
        """

    def close(self) -> None:
        """Release what the tool holds. Calling it twice is harmless, and the tool may be called again afterwards."""


@runtime_checkable
class Toolset(Protocol):
    """Tools that are known only once something runs, such as those of a server."""

    def tools(self) -> Sequence[Tool]:
        """Return the tools, starting what they need. Raises `ToolUnavailable`."""

    def close(self) -> None:
        """Release everything. Calling it twice is harmless, and `tools` may be called again afterwards."""


def function_schema(tool: Tool) -> dict[str, Any]:
    """Return a tool as chat templates expect it: a function in the format of OpenAI's interface."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def argument_problem(tool: Tool, arguments: dict[str, Any]) -> str | None:
    """Return what is wrong with the arguments of a call, for the policy to read; None if nothing is."""
    errors = sorted(Draft202012Validator(tool.parameters).iter_errors(arguments), key=lambda error: str(error.path))
    if not errors:
        return None
    problems = [f"{'.'.join(map(str, error.path)) or 'arguments'}: {_shortened(error.message)}" for error in errors[:3]]
    return f"the arguments of `{tool.name}` do not fit: {'; '.join(problems)}"


def call_tool(tool: Tool, arguments: dict[str, Any], deadline: Deadline) -> Answer:
    """Check the arguments, then call the tool."""
    problem = argument_problem(tool, arguments)
    return Answer(problem, is_error=True) if problem else tool.call(arguments, deadline)


def _shortened(text: str, longest: int = 200) -> str:
    return text if len(text) <= longest else text[:longest] + "..."
