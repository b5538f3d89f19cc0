"""Parsing of tool calls and reasoning in the policy's text.

The format of calls belongs to the chat template with which the model was trained. On a complete answer, a parser finds
the same calls and the same text as vLLM's parser of that name, so that agents meet the same behaviour in training and
in serving. It is stricter in one respect: each call must have a name, and arguments that are a JSON object. If any call
does not, or no call is complete, the whole answer stays text.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.agentic.endpoint.json_text import loaded, problem_of

Tools = Sequence[Mapping[str, Any]]
"""Functions, as in `ModelRequest.tools`."""
Call = tuple[str, str]
"""Name, and arguments as an encoded JSON object."""
Parser = Callable[[str, Tools], tuple[str, tuple[Call, ...]]]
"""Function that splits an answer without reasoning into text and calls."""

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"


def split_thoughts(text: str, *, begun: bool = False) -> tuple[str | None, str]:
    """Split an answer into reasoning (None if there is none) and the rest, both verbatim.

    ``begun``: True if the prompt ends inside a reasoning block; a closing tag without an opening one implies this. If a
    block is not closed, all of it is reasoning.
    """
    before, begin, inside = text.partition(THOUGHT_BEGIN)
    if before.strip() or not begin:
        inside = text
        if not begun and THOUGHT_END not in before:
            return None, text
    thought, _, rest = inside.partition(THOUGHT_END)
    return thought or None, rest


def parser_for(template: str) -> str | None:
    """Return the name of the parser for a chat template: `none` if the template takes no tools.

    None: it takes tools, but in an unknown format, so the user must name the parser.
    """
    if "<function=" in template:
        return "qwen3_coder"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<arg_key>" not in template:
        return "hermes"
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return "llama3_json"
    return None if re.search(r"\btools\b|\btool_calls\b", template) else "none"


def call_id(answer_id: str, index: int) -> str:
    """Return the id of a call: nine letters and digits, as Mistral's templates require."""
    number = int.from_bytes(hashlib.sha256(f"{answer_id}/{index}".encode()).digest())
    digits = string.ascii_letters + string.digits
    return "".join(digits[number // len(digits) ** place % len(digits)] for place in range(9))


_Found = tuple[str, Sequence[tuple[Any, str]]]
"""The text, and for each call its name and arguments as written."""


def _parser(find: Callable[[str, Tools], _Found]) -> Parser:
    """Turn a function that finds calls, and may raise on malformed ones, into a `Parser`."""

    def parse(text: str, tools: Tools) -> tuple[str, tuple[Call, ...]]:
        if not tools:
            return text, ()
        try:
            rest, calls = find(text, tools)
            for name, arguments in calls:
                if not isinstance(name, str) or not name or problem_of(name) or not isinstance(loaded(arguments), dict):
                    return text, ()
        except (ValueError, LookupError, TypeError, RecursionError):
            return text, ()
        return (rest, tuple(calls)) if calls else (text, ())

    return parse


@_parser
def _none(text: str, tools: Tools) -> _Found:
    return text, ()


HERMES_BEGIN = "<tool_call>"
_HERMES_CALL = re.compile(r"<tool_call>(?:(.*?)</tool_call>|(.*))", re.DOTALL)


@_parser
def _hermes(text: str, tools: Tools) -> _Found:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; the last closing tag may be missing."""
    calls = [json.loads(match[1] or match[2] or "") for match in _HERMES_CALL.finditer(text)]
    return text.partition(HERMES_BEGIN)[0], [(call["name"], _dumped(call["arguments"])) for call in calls]


_DECODER = json.JSONDecoder()


@_parser
def _llama3_json(text: str, tools: Tools) -> _Found:
    """`{"name": ..., "parameters": {...}}`, possibly several with text between them. All text is dropped."""
    calls, end = [], -1
    while (begin := text.find("{", end + 1)) >= 0:  # vLLM skips a call that follows the one before without a gap
        call, end = _DECODER.raw_decode(text, begin)
        calls.append((call["name"], _dumped(call["arguments"] if "arguments" in call else call["parameters"])))
    return "", calls


_MISTRAL_BEGIN = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\[TOOL_CALLS\](.*?)(?:\[ARGS\]|(?=\{)|\Z)(.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL)


@_parser
def _mistral(text: str, tools: Tools) -> _Found:
    """`[TOOL_CALLS]name{...}` (newer models), or `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""
    before, *parts = text.split(_MISTRAL_BEGIN)
    first = next((part.strip() for part in parts if part.strip()), "")
    if first[:1] in ("[", "{"):
        return before if before.strip() else "", _mistral_array(first)
    calls = []
    for match in _MISTRAL_CALL.finditer(text):
        name, arguments = match[1], match[2].strip()
        if not name and not match[2]:
            continue
        if arguments:
            arguments = arguments[: _DECODER.raw_decode(arguments)[1]]
        calls.append((name.strip(), _typed(arguments or "{}", name.strip(), tools)))
    return before.strip(), calls


def _mistral_array(text: str) -> list[tuple[Any, str]]:
    try:
        entries, _ = _DECODER.raw_decode(text)
    except ValueError:
        entries = json.loads(text[text.index("[{") : text.rindex("}]") + 2])
    calls = []
    for call in [entries] if isinstance(entries, dict) else entries:
        if isinstance(call, dict) and ("name" in call or "arguments" in call):
            arguments = call.get("arguments")
            given = "{}" if arguments is None else arguments
            calls.append((call.get("name"), given if isinstance(given, str) else _dumped(given)))
    return calls


_QWEN_MARK = re.compile(r"(</?tool_call>|<function=|</function>|</parameter>|</?think>|>)")
_QWEN_PARAMETER = re.compile(r"<\s*parameter\s*=")
_QWEN_VALUE_END = re.compile(r"<\s*/\s*parameter\s*>|(?=<\s*parameter\s*=)")
_QWEN_STEPS = {
    ("text", "<tool_call>"): "call",
    ("text", "<function="): "name",
    ("call", "</tool_call>"): "text",
    ("call", "<function="): "name",
    ("name", ">"): "arguments",
    ("name", "</function>"): "after",
    ("arguments", "</function>"): "after",
    ("after", "</tool_call>"): "text",
    ("after", "<tool_call>"): "call",
    ("after", "<function="): "name",
}
"""(State, mark) -> next state. Other marks are text."""


@_parser
def _qwen3_coder(text: str, tools: Tools) -> _Found:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, typed by the schema."""
    place, before, found = "text", list[str](), list[dict[str, list[str]]]()
    for piece in _QWEN_MARK.split(text):
        step = _QWEN_STEPS.get((place, piece))
        if step is not None:
            if step == "call" or step == "name" and place != "call":
                found.append({"name": [], "arguments": []})
            place = step
        elif place == "text" and not found:
            before.append(piece)
        elif place in ("name", "arguments"):
            found[-1][place].append(piece)
    calls = []
    for call in found:
        if name := "".join(call["name"]).strip():
            values = _qwen_parameters("".join(call["arguments"]))
            calls.append((name, _typed(_dumped(values), name, tools)))
    return "".join(before).strip(), calls


def _qwen_parameters(text: str) -> dict[str, str]:
    """Return values by parameter name. One regular expression would take quadratic time on missing closing tags."""
    values, place = {}, 0
    while begin := _QWEN_PARAMETER.search(text, place):
        name_end = text.find(">", begin.end())
        end = _QWEN_VALUE_END.search(text, name_end + 1)
        if name_end < 0 or end is None:
            break
        value = text[name_end + 1 : end.start()]
        values[text[begin.end() : name_end].lstrip()] = value.removeprefix("\n").removesuffix("\n")
        place = end.end()
    return values


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _typed(arguments: str, name: str, tools: Tools) -> str:
    """Convert arguments to the types of the tool's schema, where possible."""
    functions = [tool["function"] for tool in tools if tool["function"].get("name") == name]
    properties = ((functions[0].get("parameters") or {}) if functions else {}).get("properties")
    values = loaded(arguments)
    if not isinstance(values, dict) or not isinstance(properties, dict):
        return arguments
    typed = _with_types(values, properties)
    return arguments if _dumped(typed) == _dumped(values) else _dumped(typed)


def _with_types(values: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _with_type(value, properties[key]) if isinstance(properties.get(key), dict) else value
        for key, value in values.items()
    }


def _with_type(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        inside = schema.get("properties")
        return _with_types(value, inside) if isinstance(inside, dict) else value
    if isinstance(value, list):
        items = schema.get("items")
        return [_with_type(each, items) for each in value] if isinstance(items, dict) else value
    return _read_as(value if isinstance(value, str) else _dumped(value), _types_of(schema))


_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)


def _types_of(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows, as written in it."""
    types: set[str] = set()
    if isinstance(schema, dict):
        named = schema.get("type")
        types |= {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
        choices = schema.get("enum")
        for choice in choices if isinstance(choices, list) else []:
            types.add("null" if choice is None else next(name for kind, name in _KINDS if isinstance(choice, kind)))
        for word in ("anyOf", "oneOf", "allOf"):
            for part in schema[word] if isinstance(schema.get(word), list) else []:
                types |= _types_of(part)
    return types or {"string"}


_OTHER_NAMES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("arr", "list", "sequence"), "array"),
    **{"bool": "boolean", "dict": "object"},
}


def _read_null(text: str) -> None:
    if text.lower() != "null":
        raise ValueError


def _read_number(text: str) -> float | int:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return int(number) if number == int(number) else number


def _read_boolean(text: str) -> bool:
    word = text.lower().strip()
    if word not in ("true", "1", "false", "0"):
        raise ValueError
    return word in ("true", "1")


_READERS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("null", _read_null),
    ("integer", int),
    ("number", _read_number),
    ("boolean", _read_boolean),
    ("object", loaded),
    ("array", loaded),
    ("string", str),
    ("", loaded),
)
"""Converters by type, in the order in which they are tried; the last one is for unknown types."""


def _read_as(text: str, types: set[str]) -> Any:
    known = {_OTHER_NAMES.get(name, name) for name in (each.strip().lower() for each in types)} | {""}
    for name, read in _READERS:
        if name in known:
            try:
                return read(text)
            except ValueError:
                continue
    return text


PARSERS: Mapping[str, Parser] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "none": _none,
    "qwen3_coder": _qwen3_coder,
}
"""Parsers by their name in the configuration."""
