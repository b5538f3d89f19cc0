"""Options that `strategy_config` may contain for `fsdp2_train`. Kept apart from the trainer, so that checking is
quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from roll.algorithms.registry import build_knobs
from roll.configs.errors import ConfigProblem
from roll.strategies.train.option_problems import option_problems


@dataclass(frozen=True)
class Fsdp2Options:
    """Checked options of ``strategy_config``."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass and gather them again for the backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    offload: Literal["none", "cpu"] = "none"
    """Place where weights, gradients and optimizer state are kept and optimizer steps are taken. The device
    computes."""
    process_group_timeout_seconds: float = 600.0
    """Longest wait in a collective before it fails."""

    def __post_init__(self) -> None:
        if not 0 < self.process_group_timeout_seconds < float("inf"):
            raise ValueError("process_group_timeout_seconds must be above 0 and finite")


def parse_options(strategy_config: dict[str, Any]) -> Fsdp2Options:
    """Return checked options. Raises ``KnobError`` (a ``ValueError``) listing every unknown key and wrong value."""
    return build_knobs(Fsdp2Options, strategy_config, "strategy 'fsdp2_train'")


def check_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path`` of the configuration; empty if nothing."""
    return option_problems(parse_options, strategy_config, path)
