"""RLOO: the baseline is the mean reward of the other samples of the group."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import compared, group_mean, group_sizes


@advantage_estimator(
    formula="A = R − mean(R of the other samples of the group)",
    source="RLOO, arXiv 2402.14740; Kool et al. 2019",
    use="Unbiased for any group size, with the variance of a good baseline. For rewards whose scale is to be kept.",
    requirements=AdvantageRequirements(by_group=True, group_relative=True, shifts_cancel="group"),
)
def rloo(inputs: AdvantageInputs) -> Tensor:
    """Return the reward minus the mean of the group's other rewards, ``[batch, seq]`` (arXiv 2402.14740)."""

    def leave_one_out(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        sizes = group_sizes(groups)
        return (rewards - group_mean(rewards, groups)) * sizes / (sizes - 1).clamp(min=1)

    return compared(inputs, leave_one_out)
