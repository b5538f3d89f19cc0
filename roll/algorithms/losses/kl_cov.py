"""KL-Cov: penalises divergence from the old policy at the tokens that contribute most to the loss of entropy."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from roll.algorithms.aggregation import needed
from roll.algorithms.losses.base import (
    LossRequirements,
    PolicyInputs,
    TokenMetrics,
    clip_fraction,
    covariances,
    policy_loss,
)


def _select(
    old_logprobs: Tensor, advantages: Tensor, mask: Tensor, generator: torch.Generator, *, share: float, **others: Any
) -> Tensor:
    found = covariances(old_logprobs, advantages, mask)
    chosen = torch.zeros_like(found, dtype=torch.bool)
    chosen[found.argsort(descending=True, stable=True)[: max(1, int(share * len(found)))]] = True
    return torch.zeros_like(mask).masked_scatter(mask, chosen)


@policy_loss(
    formula="−ρA; + beta·|log ρ| for the max(1, ⌊share·N⌋) of the batch's N tokens with the largest "
    "C = (log μ − mean(log μ))·(A − mean(A))",
    source="The entropy mechanism of reinforcement learning, Cui et al., arXiv 2505.22617",
    use="Runs whose entropy collapses; steadier than `clip_cov`. The tokens are selected once, from the whole batch "
    "before its first update, by the old policy; the paper, verl and others select in each micro-batch by the current "
    "one. No ratio is clipped.",
    requirements=LossRequirements(ratio_one="noise", select=_select),
)
def kl_cov(
    inputs: PolicyInputs,
    *,
    share: Annotated[
        float, Field(gt=0, le=1, description="Share of the tokens that are penalised; the paper has 0.002 for 7B.")
    ] = 2e-4,
    beta: Annotated[float, Field(gt=0, lt=math.inf, description="Weight of the penalty.")] = 1.0,
) -> tuple[Tensor, TokenMetrics]:
    """Return -r A, plus beta |log r| for selected tokens, ``[batch, seq]`` (arXiv 2505.22617).

    The paper's penalty is the KL divergence from the old policy; |log r| is the estimate in its code. Its gradient is 0
    where r is 1. ``clip_fraction``: fraction of tokens that are penalised.
    """
    log_ratio, selected = inputs.log_ratio(), needed(inputs.selected, "selected")
    penalty = beta * log_ratio.masked_fill(~selected, 0.0).abs()
    losses = -log_ratio.exp() * inputs.advantages + penalty
    return losses, clip_fraction(selected, losses)
