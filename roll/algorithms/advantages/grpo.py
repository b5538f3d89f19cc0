"""GRPO: rewards minus the group mean, divided by the group's standard deviation or not (Dr. GRPO)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import Eps, compared, group_normalised


def _requirements(normalize_by_std: bool, **others: Any) -> AdvantageRequirements:
    return AdvantageRequirements(
        by_group=True,
        group_relative=True,
        shifts_cancel="group",
        scales_cancel="group" if normalize_by_std else "none",
    )


@advantage_estimator(
    formula="A = (R − mean(R of the group)) / (std(R of the group) + eps)",
    source="GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783",
    use="The usual choice for verifiable rewards with several samples a prompt. With normalize_by_std: false, groups "
    "that nearly always succeed or fail are not blown up.",
    requirements=_requirements,
)
def grpo(
    inputs: AdvantageInputs,
    *,
    normalize_by_std: Annotated[
        bool, Field(description="Divide by the group's standard deviation; false gives the estimator of Dr. GRPO.")
    ] = True,
    eps: Eps = 1e-6,
) -> Tensor:
    """Return (reward - group mean) / (group standard deviation + eps), ``[batch, seq]`` (arXiv 2402.03300).

    The deviation is unbiased. Exactly 0 in a group of one sample and in a group of equal rewards.
    """
    return compared(inputs, lambda rewards, groups, _: group_normalised(rewards, groups, normalize_by_std, eps))
