"""REINFORCE: the discounted return, without a baseline."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import TokenDiscount, token_returns


@advantage_estimator(
    formula="A[t] = Σ over response tokens k ≥ t of gamma^(k − t) · r[k]",
    source="Williams 1992, Machine Learning 8",
    use="The plain return: unbiased, with the highest variance. For rewards that are centred already, or with "
    "whitening.",
    requirements=AdvantageRequirements(by_group=True, returns_to_go=True),
)
def reinforce(inputs: AdvantageInputs, *, gamma: TokenDiscount = 1.0) -> Tensor:
    """Return the return-to-go of each token, discounted per response token, ``[batch, seq]`` (Williams 1992)."""
    return token_returns(inputs.token_rewards, inputs.response_mask, gamma)
