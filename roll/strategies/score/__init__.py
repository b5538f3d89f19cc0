"""Engines of reward models by name. An engine's module, and with it torch, is imported only when it is chosen."""

from __future__ import annotations

import importlib

from roll.strategies.score.base import ScorerSetup, ScoreStrategy

SCORE_STRATEGIES: dict[str, str] = {"hf_infer": "roll.strategies.score.hf_classifier:HFClassifier"}
"""Strategy name -> ``module:class``."""


def build_score_strategy(name: str, setup: ScorerSetup) -> ScoreStrategy:
    """The engine registered under ``name``, its model loaded."""
    module, class_name = SCORE_STRATEGIES[name].split(":")
    return getattr(importlib.import_module(module), class_name)(setup)
