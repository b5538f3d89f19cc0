"""Options that `strategy_config` may contain for `hf_infer` as the reference. Kept apart, so that checking is quick."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from roll.algorithms.registry import build_knobs, knob
from roll.configs.errors import ConfigProblem
from roll.strategies.train.option_problems import option_problems


@dataclass(frozen=True)
class HfReplicaOptions:
    """Checked options of ``strategy_config``."""

    process_group_timeout_seconds: float = knob(
        600.0, help="Longest wait of a rank for the results of the others.", above=0, below=math.inf
    )


def parse_options(strategy_config: dict[str, Any]) -> HfReplicaOptions:
    """Return checked options. Raises ``KnobError`` (a ``ValueError``) listing every unknown key and wrong value."""
    return build_knobs(HfReplicaOptions, strategy_config, "strategy 'hf_infer' of a reference")


def check_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path`` of the configuration; empty if nothing."""
    return option_problems(parse_options, strategy_config, path)
