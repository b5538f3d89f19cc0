"""Reinforcement-learning algorithms as pure functions on ``[batch, seq]`` tensors with a response mask.

Masked positions influence no value and no gradient, inputs are never modified, and results do not depend on how a batch
is split. Notebooks and other trainers can use everything from this package directly: every loss and estimator under its
configuration name (`roll.algorithms.ppo`), with validated settings, and the functions around them. Names are imported
on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "aggregation": ("LOSS_AGG_MODES", "LossNormalizers", "aggregate"),
    "advantages.base": (
        "AdvantageInputs",
        "estimate_advantages",
        "make_advantage_estimator",
        "shape_advantages",
        "whiten",
    ),
    "correction": ("Correction", "CorrectionResult", "correct", "parse_correction"),
    "kl": (
        "AdaptiveKLController",
        "KLController",
        "KL_ESTIMATORS",
        "kl_penalised_token_rewards",
        "sequence_token_rewards",
        "token_kl",
    ),
    "logprobs": ("token_logprobs", "token_logprobs_and_entropy"),
    "losses.base": ("PolicyInputs", "PolicyLoss", "make_policy_loss"),
    "objective": ("value_loss",),
    "rewards": ("RunningMoments", "normalize_rewards", "overlong_penalty"),
}
_MODULE = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE:
        found = getattr(import_module(f"roll.algorithms.{_MODULE[name]}"), name)
    else:
        plain = import_module("roll.algorithms.plain")
        if name not in plain.names():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = plain.function(name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE, *import_module("roll.algorithms.plain").names()})
