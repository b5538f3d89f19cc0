"""PPO's clipped surrogate: a token's gradient is cut once its ratio has moved far enough.

The surrogate is a function of the log ratio, so that `decoupled_ppo` and `gspo` can use it with other ratios. A cut
token has a gradient of exactly 0, whatever its ratio: the exponential of a cut token is never differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.losses.base import POLICY_LOSSES, PolicyInputs, PolicyLossTraits, TokenMetrics, clip_fraction
from roll.algorithms.registry import knob


@dataclass(frozen=True)
class PPOKnobs:
    """Arguments of `ppo`."""

    clip_low: float = knob(0.2, help="The ratio is clipped from below at 1 − `clip_low`.", at_least=0, at_most=1)
    clip_high: float = knob(0.2, help="The ratio is clipped from above at 1 + `clip_high`.", at_least=0)
    dual_clip: float | None = knob(
        None, help="Largest ratio that multiplies a negative advantage; off by default.", above=1
    )


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return PPO's loss per token, and a bool mask of the tokens whose gradient is cut. Both ``[batch, seq]``.

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


@POLICY_LOSSES.register(
    "ppo",
    PPOKnobs,
    formula="−min(ρA, clip(ρ, 1−clip_low, 1+clip_high)·A); with dual_clip c at most −cA where A < 0",
    source="PPO, Schulman et al., arXiv 1707.06347; dual clip, arXiv 1912.09729; clip-higher, DAPO, arXiv 2503.14476",
    use="The default: several updates per batch, moderate staleness. Raise clip_high (0.28) to keep rare tokens "
    "explored; set dual_clip (3) when negative advantages meet large ratios.",
    traits=PolicyLossTraits(),
)
def ppo_loss(inputs: PolicyInputs, knobs: PPOKnobs) -> tuple[Tensor, TokenMetrics]:
    """Return `clipped_surrogate` of the ratio to the anchor. ``clip_fraction``: share of tokens with a cut gradient."""
    losses, cut = clipped_surrogate(
        inputs.log_ratio(), inputs.advantages, knobs.clip_low, knobs.clip_high, knobs.dual_clip
    )
    return losses, clip_fraction(cut, losses)
