"""ReMax: the baseline is the reward of a greedy response to the same prompt."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.aggregation import needed


@advantage_estimator(
    formula="A = R − R(greedy response to the same prompt)",
    source="ReMax, arXiv 2310.10505",
    use="One sample a prompt without a critic, at the price of one greedy response more. Unbiased.",
    requirements=AdvantageRequirements(by_group=True, needs_greedy_baseline=True),
)
def remax(inputs: AdvantageInputs) -> Tensor:
    """Return the sequence's reward (sum of its token rewards) minus the greedy response's reward, ``[batch, seq]``."""
    advantages = inputs.token_rewards.sum(-1) - needed(inputs.baseline_rewards, "baseline_rewards")
    return advantages[:, None].expand(inputs.response_mask.shape)
