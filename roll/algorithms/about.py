"""What is known of a loss or an advantage estimator besides its function, and how one is made from its name.

The function's keyword arguments are its settings. A decorator adds the text of the reference page, the requirements,
and the check of relations between arguments; a function without one has the default requirements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.plugins import Kind, PlugIn, by_name, checked_arguments, parameters_of

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class About:
    """Description of a loss or an estimator."""

    formula: str
    source: str
    """Paper or book, with its arXiv number."""
    use: str
    """When to choose it, in a sentence."""
    requirements: Any
    """Requirements and properties for callers, or a function that computes them from the arguments."""
    check: Callable[..., None] | None = None
    """Function of the arguments that raises ``ValueError`` if they do not go together."""


_ABOUT = "about"


def about(description: About) -> Callable[[Function], Function]:
    """Return a decorator that attaches a description to a function."""

    def attach(function: Function) -> Function:
        vars(function)[_ABOUT] = description
        return function

    return attach


def about_of(function: Callable[..., Any]) -> About | None:
    """Return the description of a function, if it has one."""
    return getattr(function, _ABOUT, None)


def settings_of(function: Callable[..., Any], name: str, where: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a loss or an estimator that are settings: all but its inputs, which come first."""
    return dict(list(by_name(parameters_of(function, name, where)).items())[1:])


def built(
    kind: Kind[PlugIn], name: str, args: Mapping[str, Any], paths: tuple[str, str], default: Any
) -> tuple[Callable[..., Any], dict[str, Any], Any]:
    """Return the function ``name``, all its arguments, and its requirements (``default`` if it declares none).

    Integers become floats; no other value is converted. Raises `ConfigError` that lists every wrong name, type and
    range; ``paths`` are those of the name and of the arguments.
    """
    function = kind.load(name, paths[0])
    settings = settings_of(function, name, paths[0])
    given = checked_arguments(name, settings, args, paths[1], strict=True, owners=lambda key: _owners(kind, key))
    defaults = {key: each.default for key, each in settings.items() if key not in given}
    arguments = {**defaults, **given}
    description = about_of(function)
    if description is None:
        return function, arguments, default
    if description.check is not None:
        try:
            description.check(**arguments)
        except ValueError as cause:
            raise ConfigError([ConfigProblem(paths[1], f"`{name}`: {cause}", "change one of them")]) from cause
    wanted = description.requirements
    return function, arguments, wanted(**arguments) if callable(wanted) else wanted


def _owners(kind: Kind[PlugIn], key: str) -> list[str]:
    """Return the built-in plug-ins that have a setting ``key``."""
    return [name for name in sorted(kind.built_in) if key in settings_of(kind.load(name, kind.name), name, kind.name)]
