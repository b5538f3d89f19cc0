"""Tools for the policy: their interface, the parsing of calls, and construction by name or import path.

A tool has a name, a description, a JSON schema of its arguments, and a call that returns text. If a call fails because
of the policy's text, the answer is marked as an error, which the policy can read and correct; exceptions are for bugs.
The parser reads the format of the Hermes and Qwen chat templates: JSON objects with `name` and `arguments` between
`<tool_call>` and `</tool_call>`; optionally, fenced Python blocks are calls, too. It never raises, whatever the text.

In a configuration, a tool is a name, or a mapping with `tool` and the keyword arguments of its class. A new built-in
tool is one file and one line in `TOOLS`; a user's own tool is `package.module:Class`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jsonschema import Draft202012Validator

from roll.configs.errors import ConfigError, shown
from roll.configs.plugins import Kind, PlugIn, made, problem


class ToolUnavailable(Exception):
    """A tool cannot work at all, whatever the call. Reported to the user, not to the policy."""


@dataclass(frozen=True)
class Answer:
    """Result of a tool call, for the policy to read."""

    text: str
    is_error: bool = False


@dataclass(frozen=True)
class Deadline:
    """Time on the monotonic clock by which a call must finish."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline ``seconds`` from now."""
        return cls(time.monotonic() + seconds)

    def seconds_left(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self.at - time.monotonic())


@runtime_checkable
class Tool(Protocol):
    """One tool. Calls may come from any thread, but only one at a time per object."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, of type `object`."""

    def call(self, arguments: dict[str, Any], deadline: Deadline) -> Answer:
        """Call the tool with arguments that match the schema. Must return by the deadline.

        Raises only `ToolUnavailable`; mistakes of the policy are returned as an answer.
        """

    def close(self) -> None:
        """Release all resources; by default there are none. May be called twice, and the tool used again afterwards."""
        return


@runtime_checkable
class Toolset(Protocol):
    """A source of tools that are unknown until something is started, such as a server."""

    def tools(self) -> Sequence[Tool]:
        """Return the tools, starting what they need. Raises `ToolUnavailable`."""

    def close(self) -> None:
        """Release all resources. May be called twice, and `tools` may be called again afterwards."""


def function_schema(tool: Tool) -> dict[str, Any]:
    """Return a tool's description for chat templates, in OpenAI's function format."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def argument_problem(tool: Tool, arguments: dict[str, Any]) -> str | None:
    """Return what is wrong with the arguments of a call, as a message to the policy; None if they are valid."""
    errors = sorted(Draft202012Validator(tool.parameters).iter_errors(arguments), key=lambda error: str(error.path))
    if not errors:
        return None
    problems = [f"{'.'.join(map(str, error.path)) or 'arguments'}: {_shortened(error.message)}" for error in errors[:3]]
    return f"the arguments of `{tool.name}` do not fit: {'; '.join(problems)}"


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."


CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"
_LONGEST_CALL = 100_000
_CALL = re.compile(rf"{CALL_BEGIN}(.*?)(?:{CALL_END}|\Z)", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*```(python|py)?[ \t]*$\n?", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class ToolCall:
    """A parsed call. The tool may not exist, and the arguments may be invalid."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None
    """Message to the policy if the call is malformed, else None."""


def parse_calls(text: str, *, code_tool: str | None = None) -> list[ToolCall]:
    """Return the calls in a text, in order.

    ``code_tool``: tool that receives fenced Python blocks outside tagged calls as its argument `code`; None: such
    blocks are plain text. A nested call makes the whole call malformed. So does a missing end tag, except on a last
    call with complete JSON, because the end tag may have been a stop string.
    """
    tagged = list(_CALL.finditer(text))
    found = [(match.start(), _call_in(match[1])) for match in tagged]
    if code_tool is not None:
        begins = [0, *(match.end() for match in tagged)]
        ends = [*(match.start() for match in tagged), len(text)]
        for begin, end in zip(begins, ends, strict=True):
            for place, code in _python_blocks(text, begin, end):
                found.append((place, ToolCall(code_tool, {"code": code})))
    return [call for _, call in sorted(found, key=lambda each: each[0])]


def _python_blocks(text: str, begin: int, end: int) -> Iterator[tuple[int, str]]:
    """Yield place and content of each fenced Python block in a part of the text.

    One regular expression for whole blocks would take quadratic time on missing ends.
    """
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text, begin, end):
        if opening is None:
            opening = fence if fence[1] else None
        elif not fence[1]:
            yield opening.start(), text[opening.end() : fence.start()]
            opening = None


def _call_in(body: str) -> ToolCall:
    try:
        return _read(body)
    except ValueError as problem:
        return ToolCall("", {}, str(problem))


def _read(body: str) -> ToolCall:
    """Parse the content of a tagged call. Raises `ValueError` with what is wrong."""
    try:
        content = _loaded(body)
    except ValueError:
        if CALL_BEGIN not in body:
            raise
        raise ValueError(f"a call begins inside of another one; end each with {CALL_END} before the next") from None
    if not isinstance(content, dict):
        raise ValueError('a call is a JSON object such as {"name": "...", "arguments": {...}}')
    name, arguments = content.get("name"), content.get("arguments", content.get("parameters", {}))
    if not isinstance(name, str) or not name:
        raise ValueError('a call needs a "name", the name of a tool')
    if isinstance(arguments, str):
        try:
            arguments = _loaded(arguments)
        except ValueError:
            raise ValueError(f'the "arguments" of `{name}` are a text that is no JSON object') from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f'the "arguments" of `{name}` must be a JSON object')
    return ToolCall(name, arguments)


def _loaded(text: str) -> Any:
    """Decode JSON. Raises `ValueError` with what is wrong."""
    if len(text) > _LONGEST_CALL:
        raise ValueError(f"the call is longer than {_LONGEST_CALL} characters")
    try:
        return json.loads(text.strip(), strict=False, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("the call is nested too deeply") from None
    except ValueError as error:  # also raised for integers with too many digits
        raise ValueError(f"the call is no JSON: {error}") from None


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


def make_tools(specs: Sequence[ToolSpec], path: str) -> list[Tool | Toolset]:
    """Create the tools configured at ``path``, without starting them. Raises `ConfigError` with every problem."""
    tools, problems = [], []
    for index, spec in enumerate(specs):
        try:
            tools.append(_made(spec, f"{path}[{index}]"))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return tools


def _made(spec: ToolSpec, path: str) -> Tool | Toolset:
    options = dict(spec) if isinstance(spec, Mapping) else {"tool": spec}
    name = options.pop("tool", None)
    if not isinstance(name, str) or not name:
        remedy = "write a name such as `calculator`, or a mapping with `tool` and the tool's options"
        raise problem(path, f"{shown(spec)} names no tool", remedy)
    tool = made(name, TOOLS.load(name, path), options, path, strict=False)
    if not isinstance(tool, Tool | Toolset):
        remedy = "see roll.agentic.tools.base for what a `Tool` or a `Toolset` has"
        raise problem(path, f"`{name}` gives a {type(tool).__name__}, which is no tool", remedy)
    return tool
