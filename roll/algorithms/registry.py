"""Losses and advantage estimators by name: their descriptions, and how they are made with their arguments.

The function's keyword arguments are its settings. A decorator adds the text of the reference page, the requirements,
and the check of relations between arguments; a function without a decorator has the default requirements. Nothing here
imports torch, so that a check of a configuration knows the names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.plugins import Kind, PlugIn, by_name, checked_arguments, parameters_of, problem

Function = TypeVar("Function", bound=Callable[..., Any])


_ABOUT = "about"


@dataclass(frozen=True)
class About:
    """Description of a loss or an estimator: a decorator that attaches itself to the function."""

    formula: str = ""
    source: str = ""
    """Paper or book, with its arXiv number."""
    use: str = ""
    """When to choose it, in a sentence."""
    requirements: Any = None
    """Requirements and properties for callers, or a function that computes them from the arguments; None: the default
    ones."""
    check: Callable[..., None] | None = None
    """Function of the arguments that raises ``ValueError`` if they do not go together."""

    def __call__(self, function: Function) -> Function:
        vars(function)[_ABOUT] = self
        return function


def about_of(function: Callable[..., Any]) -> About | None:
    """Return the description of a function, if it has one."""
    return getattr(function, _ABOUT, None)


def settings_of(function: Callable[..., Any], name: str, where: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a loss or an estimator that are settings: all but its inputs, which come first.

    Raises `ConfigError` if it takes no inputs.
    """
    parameters = {} if isinstance(function, type) else parameters_of(function, name, where)
    inputs = next(iter(parameters.values()), None)
    if inputs is None or inputs.kind in _NO_INPUTS:
        raise problem(where, f"`{name}` takes no inputs", "write a function whose first argument is its inputs")
    return by_name(parameters, () if inputs.kind is inspect.Parameter.VAR_POSITIONAL else (inputs.name,))


_NO_INPUTS = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def one_file_each(package: str) -> dict[str, PlugIn]:
    """Return the built-in functions of a package. Each has a file of its name; `base` and `shared` hold none."""
    names = [module.name for module in iter_modules(import_module(package).__path__)]
    return {name: PlugIn(f"{package}.{name}:{name}") for name in names if name not in ("base", "shared")}


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
    arguments = {**{key: each.default for key, each in settings.items() if key not in given}, **given}
    about = about_of(function) or About()
    if about.check is not None:
        try:
            about.check(**arguments)
        except ValueError as cause:
            raise ConfigError([ConfigProblem(paths[1], f"`{name}`: {cause}", "change one of them")]) from cause
    wanted = default if about.requirements is None else about.requirements
    return function, arguments, wanted(**arguments) if callable(wanted) else wanted


def _owners(kind: Kind[PlugIn], key: str) -> list[str]:
    """Return the built-in plug-ins that have a setting ``key``."""
    return [name for name in sorted(kind.built_in) if key in settings_of(kind.load(name, kind.name), name, kind.name)]


POLICY_LOSSES = Kind("policy loss", "roll.policy_losses", one_file_each("roll.algorithms.losses"), PlugIn)
ADVANTAGE_ESTIMATORS = Kind(
    "advantage estimator", "roll.advantage_estimators", one_file_each("roll.algorithms.advantages"), PlugIn
)
