"""Kimi k1.5: the plain policy gradient, held near the anchor by a squared log ratio.

There is no importance weight: a stale token keeps its full weight, and the penalty alone keeps the policy close to the
one that sampled the token. It is the surrogate of policy mirror descent, whose optimum holds for tokens of any policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from roll.algorithms.losses.base import POLICY_LOSSES, PolicyInputs, PolicyLossTraits, TokenMetrics, nothing_clipped
from roll.algorithms.registry import knob


@dataclass(frozen=True)
class Kimi15Knobs:
    """Arguments of `kimi15`."""

    tau: float = knob(0.1, help="Strength of the pull towards the anchor.", above=0, below=math.inf)
    level: Literal["token", "sequence"] = knob(
        "token",
        help="Squares of the log ratios of the tokens, an approximation, or the square of that of the whole response, "
        "as in the paper.",
    )


@POLICY_LOSSES.register(
    "kimi15",
    Kimi15Knobs,
    formula="−A·log π + (tau/2)·d², d = log ρ; level sequence: (tau/2)·(Σₜ dₜ)² spread evenly over the response tokens",
    source="Kimi k1.5, arXiv 2501.12599",
    use="Stale tokens without importance weights, and so without their variance. The paper's method is level "
    "`sequence` with the aggregation `seq-mean-token-sum`.",
    traits=lambda knobs: PolicyLossTraits(importance_weighted=False, sequence_valued=knobs.level == "sequence"),
)
def kimi15_loss(inputs: PolicyInputs, knobs: Kimi15Knobs) -> tuple[Tensor, TokenMetrics]:
    """Return -A log pi + (tau / 2) d^2, ``[batch, seq]``, with d the log ratio (arXiv 2501.12599). Clips nothing.

    Level ``sequence``: each of the n response tokens has (tau / 2) D^2 / n with D the sum of d over the row, so that
    their sum is the paper's term.
    """
    if knobs.level == "token":
        squared = inputs.log_ratio().square()
    else:
        squared = inputs.sequence_log_ratio(mean=False).square() / inputs.response_lengths()
    losses = -inputs.advantages * inputs.logprobs + knobs.tau / 2 * squared
    return losses, nothing_clipped(losses)
