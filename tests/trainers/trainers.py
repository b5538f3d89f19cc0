"""What the tests of trainers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from roll.configs.roles import ModelArguments, StrategyArguments, TrainingArguments, WorkerConfig
from roll.runtime.placement import free_port
from roll.trainers.base import TrainerSetup

ALMOST_SGD = TrainingArguments(learning_rate=0.5, adam_epsilon=1.0, max_grad_norm=0.0)
"""With epsilon 1 the first update is -lr g / (|g| + 1): smooth in the gradient, so weights reveal it to rounding."""


def trainer_setup(
    model_path: str,
    *,
    max_tokens: int | None = 10_000,
    max_samples: int = 1,
    infer_tokens: int | None = None,
    packed: bool = False,
    port: int | None = None,
    model_args: ModelArguments | None = None,
    training_args: TrainingArguments | None = None,
    strategy_config: dict[str, Any] | None = None,
    **changes: Any,
) -> TrainerSetup:
    """One rank on a CPU with the default arguments, unless said otherwise. ``infer_tokens``: where it is not
    ``max_tokens`` that limits passes without gradients."""
    options = {"process_group_timeout_seconds": 60} if strategy_config is None else strategy_config
    dynamic = max_tokens is not None
    config = WorkerConfig(
        model_args=model_args or ModelArguments(),
        training_args=replace(training_args or TrainingArguments(), per_device_train_batch_size=max_samples),
        strategy_args=StrategyArguments(strategy_config=options),
        infer_batch_size=max_samples,
        use_dynamic_batching_in_train=dynamic,
        max_tokens_per_microbatch_in_train=max_tokens or 1,
        use_dynamic_batching_in_infer=dynamic,
        max_tokens_per_microbatch_in_infer=infer_tokens or max_tokens or 1,
        use_sequence_packing=packed,
    )
    settings = {"total_optimizer_steps": 10, "seed": 0, "master_port": port or free_port()}
    return TrainerSetup(config, model_path, **settings | changes)


def assert_close(results: Mapping[str, Any], expected: Mapping[str, Any], *, rtol: float, atol: float) -> None:
    """The same names, and finite values that differ by rounding only."""
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert np.isfinite(value).all(), name
        np.testing.assert_allclose(results[name], value, rtol=rtol, atol=atol, err_msg=name)
