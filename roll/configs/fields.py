"""Declaration of keys (help text, range, default), and functions that walk the schema.

The loader, the checks and the reference page all walk the same dataclasses, so a new key is validated, suggested and
documented without further code.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache, reduce
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Range:
    """A range of numbers with optional limits, part of the type of a key: `Annotated[int, Range(at_least=1)]`."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def contains(self, value: float) -> bool:
        """Return True if ``value`` is in the range."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        signs = {">=": self.at_least, ">": self.above, "<=": self.at_most, "<": self.below}
        return " and ".join(f"{sign} {limit}" for sign, limit in signs.items() if limit is not None)


LARGEST_NUMBER = 1e15
"""Upper limit of every setting, so that products of settings stay exact enough to compute with."""


def is_too_large(value: Any) -> bool:
    """Return True if a value is a number too large for the arithmetic, or no number (NaN)."""
    return isinstance(value, int | float) and not -LARGEST_NUMBER <= value <= LARGEST_NUMBER


Count = Annotated[int, Range(at_least=1)]
Natural = Annotated[int, Range(at_least=0)]
Seed = Annotated[int, Range(at_least=0, below=2**32)]
Finite = Annotated[float, Range()]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(at_least=0)]
Share = Annotated[float, Range(at_least=0, at_most=1)]
Decay = Annotated[float, Range(at_least=0, below=1)]
Nucleus = Annotated[float, Range(above=0, at_most=1)]


def option(default: Any, help: str, needs: str | None = None) -> Any:
    """Declare a dataclass field with its help text. A callable ``default`` is the default factory.

    ``needs`` is the condition without which the key has no effect: another key of its section with the value given
    (``template: chat``), or with any value but 0 and null (``critic``).
    """
    metadata = {"help": help, "needs": needs}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


DeviceMapping = list[int] | int | str | None
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

_IDENTIFIER = r"[A-Za-z_]\w*"
IMPORT_PATH = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}(\.{_IDENTIFIER})*")
"""Pattern of an import path, `package.module:name`."""


def default_of(item: Field[Any]) -> Any:
    """Return the default value of a dataclass field."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def changes(section: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each key that differs from its default, at or below the named keys (default: all)."""
    for item in fields(section):
        if not names or item.name in names:
            yield from _changes(vars(section)[item.name], default_of(item), item.name)


def _changes(value: Any, default: Any, path: str) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value) and is_dataclass(default):
        for name, below in vars(value).items():
            yield from _changes(below, vars(default)[name], f"{path}.{name}")
    elif value != default:
        yield path, value


def values_below(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Field[Any]]]:
    """Yield each field below a dataclass instance as (path, section, value, field)."""
    for item in fields(section):
        path, value = prefix + item.name, vars(section)[item.name]
        yield path, section, value, item
        entries: dict[str, Any] = {path: value}
        if isinstance(value, dict):
            entries = {f"{path}.{key}": below for key, below in value.items()}
        elif isinstance(value, list):
            entries = {f"{path}[{index}]": below for index, below in enumerate(value)}
        for where, below in entries.items():
            if is_dataclass(below):
                yield from values_below(below, f"{where}.")


PathPart = str | int


def join(parts: Sequence[PathPart]) -> str:
    """Join parts into a path: ``("a", "b", 0)`` -> ``a.b[0]``."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, with references resolved and ranges kept."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in fields(cls)}


def _members(kind: Any) -> list[Any]:
    members = typing.get_args(kind) if _is_union(kind) else (kind,)
    return [member for member in members if member is not type(None)]


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself, without ``None`` and ranges."""
    return tuple(typing.get_args(each)[0] if typing.get_origin(each) is Annotated else each for each in _members(kind))


def range_of(kind: Any) -> Range | None:
    """Return the range of a number's type; None if it has none."""
    notes = [note for each in _members(kind) for note in typing.get_args(each)[1:]]
    return next((note for note in notes if isinstance(note, Range)), None)


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
    return reduce(member, parts, root)


def section_below(kind: Any) -> tuple[type, str] | None:
    """Return the dataclass in a type, and the suffix that leads to it: empty for the dataclass itself, ``.<name>`` in a
    mapping, ``[i]`` in a list. None for a plain value."""
    for suffix, inside in (("", kind), (".<name>", member(kind, "")), ("[i]", member(kind, 0))):
        below = dataclass_of(inside)
        if below is not None:
            return below, suffix
    return None


def walk(cls: type, prefix: str = "", without: Sequence[str] = ()) -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield each field below a dataclass as (path, field, type), sections before their keys.

    Paths in ``without`` are skipped, with everything below them; for the form of paths see `section_below`.
    """
    for item in fields(cls):
        path = f"{prefix}.{item.name}" if prefix else item.name
        if path in without:
            continue
        kind = field_types(cls)[item.name]
        yield path, item, kind
        section = section_below(kind)
        if section is not None:
            below, suffix = section
            yield from walk(below, path + suffix, without)


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Any: "any value"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def describe(kind: Any) -> str:
    """Describe a type in words, with the limits of pydantic's `Field`: ``a whole number, > 0 or null``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if _is_union(kind):
        words = [describe(each) for each in _members(kind)]
        return " or ".join(words + (["null"] if is_optional(kind) else []))
    if origin is Annotated:
        limits = [limit for note in arguments[1:] if isinstance(note, FieldInfo) for limit in _limits(note)]
        return describe(arguments[0]) + (f", {' and '.join(limits)}" if limits else "")
    if is_dataclass(kind) or origin is dict:
        return "a mapping"
    if origin is tuple:
        return "a list"
    if origin is list:
        (entry,) = arguments
        plural = "names" if typing.get_origin(entry) is typing.Literal else _PLURALS.get(entry)
        return f"a list of {'mappings' if is_dataclass(entry) else plural or describe(entry)}"
    if origin is typing.Literal:
        names = ", ".join(f"`{name}`" for name in arguments)
        return names if len(arguments) == 1 else f"one of {names}"
    return _WORDS.get(kind) or (kind.__name__ if isinstance(kind, type) else str(kind))


def _limits(note: FieldInfo) -> Iterator[str]:
    for limit in note.metadata:
        for key, sign in _SIGNS.items():
            if getattr(limit, key, None) not in (None, -math.inf):  # every number but NaN is >= -inf
                yield f"{sign} {getattr(limit, key):g}"
