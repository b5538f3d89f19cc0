"""Tools that a policy may call: their interface, the calls in its text, and tools by name or import path.

A tool has a name, a description, a JSON schema of its arguments, and a call that returns text. A call that fails
because of the policy's text returns an answer marked as an error, which the policy can read and correct. Exceptions are
for our own mistakes. The parser reads the form that the chat templates of Hermes and Qwen teach: a JSON object with
`name` and `arguments` between `<tool_call>` and `</tool_call>`, any number of times; on request, a fenced block of
Python is a call too. Nothing raises, whatever the text.

A tool in a configuration is a name, or a mapping of `tool` and the keyword arguments of its class. A new built-in tool
is one file and one line in `TOOLS`; a user's own tool is `package.module:Class`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jsonschema import Draft202012Validator

from roll.configs.errors import ConfigError, ConfigProblem, shown
from roll.configs.plugins import Kind, PlugIn, checked_arguments, parameters_of, problem


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


CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"
_LONGEST_CALL = 100_000
_FENCE = re.compile(r"^[ \t]*```(?:python|py)[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call. The tool may not exist, and the arguments may not suit it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """Text that was meant as a call."""

    problem: str
    """Message for the policy to read."""


def parse_calls(text: str, *, code_tool: str | None = None) -> list[ToolCall | MalformedCall]:
    """Return the calls in a text, in order.

    ``code_tool``: name of the tool that receives fenced blocks of Python outside of tagged calls, as its argument
    `code`; None: such blocks are plain text. A call inside another one makes the whole call malformed. A last call
    without its end tag is malformed too, unless its JSON is complete: the end tag may have been a stop text.
    """
    found: list[tuple[int, ToolCall | MalformedCall]] = []
    outside, begin = [], 0
    for start, stop, body in _tagged(text):
        outside.append((begin, start))
        found.append((start, _parsed(body)))
        begin = stop
    outside.append((begin, len(text)))
    if code_tool is not None:
        for first, last in outside:
            for match in _FENCE.finditer(text, first, last):
                found.append((match.start(), ToolCall(code_tool, {"code": match.group(1)})))
    return [call for _, call in sorted(found, key=lambda each: each[0])]


def _tagged(text: str) -> list[tuple[int, int, str | None]]:
    """Return begin, end and content of the outermost tagged parts; the content is None if calls are nested."""
    parts: list[tuple[int, int, str | None]] = []
    begin = text.find(CALL_BEGIN)
    while begin >= 0:
        inside = begin + len(CALL_BEGIN)
        end = text.find(CALL_END, inside)
        body = text[inside:end] if end >= 0 else text[inside:]
        stop = end + len(CALL_END) if end >= 0 else len(text)
        if CALL_BEGIN in body and not _is_json(body):
            parts.append((begin, stop, None))
        else:
            parts.append((begin, stop, body))
        begin = text.find(CALL_BEGIN, stop)
    return parts


def _is_json(text: str) -> bool:
    return not isinstance(_loaded(text), MalformedCall)


def _parsed(body: str | None) -> ToolCall | MalformedCall:
    if body is None:
        return MalformedCall(f"a call begins inside of another one; end each with {CALL_END} before the next")
    content = _loaded(body)
    if isinstance(content, MalformedCall):
        return content
    if not isinstance(content, dict):
        return MalformedCall('a call is a JSON object such as {"name": "...", "arguments": {...}}')
    name, arguments = content.get("name"), content.get("arguments", content.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return MalformedCall('a call needs a "name", the name of a tool')
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
        if isinstance(arguments, MalformedCall):
            return MalformedCall(f'the "arguments" of `{name}` are a text that is no JSON object')
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return MalformedCall(f'the "arguments" of `{name}` must be a JSON object')
    return ToolCall(name, arguments)


def _loaded(text: str) -> Any:
    """Return the JSON value, or what is wrong with it."""
    if len(text) > _LONGEST_CALL:
        return MalformedCall(f"the call is longer than {_LONGEST_CALL} characters")
    try:
        return json.loads(text.strip(), strict=False, parse_constant=_no_constant)
    except RecursionError:
        return MalformedCall("the call is nested too deeply")
    except ValueError as error:  # includes numbers of absurd length
        return MalformedCall(f"the call is no JSON: {error}")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


TOOLS = Kind(
    "tool",
    "roll.tools",
    {
        "python": PlugIn("roll.agentic.tools.python:PythonTool"),
        "calculator": PlugIn("roll.agentic.tools.calculator:Calculator"),
        "mcp": PlugIn("roll.agentic.tools.mcp:McpServer", ("mcp",)),
    },
    PlugIn,
    "package.module:Class",
)

ToolSpec = str | Mapping[str, Any]


def check_tools(specs: Sequence[ToolSpec], path: str) -> list[ConfigProblem]:
    """Return the problems of the tools configured at ``path``. Starts nothing."""
    problems = []
    for index, spec in enumerate(specs):
        try:
            _made(spec, f"{path}[{index}]")
        except ConfigError as error:
            problems += error.problems
    return problems


def make_tools(specs: Sequence[ToolSpec], path: str) -> list[Tool | Toolset]:
    """Return the tools configured at ``path``. Raises `ConfigError` with every problem."""
    problems = check_tools(specs, path)
    if problems:
        raise ConfigError(problems)
    return [_made(spec, f"{path}[{index}]") for index, spec in enumerate(specs)]


def _made(spec: ToolSpec, path: str) -> Tool | Toolset:
    name, options = _name_and_options(spec, path)
    made_by = TOOLS.load(name, path)
    arguments = checked_arguments(name, parameters_of(made_by, name, path), options, path)
    try:
        tool = made_by(**arguments)
    except ValueError as cause:
        raise problem(path, f"`{name}` cannot be made: {cause}", "correct its options") from cause
    if not isinstance(tool, Tool | Toolset):
        remedy = "see roll.agentic.tools.base for what a `Tool` or a `Toolset` has"
        raise problem(path, f"`{name}` gives a {type(tool).__name__}, which is no tool", remedy)
    return tool


def _name_and_options(spec: ToolSpec, path: str) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {}
    if isinstance(spec, str):
        options = {"tool": spec}
    elif isinstance(spec, Mapping):
        options = dict(spec)
    name = options.pop("tool", None)
    if not isinstance(name, str) or not name:
        remedy = "write a name such as `calculator`, or a mapping with `tool` and the tool's options"
        raise problem(path, f"{shown(spec)} names no tool", remedy)
    return name, options
