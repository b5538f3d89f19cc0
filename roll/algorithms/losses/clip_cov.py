"""Clip-Cov: removes the gradient of a few tokens with a high covariance of log-probability and advantage.

These tokens contribute most to the loss of entropy."""

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
from roll.algorithms.losses.ppo import ClipHigh, ClipLow, clipped_surrogate


def _select(
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    generator: torch.Generator,
    *,
    share: float,
    cov_low: float,
    cov_high: float,
    **others: Any,
) -> Tensor:
    found = covariances(old_logprobs, advantages, mask)
    candidates = ((found > cov_low) & (found < cov_high)).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=generator)
    chosen = torch.zeros_like(found, dtype=torch.bool)
    chosen[candidates[order[: max(1, int(share * len(found)))]]] = True
    return torch.zeros_like(mask).masked_scatter(mask, chosen)


def _check_bounds(cov_low: float, cov_high: float, **others: Any) -> None:
    if cov_low >= cov_high:
        raise ValueError(f"cov_low must be below cov_high, not cov_low={cov_low}, cov_high={cov_high}")


@policy_loss(
    formula="0 for max(1, ⌊share·N⌋) random ones of the batch's N tokens with cov_low < C < cov_high, "
    "C = (log μ − mean(log μ))·(A − mean(A)); for the others the loss of `ppo`",
    source="The entropy mechanism of reinforcement learning, Cui et al., arXiv 2505.22617",
    use="Runs whose entropy collapses. The tokens are selected once, from the whole batch before its first update, by "
    "the old policy; the paper, verl and others select in each micro-batch by the current one.",
    requirements=LossRequirements(ratio_one=None, select=_select),
    check=_check_bounds,
)
def clip_cov(
    inputs: PolicyInputs,
    *,
    share: Annotated[float, Field(gt=0, le=1, description="Share of the tokens that lose their gradient.")] = 2e-4,
    cov_low: Annotated[float, Field(gt=-math.inf, description="Covariance above which a token may be selected.")] = 1.0,
    cov_high: Annotated[float, Field(description="Covariance below which a token may be selected.")] = 5.0,
    clip_low: Annotated[
        ClipLow, Field(description="The ratio is clipped from below at 1 − `clip_low`; 1: not at all, as in the paper.")
    ] = 1.0,
    clip_high: Annotated[
        ClipHigh, Field(description="The ratio is clipped from above at 1 + `clip_high`; the paper has no bound.")
    ] = 1.0,
) -> tuple[Tensor, TokenMetrics]:
    """Return `clipped_surrogate` of current / old, and 0 for selected tokens, ``[batch, seq]`` (arXiv 2505.22617).

    ``clip_fraction``: fraction of tokens that are selected, or whose gradient is clipped.
    """
    selected = needed(inputs.selected, "selected")
    losses, cut = clipped_surrogate(inputs.log_ratio(), inputs.advantages, clip_low, clip_high)
    return losses.masked_fill(selected, 0.0), clip_fraction(cut | selected, losses)
