"""OPO: the baseline is the group's mean reward, weighted by response length."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import compared, group_mean


@advantage_estimator(
    formula="A = R − Σ(length · R) / Σ(length), over the samples of the group",
    source="OPO, arXiv 2505.23585",
    use="The baseline of least variance where the squared gradient grows with the length; for on-policy training on "
    "responses of very different lengths. A sample is part of its own baseline, so the gradient is biased by O(1/n).",
    requirements=AdvantageRequirements(by_group=True, group_relative=True, shifts_cancel="group"),
)
def opo(inputs: AdvantageInputs) -> Tensor:
    """Return the reward minus the length-weighted group mean (tokens), ``[batch, seq]`` (arXiv 2505.23585)."""
    return compared(inputs, lambda rewards, groups, lengths: rewards - group_mean(rewards, groups, lengths))
