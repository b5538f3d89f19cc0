"""Losses and advantage estimators as plain functions of tensors, for use without a configuration file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from roll.algorithms.advantages.base import make_advantage_estimator
from roll.algorithms.advantages.shared import Groups
from roll.algorithms.kl import sequence_token_rewards
from roll.algorithms.losses.base import PolicyInputs, TokenMetrics, make_policy_loss
from roll.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES


def names() -> list[str]:
    """Return the names of all built-in losses and estimators."""
    return sorted({*POLICY_LOSSES.built_in, *ADVANTAGE_ESTIMATORS.built_in})


def function(name: str) -> Callable[..., Any]:
    """Return a built-in loss or estimator as a function of tensors and settings.

    A loss takes `PolicyInputs`; an estimator takes rewards, response mask and further tensors."""
    if name in POLICY_LOSSES.built_in:
        return _described(_loss(name), POLICY_LOSSES.load(name, name))
    return _described(_estimator(name), ADVANTAGE_ESTIMATORS.load(name, name))


def _loss(name: str) -> Callable[..., Any]:
    def loss(inputs: PolicyInputs, **settings: Any) -> tuple[Tensor, TokenMetrics]:
        """Return per-token losses and metrics, ``[batch, seq]``, 0 outside the mask.

        ``settings`` are the keys of `pg_variant_args`. Raises `roll.ConfigError` for an invalid setting, and
        ``ValueError`` for a missing input.
        """
        return make_policy_loss(name, settings)(inputs)

    return loss


def _estimator(name: str) -> Callable[..., Any]:
    def estimator(
        rewards: Tensor,
        response_mask: Tensor,
        groups: Groups | None = None,
        *,
        values: Tensor | None = None,
        baseline_rewards: Tensor | None = None,
        parts: Tensor | None = None,
        part_weights: Tensor | None = None,
        turns: Tensor | None = None,
        states: Tensor | None = None,
        **settings: Any,
    ) -> Tensor:
        """Return the advantages ``[batch, seq]`` of a whole batch, without gradient, 0 outside the mask.

        ``rewards`` are ``[batch]`` (one per response) or ``[batch, seq]`` (one per token). ``groups`` ``[batch]`` are
        group ids, integers or strings; only group-relative estimators need them. The other tensors are those of
        `AdvantageInputs`; ``settings`` are the keys of `adv_estimator_args`. Raises `roll.ConfigError` for an invalid
        setting, and ``ValueError`` for an input that is missing or has the wrong shape.
        """
        made = make_advantage_estimator(name, settings)
        of_tokens = getattr(rewards, "ndim", 1) == 2
        per_token = rewards if of_tokens else sequence_token_rewards(rewards, response_mask)
        fields = {
            "values": values,
            "baseline_rewards": baseline_rewards,
            "parts": parts,
            "part_weights": part_weights,
            "turns": turns,
            "states": states,
        }
        return made(per_token, response_mask, groups, **fields)

    return estimator


def _described(plain: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    plain.__name__ = plain.__qualname__ = own.__name__
    plain.__doc__ = f"{own.__doc__}\n\n{plain.__doc__}"
    return plain
