"""Trainers by the name that ``strategy_args.strategy_name`` uses.

A strategy is imported when it is built, so that naming one costs nothing. A new trainer is a new file and one line
here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.strategies.train.base import TrainStrategy

TRAIN_STRATEGIES = {"fsdp2_train": "roll.strategies.train.fsdp2:Fsdp2TrainStrategy"}


def train_strategy_class(name: str) -> type:
    """The class registered as ``name``; ``ValueError`` with the valid names otherwise."""
    if name not in TRAIN_STRATEGIES:
        raise ValueError(f"unknown training strategy {name!r}; valid: {', '.join(sorted(TRAIN_STRATEGIES))}")
    module, _, class_name = TRAIN_STRATEGIES[name].partition(":")
    return getattr(importlib.import_module(module), class_name)


def build_train_strategy(name: str, model_path: str, **arguments: Any) -> TrainStrategy:
    """One rank of the trainer ``name``, not yet initialised; ``arguments`` are those of its constructor."""
    return train_strategy_class(name)(model_path, **arguments)
