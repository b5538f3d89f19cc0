"""Parser for the tool calls in a policy's text. Malformed calls are reported; nothing raises, whatever the text.

It reads the form that the chat templates of Hermes and Qwen teach: a JSON object with `name` and `arguments` between
`<tool_call>` and `</tool_call>`, any number of times. On request, a fenced block of Python is a call too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

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
