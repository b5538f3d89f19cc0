"""The schema read as data: the keys with their paths, and their types in words.

The loader, the checks and the reference page all walk the same dataclasses through these functions. A key added to
`schema` is therefore validated, suggested and documented without another line anywhere. Paths are written as
``rewards.math.tag_included[0]``.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import Any

PathPart = str | int

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Any: "any value"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def join(parts: Sequence[PathPart]) -> str:
    """Join parts into a path: ``("a", "b", 0)`` -> ``a.b[0]``."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, with references resolved."""
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in fields(cls)}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself, without ``None``."""
    members = typing.get_args(kind) if _is_union(kind) else (kind,)
    return tuple(member for member in members if member is not type(None))


def is_optional(kind: Any) -> bool:
    """Return True if ``null`` is a value of the type."""
    return _is_union(kind) and type(None) in typing.get_args(kind)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union)


def dataclass_of(kind: Any) -> type | None:
    """Return the dataclass of a type (also ``X | None``); None if there is none."""
    return next((member for member in alternatives(kind) if isinstance(member, type) and is_dataclass(member)), None)


def member(kind: Any, part: PathPart) -> Any:
    """Return the type of one key or element below ``kind``; None if the schema does not define it."""
    for option in alternatives(kind):
        if isinstance(option, type) and is_dataclass(option):
            return field_types(option).get(part) if isinstance(part, str) else None
        arguments = typing.get_args(option)
        if typing.get_origin(option) is dict and isinstance(part, str):
            return arguments[1]
        if typing.get_origin(option) is list and isinstance(part, int):
            return arguments[0]
    return None


def kind_at(root: type, parts: Sequence[PathPart]) -> Any:
    """Return the type at a path below the dataclass ``root``; None if there is none."""
    kind: Any = root
    for part in parts:
        kind = member(kind, part)
    return kind


def walk(cls: type, prefix: str = "", without: Sequence[str] = ()) -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield each field below a dataclass as (path, field, type), sections before their keys.

    The keys of a mapping are written ``<name>``, the elements of a list ``[i]``. Paths in ``without`` are skipped, with
    everything below them.
    """
    kinds = field_types(cls)
    for item in fields(cls):
        path = f"{prefix}.{item.name}" if prefix else item.name
        if path in without:
            continue
        kind = kinds[item.name]
        yield path, item, kind
        for suffix, part in (("", None), (".<name>", ""), ("[i]", 0)):
            below = dataclass_of(kind if part is None else member(kind, part))
            if below is not None:
                yield from walk(below, path + suffix, without)
                break


def describe(kind: Any) -> str:
    """Describe a type in words, for messages: ``a whole number or null``."""
    words = [_describe_one(option) for option in alternatives(kind)]
    return " or ".join(words + (["null"] if is_optional(kind) else []))


def _describe_one(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) or origin is dict:
        return "a mapping"
    if origin is list:
        entry = arguments[0]
        return f"a list of {_PLURALS.get(entry) or ('mappings' if is_dataclass(entry) else 'names')}"
    if origin is typing.Literal:
        names = ", ".join(f"`{name}`" for name in arguments)
        return names if len(arguments) == 1 else f"one of {names}"
    return _WORDS[kind]
