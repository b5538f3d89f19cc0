"""What the tests of trainers share."""

from __future__ import annotations

from typing import Any

from roll.configs.roles import ModelArguments, TrainingArguments
from roll.runtime.placement import free_port
from roll.trainers.base import TrainerSetup
from roll.trainers.step import MicroBatchLimits

ALMOST_SGD = TrainingArguments(learning_rate=0.5, adam_epsilon=1.0, max_grad_norm=0.0)
"""With epsilon 1 the first update is -lr g / (|g| + 1): smooth in the gradient, so weights reveal it to rounding."""


def trainer_setup(
    model_path: str,
    *,
    max_tokens: int | None = 10_000,
    max_samples: int = 1,
    packed: bool = False,
    port: int | None = None,
    **changes: Any,
) -> TrainerSetup:
    """One rank on a CPU with the default arguments, unless said otherwise."""
    limits = MicroBatchLimits(max_tokens, max_samples, packed)
    settings = {
        "rank": 0,
        "world_size": 1,
        "master_address": "127.0.0.1",
        "master_port": port or free_port(),
        "device": "cpu",
        "model_args": ModelArguments(),
        "training_args": TrainingArguments(),
        "total_optimizer_steps": 10,
        "train_limits": limits,
        "infer_limits": limits,
        "kind": "policy",
        "forward_only": False,
        "seed": 0,
        "strategy_config": {"process_group_timeout_seconds": 60},
    }
    return TrainerSetup(model_path=model_path, **settings | changes)
