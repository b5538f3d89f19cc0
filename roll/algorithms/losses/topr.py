"""TOPR: imitates successful responses of any policy; unlearns failures only as far as the policy still produces them.

Lowering the probability of a response that the policy no longer produces is unbounded and teaches nothing. The
importance ratio of the whole response, truncated to at most 1, gives such responses a small weight. Successes need no
ratio, because raising their probability is bounded.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from roll.algorithms.aggregation import needed
from roll.algorithms.losses.base import LossRequirements, PolicyInputs, TokenMetrics, clip_fraction, policy_loss


def _check_weights(positive_weight: float, negative_weight: float, **others: Any) -> None:
    if positive_weight == negative_weight == 0:
        raise ValueError("positive_weight and negative_weight are both 0: nothing would be trained")


@policy_loss(
    formula="score > positive_above: −w₊·A·log π; otherwise: −w₋·sg(clip(ρ_seq, 0, 1))·A·log π, ρ_seq = ∏ₜ ρₜ",
    source="Tapered off-policy REINFORCE, Le Roux et al., arXiv 2503.14286",
    use="Very stale or recorded data with rewards of either sign, and no KL penalty. The ratio of a long response is "
    "soon 0, so it learns little from old failures; level `token` is milder and no longer the paper's method.",
    requirements=LossRequirements(needs_scores=True),
    check=_check_weights,
)
def topr(
    inputs: PolicyInputs,
    *,
    positive_weight: Annotated[float, Field(ge=0, description="Weight of responses with a positive score.")] = 1.0,
    negative_weight: Annotated[float, Field(ge=0, description="Weight of the other responses.")] = 1.0,
    positive_above: Annotated[float, Field(ge=-math.inf, description="A score above this is positive.")] = 0.0,
    level: Annotated[
        Literal["sequence", "token"],
        Field(description="Ratio of the whole response, as in the paper, or of each token, an approximation of it."),
    ] = "sequence",
) -> tuple[Tensor, TokenMetrics]:
    """Return -w A log pi, ``[batch, seq]``, with a constant weight w (arXiv 2503.14286).

    w is ``positive_weight`` for rows whose score is above ``positive_above``, else ``negative_weight`` times the ratio
    truncated to [0, 1]. ``clip_fraction``: fraction of tokens whose ratio was truncated.
    """
    positive = (needed(inputs.scores, "scores") > positive_above)[:, None]
    log_ratio = inputs.sequence_log_ratio(mean=False) if level == "sequence" else inputs.log_ratio()
    log_ratio = log_ratio.detach()
    tapered = negative_weight * log_ratio.clamp(max=0).exp()
    weights = torch.where(positive, positive_weight, tapered)
    losses = -weights * inputs.advantages * inputs.logprobs
    return losses, clip_fraction(~positive & (log_ratio > 0), losses)
