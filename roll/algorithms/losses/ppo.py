"""PPO's clipped surrogate: a token has no gradient once its ratio has left the clip range in the advantage's direction.

The surrogate is a function of the log ratio, so that `decoupled_ppo` and `gspo` can use it with other ratios. The
gradient of a clipped token is exactly 0, even if its ratio overflows, because its exponential is not differentiated.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from roll.algorithms.losses.base import PolicyInputs, TokenMetrics, clip_fraction, policy_loss

ClipLow = Annotated[float, Field(ge=0, le=1, description="The ratio is clipped from below at 1 − `clip_low`.")]
ClipHigh = Annotated[float, Field(ge=0, description="The ratio is clipped from above at 1 + `clip_high`.")]
DualClip = Annotated[
    float | None, Field(gt=1, description="Largest ratio that multiplies a negative advantage; off by default.")
]


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return PPO's loss per token, and a bool mask of the tokens whose gradient is clipped to 0. Both ``[batch, seq]``.

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347) with r = exp(log_ratio); with ``dual_clip`` c
    the loss of a negative advantage is at most -c A (arXiv 1912.09729).
    """
    ratio = log_ratio.detach().exp()
    bound = ratio.clamp(1 - clip_low, 1 + clip_high)
    cut = -bound * advantages > -ratio * advantages
    if dual_clip is not None:
        beyond = (advantages < 0) & (ratio > dual_clip)
        bound = torch.where(beyond, dual_clip, bound)
        cut = cut | beyond
    still_moving = log_ratio.masked_fill(cut, 0.0).exp()
    return torch.where(cut, bound, still_moving) * -advantages, cut


@policy_loss(
    formula="−min(ρA, clip(ρ, 1−clip_low, 1+clip_high)·A); with dual_clip c at most −cA where A < 0",
    source="PPO, Schulman et al., arXiv 1707.06347; dual clip, arXiv 1912.09729; clip-higher, DAPO, arXiv 2503.14476",
    use="The default: several updates per batch, moderate staleness. Raise clip_high (0.28) to keep rare tokens "
    "explored; set dual_clip (3) when negative advantages meet large ratios.",
)
def ppo(
    inputs: PolicyInputs, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2, dual_clip: DualClip = None
) -> tuple[Tensor, TokenMetrics]:
    """Return `clipped_surrogate` of current / old, ``[batch, seq]``. ``clip_fraction``: fraction of clipped tokens."""
    losses, cut = clipped_surrogate(inputs.log_ratio(), inputs.advantages, clip_low, clip_high, dual_clip)
    return losses, clip_fraction(cut, losses)
