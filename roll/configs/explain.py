"""Validation errors in plain words: what is wrong at which path, and what would be right.

An unknown key gets the nearest valid name at its level, or the place where a key of that name belongs. A key known from
another toolkit gets its replacement. A wrong value gets the expected type. If several readings of one value fail, one
problem is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import GenericAlias
from typing import Any, get_args

from pydantic import ValidationError

from roll.configs.errors import ConfigProblem
from roll.configs.foreign_keys import ADVICE, RENAMED
from roll.configs.schema import UNREAD_PATHS
from roll.configs.structure import (
    PathPart,
    alternatives,
    dataclass_of,
    describe,
    field_types,
    is_optional,
    join,
    kind_at,
    member,
    walk,
)
from roll.configs.wording import choose_among, nearest, shown

_MOST_NAMES_LISTED = 12


def validation_problems(error: ValidationError, root: type, tree: dict[str, Any]) -> list[ConfigProblem]:
    """Return one problem per wrong key or value of ``tree``, which could not be validated as ``root``."""
    paths: dict[tuple[PathPart, ...], str] = {}
    for entry in error.errors(include_url=False):
        paths.setdefault(_path_in_tree(entry["loc"], tree), entry["type"])
    return [
        _unknown_key(parts, root, tree)
        if kind == "unexpected_keyword_argument"
        else _wrong_value(parts, root, _value_at(parts, tree))
        for parts, kind in paths.items()
        if not any(len(other) > len(parts) and other[: len(parts)] == parts for other in paths)
    ]


def truth_value_problems(root: type, tree: dict[str, Any]) -> list[ConfigProblem]:
    """Report `true` where a number is expected, and anything but true or false where a truth value is."""
    return [_wrong_value(parts, root, value) for parts, value in _truth_values(root, tree, ())]


def _truth_values(kind: Any, value: Any, parts: tuple[PathPart, ...]) -> Iterator[tuple[tuple[PathPart, ...], Any]]:
    if isinstance(value, (dict, list)):
        for part, below in value.items() if isinstance(value, dict) else enumerate(value):
            expected = member(kind, part)
            if expected is not None:
                yield from _truth_values(expected, below, (*parts, part))
        return
    kinds = alternatives(kind)
    if isinstance(value, bool):
        wrong = bool not in kinds and bool({int, float} & set(kinds))
    else:
        left_out = value is None and is_optional(kind)
        wrong = bool in kinds and str not in kinds and not left_out and str(value).lower() not in ("true", "false")
    if wrong:
        yield parts, value


def _path_in_tree(location: Sequence[PathPart], tree: Any) -> tuple[PathPart, ...]:
    """Return the part of an error's location that leads through the tree, without names of union members."""
    parts: list[PathPart] = []
    for part in location:
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
        else:
            continue
        parts.append(part)
    return tuple(parts)


def _value_at(parts: Sequence[PathPart], tree: Any) -> Any:
    for part in parts:
        tree = tree[part]
    return tree


def _wrong_value(parts: tuple[PathPart, ...], root: type, value: Any) -> ConfigProblem:
    kind = kind_at(root, parts)
    expected = describe(kind)
    return ConfigProblem(
        join(parts), f"{shown(value, str(parts[-1]))} is not {expected}", _value_remedy(kind, expected, value)
    )


def _value_remedy(kind: Any, expected: str, value: Any) -> str:
    names = [name for option in alternatives(kind) for name in get_args(option) if isinstance(name, str)]
    if names:
        return choose_among(str(value), names)
    if value is None:
        return "write its value, or leave the key out for its default"
    if alternatives(kind) == (str,) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'text is expected; in quotes it would be: "{value}"'
    if GenericAlias(list, (type(value),)) in alternatives(kind):
        return f"write it as a list: {shown([value])}"
    nothing = " (leave the key out for its default)" if is_optional(kind) else ""
    return f"write {expected}{nothing}"


def _unknown_key(parts: tuple[PathPart, ...], root: type, tree: dict[str, Any]) -> ConfigProblem:
    name = str(parts[-1])
    level = dataclass_of(kind_at(root, parts[:-1]))
    known = list(field_types(level)) if level is not None else []
    message = f"unknown key (its value: {shown(_value_at(parts, tree), name)})"
    return ConfigProblem(join(parts), message, _name_remedy(name, known, root))


def _name_remedy(name: str, known: Sequence[str], root: type) -> str:
    if name in ADVICE:
        return ADVICE[name]
    near = nearest(name, known, cutoff=0.75)
    if near:
        return f"did you mean `{near}`?"
    places = _places(root)
    if name in places:
        return f"`{name}` belongs under {_under(places[name])}"
    if name in RENAMED:
        return f"this is called `{RENAMED[name]}` here"
    near = nearest(name, known)
    if near:
        return f"did you mean `{near}`?"
    elsewhere = nearest(name, places, cutoff=0.75)
    if elsewhere:
        return f"did you mean `{elsewhere}`, which belongs under {_under(places[elsewhere])}?"
    if len(known) > _MOST_NAMES_LISTED:
        return "remove it; `docs/configuration.md` lists every key"
    return f"remove it; known here: {', '.join(f'`{item}`' for item in known)}"


def _places(root: type) -> dict[str, list[str]]:
    """Map each key that is read to the paths of the sections it may stand in; the top level is an empty path."""
    places: dict[str, list[str]] = {}
    for path, item, _ in walk(root, without=UNREAD_PATHS):
        places.setdefault(item.name, []).append(path.removesuffix(item.name).rstrip("."))
    return places


def _under(sections: Iterable[str]) -> str:
    return " or ".join(f"`{section}`" if section else "the top level" for section in list(sections)[:3])
