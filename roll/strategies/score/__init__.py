"""Engines of reward models by name. An engine's module, and with it torch, is imported only when it is chosen."""

from __future__ import annotations

from roll.strategies.registered import registered_class
from roll.strategies.score.base import ScorerSetup, ScoreStrategy

SCORE_STRATEGIES: dict[str, str] = {"hf_infer": "roll.strategies.score.hf_classifier:HFClassifier"}
"""Strategy name -> ``module:class``."""


def score_strategy_class(name: str, own: str | None = None) -> type:
    """Return the class registered under ``name``, or its subclass ``own`` (see `registered_class`)."""
    return registered_class(SCORE_STRATEGIES, name, own)


def build_score_strategy(name: str, setup: ScorerSetup, own: str | None = None) -> ScoreStrategy:
    """Return the engine registered under ``name``, or its subclass ``own``, with its model loaded."""
    return score_strategy_class(name, own)(setup)
