"""Policy gradients with constant, bounded importance weights: every token keeps its direction.

The weight carries no gradient, so a bound limits how much a token counts but not the direction of its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.losses.base import POLICY_LOSSES, PolicyInputs, PolicyLossTraits, TokenMetrics, clip_fraction
from roll.algorithms.registry import knob


@dataclass(frozen=True)
class TISKnobs:
    """Arguments of `tis`."""

    lower: float = knob(0.0, help="Smallest importance weight.", at_least=0)
    upper: float = knob(1.0, help="Largest importance weight; `.inf` for none.", above=0)
    level: Literal["token", "sequence"] = knob(
        "token", help="The ratio of each token, or of the whole response: less bias, more variance."
    )

    def __post_init__(self) -> None:
        if self.lower >= self.upper:
            raise ValueError(f"lower must be below upper, not lower={self.lower}, upper={self.upper}")


@POLICY_LOSSES.register(
    "tis",
    TISKnobs,
    formula="−sg(clip(ρ, lower, upper))·A·log π; level sequence: with ∏ₜ ρₜ in the place of ρ",
    source="truncated importance sampling, Ionides 2008; IMPALA, Espeholt et al., arXiv 1802.01561",
    use="Moderately stale tokens and one update per batch: every token keeps a gradient and the variance is bounded; a "
    "larger upper bound trades variance for bias. Nothing holds the policy near the one that sampled.",
    traits=PolicyLossTraits(),
)
def tis_loss(inputs: PolicyInputs, knobs: TISKnobs) -> tuple[Tensor, TokenMetrics]:
    """Return -sg(clip(r, lower, upper)) A log pi, ``[batch, seq]`` (Ionides 2008; IMPALA, arXiv 1802.01561).

    Every token keeps a gradient; ``clip_fraction`` is the share of tokens whose weight was changed by the bounds.
    """
    log_ratio = inputs.log_ratio() if knobs.level == "token" else inputs.sequence_log_ratio(mean=False)
    ratio = log_ratio.detach().exp()
    weights = ratio.clamp(knobs.lower, knobs.upper)
    losses = -weights * inputs.advantages * inputs.logprobs
    return losses, clip_fraction(weights != ratio, losses)


@dataclass(frozen=True)
class CISPOKnobs:
    """Arguments of `cispo`."""

    epsilon_low: float = knob(
        1.0, help="Weights are at least 1 − `epsilon_low`; 1 or more: no lower bound, as in the paper.", at_least=0
    )
    epsilon_high: float = knob(
        0.28, help="Weights are at most 1 + `epsilon_high`. Above 0: this is a distance from 1, not a bound.", above=0
    )
    use_unified_mask: bool = knob(
        False, help="Whether tokens that PPO would cut with these two bounds lose their gradient (the paper's mask)."
    )


@POLICY_LOSSES.register(
    "cispo",
    CISPOKnobs,
    formula="−sg(clip(ρ, 1−epsilon_low, 1+epsilon_high))·M·A·log π, M = 1 or the unified mask",
    source="CISPO, MiniMax-M1, arXiv 2506.13585",
    use="Long reasoning, where PPO would drop the rare tokens that change direction: their weight is bounded, their "
    "gradient kept. As `tis` with bounds around 1; the unified mask brings back PPO's trust region.",
    traits=PolicyLossTraits(),
)
def cispo_loss(inputs: PolicyInputs, knobs: CISPOKnobs) -> tuple[Tensor, TokenMetrics]:
    """Return -sg(clip(r, 1 - epsilon_low, 1 + epsilon_high)) A log pi, ``[batch, seq]`` (arXiv 2506.13585).

    The source is MiniMax-M1. With the unified mask, the loss is 0 for a token with A > 0 and r > 1 + epsilon_high, or
    with A < 0 and r < 1 - epsilon_low. ``clip_fraction``: share of tokens whose weight was changed by the bounds or the
    mask.
    """
    ratio, advantages = inputs.ratio().detach(), inputs.advantages
    lower, upper = 1 - knobs.epsilon_low, 1 + knobs.epsilon_high
    weights = ratio.clamp(lower, upper)
    if knobs.use_unified_mask:
        cut = ((advantages > 0) & (ratio > upper)) | ((advantages < 0) & (ratio < lower))
        weights = torch.where(cut, 0.0, weights)
    return -weights * advantages * inputs.logprobs, clip_fraction(weights != ratio, weights)
