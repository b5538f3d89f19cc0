"""Registry of policy losses and advantage estimators: lookup by name, descriptions, validation of their settings.

A function's keyword arguments are its settings. A decorator adds the text for the reference page, the requirements, and
a check of relations between settings; a function without a decorator has the default requirements. This module imports
no torch, so that configuration checks can use the names.
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

COMPARE_SCORES = ("grpo", "rloo", "opo", "pass_at_k", "reinforce_plus_plus_baseline")
"""Advantage estimators with which a group of equal scores has no advantage."""
_ABOUT = "about"


@dataclass(frozen=True)
class About:
    """Description of a loss or an estimator. Used as a decorator, which attaches the description to the function."""

    formula: str = ""
    source: str = ""
    """Paper or book, with the arXiv number if it has one."""
    use: str = ""
    """When to choose it, in a sentence or two."""
    requirements: Any = None
    """Requirements record (`LossRequirements` or `AdvantageRequirements`), or a function of the settings that returns
    one. None: the defaults."""
    check: Callable[..., None] | None = None
    """Function of the settings that raises ``ValueError`` if their combination is invalid."""

    def __call__(self, function: Function) -> Function:
        vars(function)[_ABOUT] = self
        return function


def about_of(function: Callable[..., Any]) -> About | None:
    """Return the description attached to a loss or estimator; None if it has none."""
    return getattr(function, _ABOUT, None)


def settings_of(function: Callable[..., Any], name: str, where: str) -> dict[str, inspect.Parameter]:
    """Return the settings of a loss or an estimator: all its parameters except the first, which takes the inputs.

    ``name`` and ``where`` (a configuration path) are for messages. Raises `ConfigError` if it has no such parameter.
    """
    parameters = {} if isinstance(function, type) else parameters_of(function, name, where)
    inputs = next(iter(parameters.values()), None)
    if inputs is None or inputs.kind in _NO_INPUTS:
        raise problem(where, f"`{name}` takes no inputs", "write a function whose first argument is its inputs")
    return by_name(parameters, () if inputs.kind is inspect.Parameter.VAR_POSITIONAL else (inputs.name,))


_NO_INPUTS = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def one_file_each(package: str) -> dict[str, PlugIn]:
    """Return the built-in losses or estimators of a package: module ``x`` defines function ``x``.

    The modules `base` and `shared` are skipped."""
    names = [module.name for module in iter_modules(import_module(package).__path__)]
    return {name: PlugIn(f"{package}.{name}:{name}") for name in names if name not in ("base", "shared")}


def built(
    kind: Kind[PlugIn], name: str, args: Mapping[str, Any], paths: tuple[str, str], default: Any
) -> tuple[Callable[..., Any], dict[str, Any], Any]:
    """Return the loss or estimator ``name``, all its settings, and its requirements (``default`` if it declares none).

    ``args`` are the settings that the user gave. Integers are accepted for floats; no other value is converted.
    ``paths`` are the configuration paths of the name and of the settings. Raises `ConfigError` listing every unknown
    name, wrong type and value out of range.
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
    """Return the names of the built-in plug-ins that have a setting ``key``."""
    return [name for name in sorted(kind.built_in) if key in settings_of(kind.load(name, kind.name), name, kind.name)]


POLICY_LOSSES = Kind("policy loss", "roll.policy_losses", one_file_each("roll.algorithms.losses"), PlugIn)
ADVANTAGE_ESTIMATORS = Kind(
    "advantage estimator", "roll.advantage_estimators", one_file_each("roll.algorithms.advantages"), PlugIn
)
