"""GMPO: the geometric mean of a response's clipped token ratios, which is robust to outliers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from roll.algorithms.losses.base import LossRequirements, PolicyInputs, TokenMetrics, clip_fraction, policy_loss


@policy_loss(
    formula="−A·exp(meanₜ cₜ), cₜ = min(log ρₜ, clip_high) where A > 0, max(log ρₜ, −clip_low) where A < 0",
    source="Geometric-mean policy optimization, Zhao et al., arXiv 2507.20673",
    use="When outliers among the token ratios make `ppo` unstable: the geometric mean hardly sees them, and the range "
    "can be wide. Defined for one advantage per response and the aggregation `seq-mean-token-mean`.",
    requirements=LossRequirements(sequence_valued=True),
)
def gmpo(
    inputs: PolicyInputs,
    *,
    clip_low: Annotated[
        float, Field(ge=0, description="Where A < 0, the log ratio of a token is at least −`clip_low`.")
    ] = 0.4,
    clip_high: Annotated[
        float, Field(ge=0, description="Where A > 0, the log ratio of a token is at most `clip_high`.")
    ] = 0.4,
) -> tuple[Tensor, TokenMetrics]:
    """Return -A times the geometric mean of the clipped ratios of the row, ``[batch, seq]`` (arXiv 2507.20673).

    The mean carries the gradient, so each token's loss has gradients for all tokens of its row. ``clip_fraction``:
    fraction of tokens whose own ratio is clipped and has no gradient.
    """
    log_ratio, advantages = inputs.log_ratio(), inputs.advantages
    above = (advantages > 0) & (log_ratio > clip_high)
    below = (advantages < 0) & (log_ratio < -clip_low)
    clipped = log_ratio.masked_fill(above, clip_high).masked_fill(below, -clip_low)
    mean = clipped.sum(-1, keepdim=True) / inputs.response_lengths()
    losses = -advantages * mean.exp()
    return losses, clip_fraction(above | below, losses)
