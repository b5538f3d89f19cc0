"""Converts wrong options of a trainer to problems of the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roll.algorithms.registry import KnobError
from roll.configs.errors import ConfigProblem


def option_problems(
    parse: Callable[[dict[str, Any]], object], strategy_config: dict[str, Any], path: str
) -> list[ConfigProblem]:
    """Return what ``parse`` finds wrong with the ``strategy_config`` at ``path``; empty if nothing."""
    try:
        parse(strategy_config)
    except KnobError as error:
        return [
            ConfigProblem(path if found.knob is None else f"{path}.{found.knob}", found.message, found.remedy)
            for found in error.problems
        ]
    return []
