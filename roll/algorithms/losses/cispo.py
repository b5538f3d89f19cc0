"""CISPO: policy gradient with a clipped importance weight without gradient; PPO's trust region is optional."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from roll.algorithms.losses.base import PolicyInputs, TokenMetrics, clip_fraction, policy_loss


@policy_loss(
    formula="−sg(clip(ρ, 1−epsilon_low, 1+epsilon_high))·M·A·log π, M = 1 or the unified mask",
    source="CISPO, MiniMax-M1, arXiv 2506.13585",
    use="Long reasoning, where PPO would drop the rare tokens that change direction: their weight is bounded, their "
    "gradient kept. As `tis` with bounds around 1; the unified mask brings back PPO's trust region.",
)
def cispo(
    inputs: PolicyInputs,
    *,
    epsilon_low: Annotated[
        float,
        Field(ge=0, description="Weights are at least 1 − `epsilon_low`; 1 or more: no lower bound, as in the paper."),
    ] = 1.0,
    epsilon_high: Annotated[
        float,
        Field(
            gt=0, description="Weights are at most 1 + `epsilon_high`. Above 0: this is a distance from 1, not a bound."
        ),
    ] = 0.28,
    use_unified_mask: Annotated[
        bool,
        Field(description="Tokens that PPO would cut with these two bounds lose their gradient (the paper's mask)."),
    ] = False,
) -> tuple[Tensor, TokenMetrics]:
    """Return -sg(clip(r, 1 - epsilon_low, 1 + epsilon_high)) A log pi, ``[batch, seq]`` (arXiv 2506.13585).

    With the unified mask, the loss is 0 for a token with A > 0 and r > 1 + epsilon_high, or with A < 0 and
    r < 1 - epsilon_low. ``clip_fraction``: fraction of tokens whose weight was changed by the bounds or the mask.
    """
    ratio, advantages = inputs.ratio().detach(), inputs.advantages
    lower, upper = 1 - epsilon_low, 1 + epsilon_high
    weights = ratio.clamp(lower, upper)
    if use_unified_mask:
        cut = ((advantages > 0) & (ratio > upper)) | ((advantages < 0) & (ratio < lower))
        weights = torch.where(cut, 0.0, weights)
    return -weights * advantages * inputs.logprobs, clip_fraction(weights != ratio, weights)
