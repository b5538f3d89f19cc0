"""Kimi k1.5: policy gradient plus a squared log-ratio penalty towards the old policy.

There is no importance weight: a stale token keeps its full weight, and only the penalty keeps the policy close to the
old one. This is the surrogate loss of policy mirror descent, whose optimum is valid for off-policy tokens.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from roll.algorithms.losses.base import LossRequirements, PolicyInputs, TokenMetrics, nothing_clipped, policy_loss


def _requirements(level: str, **others: Any) -> LossRequirements:
    return LossRequirements(importance_weighted=False, sequence_valued=level == "sequence")


@policy_loss(
    formula="−A·log π + (tau/2)·d², d = log ρ; level sequence: (tau/2)·(Σₜ dₜ)² spread evenly over the response tokens",
    source="Kimi k1.5, arXiv 2501.12599",
    use="Stale tokens without importance weights, and so without their variance. The paper's method is level "
    "`sequence` with the aggregation `seq-mean-token-sum`.",
    requirements=_requirements,
)
def kimi15(
    inputs: PolicyInputs,
    *,
    tau: Annotated[float, Field(gt=0, lt=math.inf, description="Strength of the pull towards the old policy.")] = 0.1,
    level: Annotated[
        Literal["token", "sequence"],
        Field(
            description="Squares of the log ratios of the tokens, an approximation, or the square of that of the whole "
            "response, as in the paper."
        ),
    ] = "token",
) -> tuple[Tensor, TokenMetrics]:
    """Return -A log pi + (tau / 2) d^2, ``[batch, seq]``, with d the log ratio (arXiv 2501.12599). Clips nothing.

    With level ``sequence``, the penalty of each of the n response tokens is (tau / 2) D^2 / n, where D is the sum of d
    over the row, so the sum over tokens is the paper's term.
    """
    if level == "token":
        squared = inputs.log_ratio().square()
    else:
        squared = inputs.sequence_log_ratio(mean=False).square() / inputs.response_lengths()
    losses = -inputs.advantages * inputs.logprobs + tau / 2 * squared
    return losses, nothing_clipped(losses)
