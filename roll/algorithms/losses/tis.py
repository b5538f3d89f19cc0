"""Truncated importance sampling: policy gradient with a clipped importance weight without gradient.

A bound limits the weight of a token, but does not change the direction of its gradient.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from roll.algorithms.losses.base import PolicyInputs, TokenMetrics, clip_fraction, policy_loss


def _check_bounds(lower: float, upper: float, **others: Any) -> None:
    if lower >= upper:
        raise ValueError(f"lower must be below upper, not lower={lower}, upper={upper}")


@policy_loss(
    formula="−sg(clip(ρ, lower, upper))·A·log π; level sequence: with ∏ₜ ρₜ in the place of ρ",
    source="truncated importance sampling, Ionides 2008; IMPALA, Espeholt et al., arXiv 1802.01561",
    use="Moderately stale tokens and one update per batch: every token keeps a gradient and the variance is bounded; a "
    "larger upper bound trades variance for bias. Nothing holds the policy near the one that sampled.",
    check=_check_bounds,
)
def tis(
    inputs: PolicyInputs,
    *,
    lower: Annotated[float, Field(ge=0, description="Smallest importance weight.")] = 0.0,
    upper: Annotated[float, Field(gt=0, description="Largest importance weight; `.inf` for none.")] = 1.0,
    level: Annotated[
        Literal["token", "sequence"],
        Field(description="The ratio of each token, or of the whole response: less bias, more variance."),
    ] = "token",
) -> tuple[Tensor, TokenMetrics]:
    """Return -sg(clip(r, lower, upper)) A log pi, ``[batch, seq]`` (Ionides 2008; IMPALA, arXiv 1802.01561).

    Every token keeps a gradient. ``clip_fraction``: fraction of tokens whose weight was changed by the bounds.
    """
    log_ratio = inputs.log_ratio() if level == "token" else inputs.sequence_log_ratio(mean=False)
    ratio = log_ratio.detach().exp()
    weights = ratio.clamp(lower, upper)
    losses = -weights * inputs.advantages * inputs.logprobs
    return losses, clip_fraction(weights != ratio, losses)
