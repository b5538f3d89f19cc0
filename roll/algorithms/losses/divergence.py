"""Divergence PPO: a trust region in probabilities instead of ratios.

A ratio of 100 means little for a token of probability 1e-5, and a ratio of 0.8 very much for one of 0.99. A token is
therefore cut not by its ratio but by how far the distribution {this token, any other} has moved. That is all that the
log-probability of one token tells about the whole distribution, and a lower bound of its divergence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.losses.base import POLICY_LOSSES, PolicyInputs, PolicyLossTraits, TokenMetrics, clip_fraction
from roll.algorithms.registry import knob

PAPER_THRESHOLDS = {"tv": 0.15, "kl": 0.05}
"""Largest divergence of each kind; kl in nats."""


@dataclass(frozen=True)
class DPPOKnobs:
    """Arguments of `dppo`."""

    divergence: Literal["tv", "kl"] = knob(
        "tv", help="Total variation, or KL divergence (nats) from the anchor to the policy, of {token, any other}."
    )
    threshold: float | None = knob(
        None, help="Largest divergence. Default: 0.15 for `tv`, 0.05 for `kl`, as in the paper.", above=0
    )
    ratio_cap: float | None = knob(
        None, help="Largest ratio that weighs a token. Off by default, as in the paper; others use 20.", above=1
    )

    def __post_init__(self) -> None:
        if self.divergence == "tv" and self.threshold is not None and self.threshold >= 1:
            raise ValueError(f"threshold must be below 1, the largest total variation, not {self.threshold}")

    @property
    def largest_divergence(self) -> float:
        """The configured threshold, or else the paper's."""
        return PAPER_THRESHOLDS[self.divergence] if self.threshold is None else self.threshold


@POLICY_LOSSES.register(
    "dppo",
    DPPOKnobs,
    formula="−M·ρ·A, M = 0 where D > threshold and (A > 0 and ρ > 1, or A < 0 and ρ < 1), else 1; "
    "D = |μ−π| or the KL divergence of (μ, 1−μ) from (π, 1−π)",
    source="Divergence PPO, Qi et al., arXiv 2602.04879",
    use="In the place of `ppo` for large vocabularies and tokens of another engine or version: rare tokens are free to "
    "move, likely ones are held. The paper finds that the anchor must be the behaviour policy.",
    traits=PolicyLossTraits(),
)
def dppo_loss(inputs: PolicyInputs, knobs: DPPOKnobs) -> tuple[Tensor, TokenMetrics]:
    """Return -M r A, ``[batch, seq]`` (arXiv 2602.04879, equations 12 to 14), with r the ratio to the anchor.

    M is 0 if a step would lead further away and the divergence is above the threshold. With ``ratio_cap`` c the factor
    of A is at most c, in the value and in the gradient. ``clip_fraction``: share of tokens with M = 0 or a capped
    ratio.
    """
    logprobs, advantages = inputs.logprobs, inputs.advantages
    ratio = inputs.ratio().detach()
    divergence = BINARY_DIVERGENCES[knobs.divergence](inputs.anchor_logprobs().detach(), logprobs.detach())
    leaving = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    weights = ratio if knobs.ratio_cap is None else ratio.clamp(max=knobs.ratio_cap)
    weights = torch.where(leaving & (divergence > knobs.largest_divergence), 0.0, weights)
    # The second factor has the value 1: it carries the gradient of the ratio, even if the ratio is capped.
    losses = -weights * advantages * (logprobs - logprobs.detach()).exp()
    return losses, clip_fraction(weights != ratio, losses)


def binary_total_variation(anchor_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Return the total variation of {token, any other} under two policies, from the log-probabilities of the token."""
    return (anchor_logprobs.exp() - logprobs.exp()).abs()


def binary_kl(anchor_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Return KL(anchor || policy) of {token, any other} in nats, with the shape of the log-probabilities.

    A probability closer to 1 than the precision of its type (or rounded above 1) counts as one unit of precision below
    1. The probability left for the other tokens is not known more precisely, and rounding alone could make the
    divergence infinite.
    """
    finest = -torch.finfo(logprobs.dtype).eps
    anchor, current = anchor_logprobs.clamp(max=finest), logprobs.clamp(max=finest)
    anchor_rest, current_rest = -torch.expm1(anchor), -torch.expm1(current)
    return anchor.exp() * (anchor - current) + anchor_rest * (anchor_rest.log() - current_rest.log())


BINARY_DIVERGENCES = {"tv": binary_total_variation, "kl": binary_kl}
