"""Trainers by the name that ``strategy_args.strategy_name`` uses.

A trainer is imported when it is built, so naming one costs nothing. A new trainer is a new file and one line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from roll.runtime.plugins import registered_class

if TYPE_CHECKING:
    from roll.configs.errors import ConfigProblem
    from roll.trainers.base import ForwardStrategy, TrainerSetup, TrainStrategy

TRAIN_STRATEGIES = {
    "fsdp2_train": "roll.trainers.fsdp2:Fsdp2TrainStrategy",
    "deepspeed_train": "roll.trainers.deepspeed:DeepSpeedTrainStrategy",
    "megatron_train": "roll.trainers.megatron.strategy:MegatronTrainStrategy",
}
"""Strategy name -> ``module:class``."""

FORWARD_STRATEGIES = {"hf_infer": "roll.trainers.replica:HfReplicaStrategy"}
"""Strategy name -> ``module:class``, for strategies that only drive forward-only roles and cannot train."""

OPTION_CHECKS = {
    "fsdp2_train": "roll.trainers.base:check_fsdp2_options",
    "deepspeed_train": "roll.trainers.deepspeed_options:check_options",
    "megatron_train": "roll.trainers.megatron.facts:check_options",
    "hf_infer": "roll.trainers.base:check_replica_options",
}
"""Strategy name -> ``module:function`` that checks its ``strategy_config``."""


def train_strategy_class(name: str, own: str | None = None) -> type:
    """Return the trainer class registered as ``name``, or its subclass ``own`` (see `registered_class`).

    Raises ``ValueError`` with the valid names if ``name`` is not registered.
    """
    return _registered(name, own, TRAIN_STRATEGIES, "training")


def forward_strategy_class(name: str, own: str | None = None) -> type:
    """Return the class for a forward-only role: a trainer, or a strategy that cannot train. See
    `train_strategy_class`."""
    return _registered(name, own, {**TRAIN_STRATEGIES, **FORWARD_STRATEGIES}, "forward-only")


def build_train_strategy(name: str, setup: TrainerSetup, own: str | None = None) -> TrainStrategy:
    """Return one rank of the trainer ``name``, or of its subclass ``own``, not yet initialised."""
    return train_strategy_class(name, own)(setup)


def build_forward_strategy(name: str, setup: TrainerSetup, own: str | None = None) -> ForwardStrategy:
    """Return one rank of the strategy ``name``, or of its subclass ``own``, for a forward-only role; not yet
    initialised."""
    return forward_strategy_class(name, own)(setup)


def _registered(name: str, own: str | None, registered: Mapping[str, str], what: str) -> type:
    if name not in registered:
        raise ValueError(f"unknown {what} strategy {name!r}; valid: {', '.join(sorted(registered))}")
    return registered_class(registered, name, own)


def train_option_check(name: str) -> Callable[[dict[str, Any], str], list[ConfigProblem]]:
    """Return the function that checks a trainer's ``strategy_config``: (options, their path) -> problems.

    Imports no trainer.
    """
    module, _, function = OPTION_CHECKS[name].partition(":")
    return getattr(importlib.import_module(module), function)
