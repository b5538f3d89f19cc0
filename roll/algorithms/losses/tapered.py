"""TOPR: imitates successes of any policy, and unlearns failures only as far as the current policy still produces them.

Pushing down a response that the policy no longer gives lowers probabilities without bound and teaches nothing. The
ratio of the whole response, at most 1, lets such a response fade. Successes need no ratio: pushing up is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.aggregation import needed
from roll.algorithms.losses.base import POLICY_LOSSES, PolicyInputs, PolicyLossTraits, TokenMetrics, clip_fraction
from roll.algorithms.registry import knob


@dataclass(frozen=True)
class TOPRKnobs:
    """Arguments of `topr`."""

    positive_weight: float = knob(1.0, help="Weight of responses with a positive score.", at_least=0)
    negative_weight: float = knob(1.0, help="Weight of the other responses.", at_least=0)
    positive_above: float = knob(0.0, help="A score above this is positive.")
    level: Literal["sequence", "token"] = knob(
        "sequence", help="Ratio of the whole response, as in the paper, or of each token, an approximation of it."
    )

    def __post_init__(self) -> None:
        if self.positive_weight == self.negative_weight == 0:
            raise ValueError("positive_weight and negative_weight are both 0: nothing would be trained")


@POLICY_LOSSES.register(
    "topr",
    TOPRKnobs,
    formula="score > positive_above: −w₊·A·log π; otherwise: −w₋·sg(clip(ρ_seq, 0, 1))·A·log π, ρ_seq = ∏ₜ ρₜ",
    source="Tapered off-policy REINFORCE, Le Roux et al., arXiv 2503.14286",
    use="Very stale or recorded data with rewards of either sign, and no KL penalty. The ratio of a long response is "
    "soon 0, so it learns little from old failures; level `token` is milder and no longer the paper's method.",
    traits=PolicyLossTraits(needs_scores=True),
)
def topr_loss(inputs: PolicyInputs, knobs: TOPRKnobs) -> tuple[Tensor, TokenMetrics]:
    """Return -w A log pi, ``[batch, seq]``, with a constant weight w (arXiv 2503.14286).

    w is ``positive_weight`` for rows whose score is above ``positive_above``, else ``negative_weight`` times the ratio
    truncated to [0, 1]. ``clip_fraction``: share of tokens whose ratio was truncated.
    """
    positive = (needed(inputs.scores, "scores") > knobs.positive_above)[:, None]
    log_ratio = inputs.sequence_log_ratio(mean=False) if knobs.level == "sequence" else inputs.log_ratio()
    log_ratio = log_ratio.detach()
    tapered = knobs.negative_weight * log_ratio.clamp(max=0).exp()
    weights = torch.where(positive, knobs.positive_weight, tapered)
    losses = -weights * inputs.advantages * inputs.logprobs
    return losses, clip_fraction(~positive & (log_ratio > 0), losses)
