"""The plain policy gradient (REINFORCE loss), without any correction for the sampling policy."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.losses.base import LossRequirements, PolicyInputs, TokenMetrics, nothing_clipped, policy_loss


@policy_loss(
    formula="−A·log π",
    source="REINFORCE, Williams 1992; Sutton et al. 2000",
    use="On-policy tokens only, with one update per batch. It corrects nothing: the baseline to compare with.",
    requirements=LossRequirements(uses_old_policy=False, importance_weighted=False, corrects=False),
)
def vanilla(inputs: PolicyInputs) -> tuple[Tensor, TokenMetrics]:
    """Return -A log pi, ``[batch, seq]`` (REINFORCE, Williams 1992). For on-policy tokens only; clips nothing."""
    return -inputs.advantages * inputs.logprobs, nothing_clipped(inputs.logprobs)
