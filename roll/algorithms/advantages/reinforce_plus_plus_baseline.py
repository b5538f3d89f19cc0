"""REINFORCE++ with baseline: rewards centred within their group, normalised over all response tokens of the batch."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator, whiten
from roll.algorithms.advantages.shared import BatchEps, compared, group_mean


@advantage_estimator(
    formula="A = (B − mean(B)) / (std(B) + eps), B = R − mean(R of the group), moments over all response tokens of the "
    "batch",
    source="REINFORCE++ with baseline, arXiv 2501.03262",
    use="Several samples a prompt whose rewards have different scales per prompt: the group gives the mean, the batch "
    "the deviation. The paper adds the KL (k2) to the loss: `use_kl_loss: true`.",
    requirements=AdvantageRequirements(group_relative=True, whitens=True, shifts_cancel="group", scales_cancel="batch"),
)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, *, eps: BatchEps = 1e-8) -> Tensor:
    """Return group-centred rewards, whitened over the tokens of the batch, ``[batch, seq]`` (arXiv 2501.03262).

    Whitening weighs every token equally, so the mean that it subtracts need not be 0 if response lengths differ.
    """
    centred = compared(inputs, lambda rewards, groups, _: rewards - group_mean(rewards, groups))
    return whiten(centred, inputs.response_mask, eps)
