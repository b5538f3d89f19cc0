"""The registry of stages, with which a run can replace a built-in stage by one of its own.

A custom stage subclasses the built-in stage that it replaces and is built with the same arguments. It is registered
with `register_stage`, or named as `package.module:Class` in the `stages` section of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from roll.configs.errors import ConfigError, ConfigProblem
from roll.data.imports import import_object
from roll.pipeline.stage import Stage

StageClass = TypeVar("StageClass", bound=type[Stage])

_STAGES: dict[str, type[Stage]] = {}


def register_stage(name: str) -> Callable[[StageClass], StageClass]:
    """Return a class decorator that registers a stage under a name. It raises `ValueError` if the name is taken."""

    def register(stage: StageClass) -> StageClass:
        if name in _STAGES:
            raise ValueError(f"a stage named {name!r} is already registered")
        _STAGES[name] = stage
        return stage

    return register


def resolve_stages(defaults: Mapping[str, str], chosen: Mapping[str, str]) -> dict[str, type[Stage]]:
    """Return the class of each stage: the default or the chosen one.

    Raises `ConfigError` for classes that cannot be found or do not fit.
    """
    problems: list[ConfigProblem] = []
    classes = {stage: _STAGES[name] for stage, name in defaults.items()}
    for stage, name in chosen.items():
        path = f"stages.{stage}"
        if stage not in defaults:
            problems.append(
                ConfigProblem(path, f"there is no stage {stage!r} to replace", f"choose from {sorted(defaults)}")
            )
            continue
        try:
            found = _STAGES[name] if name in _STAGES else import_object(name)
        except ImportError as error:
            problems.append(
                ConfigProblem(path, str(error), f"give a registered name ({sorted(_STAGES)}) or `package.module:Class`")
            )
            continue
        if not (isinstance(found, type) and issubclass(found, classes[stage])):
            problems.append(
                ConfigProblem(
                    path,
                    f"{name!r} is not a subclass of {classes[stage].__name__}",
                    f"derive the stage from roll.pipeline.stages.{classes[stage].__name__}",
                )
            )
            continue
        classes[stage] = found
    if problems:
        raise ConfigError(problems)
    return classes
