"""Registries that map names from a configuration file to functions and their arguments.

A variant is a function plus a small frozen dataclass of its arguments (knobs), registered under its YAML name with one
decorator. The decorator also holds the text of the reference page: formula, source, when to use it. Building a variant
checks every argument (name, type, range) and reports all errors at once. An argument that nothing would read is an
error, never a silent no-op.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from roll.configs.fields import Range


@dataclass(frozen=True)
class KnobProblem:
    """One error in a name or an argument."""

    knob: str | None
    """Name of the argument; ``None`` if the variant's own name is wrong, or a range that its dataclass checks."""
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


class KnobError(ValueError):
    """A variant that cannot be built; ``problems`` lists every reason."""

    def __init__(self, problems: list[KnobProblem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


def knob(
    default: Any = MISSING,
    *,
    help: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a field of an arguments class with its help text and, for a number, its range. No default: required."""
    limits = Range(at_least, above, at_most, below)
    metadata = {"help": help} if limits == Range() else {"help": help, "range": limits}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class NoKnobs:
    """The arguments class of variants without arguments."""


@dataclass(frozen=True)
class Variant:
    """A registered function, the dataclass of its arguments, and its documentation for users."""

    name: str
    function: Callable[..., Any]
    knobs: type
    formula: str
    source: str
    """Paper or book, with its arXiv number."""
    use: str
    """When to choose it, in a sentence."""
    traits: Any
    """Requirements and properties for callers, or a function that computes them from the arguments; each registry
    chooses the type."""


class Registry:
    """Variants of one kind by name. ``kind`` is used in messages ("policy loss")."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._variants: dict[str, Variant] = {}

    def register(
        self, name: str, knobs: type = NoKnobs, *, formula: str, source: str, use: str, traits: Any = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that registers a function as ``name``. ``ValueError`` if the name is taken."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            if name in self._variants:
                raise ValueError(f"the {self.kind} {name!r} is registered twice")
            self._variants[name] = Variant(name, function, knobs, formula, source, use, traits)
            return function

        return decorate

    def variant(self, name: str) -> Variant:
        """Return the variant registered as ``name``. Raises ``KnobError`` for an unknown name."""
        if name not in self._variants:
            raise KnobError([KnobProblem(None, f"unknown {self.kind} {name!r}", suggestion(name, self.names()))])
        return self._variants[name]

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._variants)

    def build(self, name: str, args: Mapping[str, Any]) -> tuple[Callable[..., Any], Any]:
        """Return the function called ``name`` and its checked arguments.

        Raises ``KnobError`` for an unknown name, an unknown argument, a wrong type or a value out of range.
        """
        variant = self.variant(name)
        return variant.function, build_knobs(variant.knobs, args, f"{self.kind} {name!r}", self._owners())

    def traits(self, name: str, knobs: Any) -> Any:
        """Return the requirements and properties of ``name`` with these arguments."""
        traits = self.variant(name).traits
        return traits(knobs) if callable(traits) else traits

    def _owners(self) -> dict[str, list[str]]:
        """Map the name of each argument to the variants that have it."""
        owners: dict[str, list[str]] = {}
        for variant in self._variants.values():
            for item in fields(variant.knobs):
                owners.setdefault(item.name, []).append(variant.name)
        return owners


def build_knobs(
    knobs: type, args: Mapping[str, Any], owner: str, owners_elsewhere: Mapping[str, list[str]] | None = None
) -> Any:
    """Build an instance of the dataclass ``knobs`` from plain values.

    Integers are accepted for floats; nothing else is converted. Ranges are declared in the fields (`knob`). The
    dataclass checks relations between arguments itself: its ``__post_init__`` raises ``ValueError``. ``owner`` names
    the variant in messages, and ``owners_elsewhere`` maps arguments to the variants that would read them. Raises
    ``KnobError`` with every problem.
    """
    hints = get_type_hints(knobs)
    problems = [_unknown_knob(name, list(hints), owner, owners_elsewhere or {}) for name in args if name not in hints]
    values: dict[str, Any] = {}
    for item in fields(knobs):
        if item.name in args:
            value, hint = args[item.name], hints[item.name]
            if not _fits(value, hint):
                problems.append(_wrong_type(item.name, value, hint))
                continue
            values[item.name] = _as_float(value, hint)
            limits = item.metadata.get("range")
            if limits is not None and value is not None and not limits.contains(value):
                problems.append(KnobProblem(item.name, f"{owner}: {item.name!r} is {value!r}", f"it must be {limits}"))
        elif item.default is MISSING and item.default_factory is MISSING:
            problems.append(KnobProblem(item.name, f"{owner} needs the knob {item.name!r}", "set it"))
    if problems:
        raise KnobError(problems)
    try:
        return knobs(**values)
    except ValueError as error:
        raise KnobError([KnobProblem(None, f"{owner}: {error}", "choose a value in the range")]) from error


def suggestion(name: str, valid: list[str]) -> str:
    """Suggest the nearest valid name, or list all of them."""
    near = difflib.get_close_matches(name, valid, n=1)
    known = f"valid: {', '.join(valid)}" if valid else "there are none"
    return f"did you mean {near[0]!r}? ({known})" if near else known


def _unknown_knob(name: str, valid: list[str], owner: str, owners: Mapping[str, list[str]]) -> KnobProblem:
    message = f"{owner} has no knob {name!r}"
    if name in owners:
        message += f", which belongs to {', '.join(repr(variant) for variant in owners[name])}"
    return KnobProblem(name, message, suggestion(name, valid))


def _wrong_type(name: str, value: Any, hint: Any) -> KnobProblem:
    if get_origin(hint) is Literal:
        options = [str(option) for option in get_args(hint)]
        return KnobProblem(name, f"{name!r} is {value!r}", suggestion(str(value), options))
    wanted = hint.__name__ if isinstance(hint, type) else str(hint)
    return KnobProblem(name, f"{name!r} is {value!r}, a {type(value).__name__}", f"give a value of type {wanted}")


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _as_float(value: Any, hint: Any) -> Any:
    wants_float = hint is float or (float in get_args(hint) and int not in get_args(hint))
    return float(value) if wants_float and isinstance(value, int) and not isinstance(value, bool) else value
