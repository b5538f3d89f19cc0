"""REINFORCE++: returns, normalised over all response tokens of the batch.

A sample has little influence on the batch's standard deviation, unlike on that of a small group.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator, whiten
from roll.algorithms.advantages.shared import BatchEps, TokenDiscount, token_returns


def _requirements(gamma: float, **others: Any) -> AdvantageRequirements:
    return AdvantageRequirements(
        whitens=True, returns_to_go=True, shifts_cancel="batch" if gamma == 1 else "none", scales_cancel="batch"
    )


@advantage_estimator(
    formula="A[t] = (G[t] − mean(G)) / (std(G) + eps), G[t] = Σ over k ≥ t of gamma^(k − t) · r[k], moments over all "
    "response tokens of the batch",
    source="REINFORCE++, arXiv 2501.03262",
    use="One sample a prompt is enough. The paper has the KL penalty (k1) in the token rewards: "
    "`add_token_level_kl: true`.",
    requirements=_requirements,
)
def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: TokenDiscount = 1.0, eps: BatchEps = 1e-8) -> Tensor:
    """Return discounted returns of the token rewards, whitened over the batch, ``[batch, seq]`` (arXiv 2501.03262)."""
    return whiten(token_returns(inputs.token_rewards, inputs.response_mask, gamma), inputs.response_mask, eps)
