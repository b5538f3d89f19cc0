"""Policy-gradient losses per token, by name.

Ratios are anchored on the log-probabilities recorded when the tokens were sampled, so every correction sees the real
distance between the policy that acted and the one that learns. A loss is a function of `PolicyInputs` and its knobs and
returns per-token values; which tokens count is decided around it, in `PolicyLoss`, and never inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.masking import keep
from roll.algorithms.registry import NoKnobs, Registry

POLICY_LOSSES = Registry("policy loss")

TokenMetrics = dict[str, Tensor]
"""Name -> value per token ``[batch, seq]``; reported as the mean over response tokens."""


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy loss may look at. All ``[batch, seq]``; entry t describes one token."""

    logprobs: Tensor
    """Current policy, with gradient."""
    behaviour_logprobs: Tensor
    """Recorded when the token was sampled."""
    advantages: Tensor
    response_mask: Tensor
    """bool: tokens the policy chose."""

    def masked(self) -> PolicyInputs:
        """The same with 0 outside the mask, whatever stood there."""
        return PolicyInputs(
            logprobs=keep(self.logprobs, self.response_mask),
            behaviour_logprobs=keep(self.behaviour_logprobs, self.response_mask),
            advantages=keep(self.advantages, self.response_mask),
            response_mask=self.response_mask,
        )

    def ratio(self) -> Tensor:
        """exp(current - behaviour); 1 outside the mask of masked inputs. Not clamped: an overflow must be seen."""
        return (self.logprobs - self.behaviour_logprobs).exp()


@dataclass(frozen=True)
class PolicyLoss:
    """A named policy loss with its knobs filled in."""

    name: str
    function: Callable[[PolicyInputs, Any], tuple[Tensor, TokenMetrics]]
    knobs: Any

    def __call__(self, inputs: PolicyInputs) -> tuple[Tensor, TokenMetrics]:
        """Loss and metrics per token ``[batch, seq]``, all 0 outside the mask; inputs there are never read."""
        losses, metrics = self.function(inputs.masked(), self.knobs)
        mask = inputs.response_mask
        return keep(losses, mask), {name: keep(value.detach(), mask) for name, value in metrics.items()}


def make_policy_loss(name: str, args: Mapping[str, Any] | None = None) -> PolicyLoss:
    """The policy loss ``name`` with the knobs ``args``.

    Raises ``KnobError`` (a ``ValueError``) that lists every wrong name, type and range.
    """
    function, knobs = POLICY_LOSSES.build(name, args or {})
    return PolicyLoss(name, function, knobs)


@POLICY_LOSSES.register("vanilla")
def vanilla_loss(inputs: PolicyInputs, knobs: NoKnobs) -> tuple[Tensor, TokenMetrics]:
    """-A log pi (REINFORCE, Williams 1992). Uncorrected: right for on-policy tokens only; clips nothing."""
    return -inputs.advantages * inputs.logprobs, {"clip_fraction": torch.zeros_like(inputs.logprobs)}


@dataclass(frozen=True)
class PPOKnobs:
    """Knobs of `ppo`."""

    clip_low: float = 0.2
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: float | None = None
    """Largest ratio that multiplies a negative advantage; off by default."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low must lie in [0, 1], not be {self.clip_low}")
        if self.clip_high < 0:
            raise ValueError(f"clip_high must be at least 0, not {self.clip_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, not {self.dual_clip}")


@POLICY_LOSSES.register("ppo", PPOKnobs)
def ppo_loss(inputs: PolicyInputs, knobs: PPOKnobs) -> tuple[Tensor, TokenMetrics]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r the importance ratio (PPO, arXiv 1707.06347).

    With ``dual_clip`` c the loss of a negative advantage is at most -c A (arXiv 1912.09729). ``clip_fraction``: share
    of tokens whose gradient is cut off.
    """
    ratio, advantages = inputs.ratio(), inputs.advantages
    clipped = ratio.clamp(1 - knobs.clip_low, 1 + knobs.clip_high)
    losses = torch.maximum(-ratio * advantages, -clipped * advantages)
    cut = -clipped * advantages > -ratio * advantages
    if knobs.dual_clip is not None:
        bounded = (advantages < 0) & (losses > -knobs.dual_clip * advantages)
        losses = torch.where(bounded, -knobs.dual_clip * advantages, losses)
        cut = cut | bounded
    return losses, {"clip_fraction": cut.to(ratio.dtype)}


@dataclass(frozen=True)
class TISKnobs:
    """Knobs of `tis`."""

    lower: float = 0.0
    """Smallest importance weight."""
    upper: float = 1.0
    """Largest importance weight."""

    def __post_init__(self) -> None:
        if not 0 <= self.lower < self.upper:
            raise ValueError(f"the bounds must satisfy 0 <= lower < upper, not lower={self.lower}, upper={self.upper}")


@POLICY_LOSSES.register("tis", TISKnobs)
def tis_loss(inputs: PolicyInputs, knobs: TISKnobs) -> tuple[Tensor, TokenMetrics]:
    """-sg(clip(r, lower, upper)) A log pi: truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561).

    Every token keeps a gradient; ``clip_fraction`` is the share of tokens whose weight was changed by the bounds.
    """
    ratio = inputs.ratio().detach()
    weights = ratio.clamp(knobs.lower, knobs.upper)
    return -weights * inputs.advantages * inputs.logprobs, {"clip_fraction": (weights != ratio).to(ratio.dtype)}
