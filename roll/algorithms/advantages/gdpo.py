"""GDPO: several named rewards, each normalised within the group separately, then summed."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import Eps, compared, group_normalised
from roll.algorithms.aggregation import needed


def _requirements(normalize_by_batch: bool, **others: Any) -> AdvantageRequirements:
    return AdvantageRequirements(
        by_group=not normalize_by_batch, group_relative=True, needs_parts=True, whitens=normalize_by_batch
    )


@advantage_estimator(
    formula="A = (S − mean(S)) / (std(S) + eps) over the samples of the batch, "
    "S = Σ over rewards k of weight_k · (r_k − mean(r_k of the group)) / (std(r_k of the group) + eps)",
    source="GDPO, arXiv 2601.05242",
    use="Several rewards of different scales or frequencies (`rewards.<name>.weights`): `grpo` on their sum sees only "
    "the sum, so that different mixtures of rewards get one advantage, and the reward of the largest spread rules.",
    requirements=_requirements,
)
def gdpo(
    inputs: AdvantageInputs,
    *,
    normalize_by_batch: Annotated[
        bool, Field(description="Normalise the sum over the samples of the batch, as in the paper.")
    ] = True,
    eps: Eps = 1e-6,
) -> Tensor:
    """Return the weighted sum of the `grpo` advantages of each named reward, ``[batch, seq]`` (arXiv 2601.05242).

    With ``normalize_by_batch``, the sum is normalised over the samples of the batch. Deviations are unbiased, as in
    TRL's ``normalize_then_sum``.
    """
    present = inputs.response_mask.any(-1)
    parts = needed(inputs.parts, "parts")[present]
    weights = needed(inputs.part_weights, "part_weights")[present]

    def compare(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        total = torch.zeros_like(rewards)
        for values, weight in zip(parts.T, weights.T, strict=True):
            total = total + weight * group_normalised(values, groups, True, eps)
        return group_normalised(total, torch.zeros_like(groups), True, eps) if normalize_by_batch else total

    return compared(inputs, compare)
