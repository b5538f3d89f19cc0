"""What a tool is: a name, a description, a JSON schema of its arguments, and a call that answers with text.

Whatever goes wrong in a call because of what the policy wrote is an answer too, marked as an error, so that the policy
can read it and do better. Exceptions are for our own mistakes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jsonschema import Draft202012Validator


class ToolUnavailable(Exception):
    """A tool cannot work at all, whatever it is asked: no answer for the policy, but for the people who run it."""


@dataclass(frozen=True)
class Answer:
    """What a tool says."""

    text: str
    is_error: bool = False


@dataclass(frozen=True)
class Deadline:
    """When a call must have ended, on the monotonic clock."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline in so many seconds from now."""
        return cls(time.monotonic() + seconds)

    def seconds_left(self) -> float:
        """Never negative."""
        return max(0.0, self.at - time.monotonic())


@runtime_checkable
class Tool(Protocol):
    """One tool. Calls may come from any thread, one at a time for each object."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, of type `object`."""

    def call(self, arguments: dict[str, Any], deadline: Deadline) -> Answer:
        """Do it. ``arguments`` fit the schema. Ends by the deadline. Raises `ToolUnavailable`, and nothing else for
        what the policy wrote."""

    def close(self) -> None:
        """Give back what the tool holds; harmless to repeat. It may be called again afterwards."""


@runtime_checkable
class Toolset(Protocol):
    """Tools that are known only once something runs, such as those of a server."""

    def tools(self) -> Sequence[Tool]:
        """The tools; starts what is needed for them. Raises `ToolUnavailable`."""

    def close(self) -> None:
        """Give back all; harmless to repeat. `tools` may be asked for again afterwards."""


def function_schema(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it: a function in the format that OpenAI's interface made common."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def argument_problem(tool: Tool, arguments: dict[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, for the policy to read; None if nothing is."""
    errors = sorted(Draft202012Validator(tool.parameters).iter_errors(arguments), key=lambda error: str(error.path))
    if not errors:
        return None
    problems = [f"{'.'.join(map(str, error.path)) or 'arguments'}: {_shortened(error.message)}" for error in errors[:3]]
    return f"the arguments of `{tool.name}` do not fit: {'; '.join(problems)}"


def call_tool(tool: Tool, arguments: dict[str, Any], deadline: Deadline) -> Answer:
    """Check the arguments, then call."""
    problem = argument_problem(tool, arguments)
    return Answer(problem, is_error=True) if problem else tool.call(arguments, deadline)


def _shortened(text: str, longest: int = 200) -> str:
    return text if len(text) <= longest else text[:longest] + "..."
