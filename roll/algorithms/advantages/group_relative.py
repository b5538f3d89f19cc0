"""Estimators that compare the samples of a group: `grpo`, `rloo`, `opo`.

The reward of a sample is the sum of its token rewards, and all its tokens get the same advantage. A sample without
response tokens does not count as a member of its group. The advantage is exactly 0 in a group of one sample and in a
group of equal rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.advantages.estimator import ADVANTAGE_ESTIMATORS, AdvantageInputs, AdvantageTraits
from roll.algorithms.advantages.moments import group_deviation, group_mean, group_sizes
from roll.algorithms.registry import NoKnobs, knob


def compared(inputs: AdvantageInputs, compare: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Return advantages ``[batch, seq]`` from ``compare(rewards, groups, lengths)`` over the samples that have tokens.

    ``rewards`` are float64, ``groups`` and ``lengths`` (response tokens) int64; they and the result are ``[samples]``.
    """
    lengths = inputs.response_mask.sum(-1)
    present = lengths > 0
    rewards = inputs.token_rewards.sum(-1)
    found = compare(rewards[present], inputs.groups[present], lengths[present])
    advantages = rewards.new_zeros(rewards.shape).masked_scatter(present, found)
    return advantages[:, None].expand(inputs.response_mask.shape)


@dataclass(frozen=True)
class GRPOKnobs:
    """Arguments of `grpo`."""

    normalize_by_std: bool = knob(
        True, help="Divide by the group's standard deviation; false gives the estimator of Dr. GRPO."
    )
    eps: float = knob(1e-6, help="Added to the standard deviation, in units of the reward.", above=0)


@ADVANTAGE_ESTIMATORS.register(
    "grpo",
    GRPOKnobs,
    formula="A = (R − mean(R of the group)) / (std(R of the group) + eps)",
    source="GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783",
    use="The usual choice for verifiable rewards with several samples a prompt. With normalize_by_std: false, groups "
    "that nearly always succeed or fail are not blown up.",
    traits=lambda knobs: AdvantageTraits(
        group_relative=True, shifts_cancel="group", scales_cancel="group" if knobs.normalize_by_std else "none"
    ),
)
def grpo_advantages(inputs: AdvantageInputs, knobs: GRPOKnobs) -> Tensor:
    """Return (reward - group mean) / group deviation (unbiased), ``[batch, seq]`` (arXiv 2402.03300)."""
    return compared(inputs, lambda rewards, groups, _: group_normalised(rewards, groups, knobs))


def group_normalised(rewards: Tensor, groups: Tensor, knobs: GRPOKnobs) -> Tensor:
    """Return the `grpo` advantage of each sample ``[batch]``, from ``rewards`` float64 and ``groups`` int64,
    ``[batch]``."""
    centred = rewards - group_mean(rewards, groups)
    return centred / (group_deviation(rewards, groups) + knobs.eps) if knobs.normalize_by_std else centred


@ADVANTAGE_ESTIMATORS.register(
    "rloo",
    formula="A = R − mean(R of the other samples of the group)",
    source="RLOO, arXiv 2402.14740; Kool et al. 2019",
    use="Unbiased for any group size, with the variance of a good baseline. For rewards whose scale is to be kept.",
    traits=AdvantageTraits(group_relative=True, shifts_cancel="group"),
)
def rloo_advantages(inputs: AdvantageInputs, knobs: NoKnobs) -> Tensor:
    """Return the reward minus the mean of the others, n / (n - 1) x (reward - mean of all), ``[batch, seq]``."""

    def leave_one_out(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        sizes = group_sizes(groups)
        return (rewards - group_mean(rewards, groups)) * sizes / (sizes - 1).clamp(min=1)

    return compared(inputs, leave_one_out)


@ADVANTAGE_ESTIMATORS.register(
    "opo",
    formula="A = R − Σ(length · R) / Σ(length), over the samples of the group",
    source="OPO, arXiv 2505.23585",
    use="The baseline of least variance where the squared gradient grows with the length; for on-policy training on "
    "responses of very different lengths. A sample is part of its own baseline, so the gradient is biased by O(1/n).",
    traits=AdvantageTraits(group_relative=True, shifts_cancel="group"),
)
def opo_advantages(inputs: AdvantageInputs, knobs: NoKnobs) -> Tensor:
    """Return the reward minus the length-weighted group mean (tokens), ``[batch, seq]`` (arXiv 2505.23585)."""
    return compared(inputs, lambda rewards, groups, lengths: rewards - group_mean(rewards, groups, lengths))
