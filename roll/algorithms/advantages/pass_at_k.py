"""Pass@k: a sample's advantage is its contribution to the best of k samples of its group."""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import Eps, compared


def _requirements(k: int, baseline: str, **others: Any) -> AdvantageRequirements:
    return AdvantageRequirements(
        by_group=True,
        group_relative=True,
        least_samples=k + 1,
        shifts_cancel="group",
        scales_cancel="group" if baseline == "group" else "none",
    )


@advantage_estimator(
    formula="A = (V − M) / (S + eps), V = mean of the largest R of the k-subsets of the group that contain the sample, "
    "M and S = mean and standard deviation of the largest R of all its k-subsets; baseline leave_one_out: "
    "A = V − mean of the largest R of the k-subsets without the sample",
    source="Pass@k training, Chen et al., arXiv 2508.10751; leave-one-out, Walder and Karkhanis, arXiv 2505.15201",
    use="Exploration: of several attempts at a problem only the best counts, so that groups that mostly succeed teach "
    "little and rare successes much. k = 1 is `rloo` (leave_one_out), or `grpo` with the population's "
    "deviation.",
    requirements=_requirements,
)
def pass_at_k(
    inputs: AdvantageInputs,
    *,
    k: Annotated[int, Field(ge=1, description="Attempts of which the best counts; less than the group has.")] = 4,
    baseline: Annotated[
        Literal["group", "leave_one_out"],
        Field(
            description="All samples of the group, and division by the standard deviation, as in the paper; or the "
            "others only, without division: unbiased for the gradient of pass@k, up to the factor k."
        ),
    ] = "group",
    eps: Eps = 1e-6,
) -> Tensor:
    """Return the advantages for the objective pass@k (largest reward of k samples), ``[batch, seq]``, in closed form.

    With rewards 0 and 1, baseline ``group`` gives the paper's analytic advantages (arXiv 2508.10751). In a group of k
    samples or fewer, advantages are 0.
    """

    def compare(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        advantages = torch.zeros_like(rewards)
        for group in groups.unique():
            rows = (groups == group).nonzero()[:, 0]
            if len(rows) > k and rewards[rows].min() < rewards[rows].max():
                advantages[rows] = _advantages(rewards[rows], k, baseline, eps)
        return advantages

    return compared(inputs, compare)


def _advantages(rewards: Tensor, k: int, baseline: str, eps: float) -> Tensor:
    """Return the advantages of a group of more than k samples, ``[samples]``."""
    ordered, order = rewards.sort(stable=True)
    ordered = ordered - ordered[-1]  # so that subsets of equal maxima have a deviation of exactly 0
    size = len(ordered)
    with_it = torch.zeros_like(ordered)
    without_it = torch.zeros_like(ordered)
    # Mean maximum over the k-subsets that contain sample `index`, and over those that do not.
    for index in range(size):
        rest = ordered[torch.arange(size) != index]
        shares = _shares_of_largest(size - 1, k - 1).to(ordered)
        with_it[index] = (shares * rest.clamp(min=float(ordered[index]))).sum() if k > 1 else ordered[index]
        without_it[index] = (_shares_of_largest(size - 1, k).to(ordered) * rest).sum()
    if baseline == "leave_one_out":
        found = with_it - without_it
    else:
        shares = _shares_of_largest(size, k).to(ordered)
        mean = (shares * ordered).sum()
        deviation = (shares * (ordered - mean).square()).sum().sqrt()
        found = (with_it - mean) / (deviation + eps)
    return torch.zeros_like(found).scatter(0, order, found)


@cache
def _shares_of_largest(size: int, k: int) -> Tensor:
    """Return, for each of ``size`` samples in ascending order, the fraction of k-subsets whose largest it is."""
    return torch.tensor(
        [math.comb(index, k - 1) / math.comb(size, k) if k > 0 else 0.0 for index in range(size)], dtype=torch.float64
    )
