"""The common parts of all policy losses: their inputs, their requirements, and the mask around them.

A loss is a function of `PolicyInputs` and its arguments, and returns per-token values. `PolicyLoss` decides which
tokens count; a loss never does. A loss that lacks an input it needs fails instead of correcting nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from roll.algorithms.aggregation import keep
from roll.algorithms.registry import Registry

POLICY_LOSSES = Registry("policy loss")

Anchor = Literal["behaviour", "proximal"]

TokenMetrics = dict[str, Tensor]
"""Name -> value per token ``[batch, seq]``; reported as the mean over response tokens.

Every loss reports ``clip_fraction``: 1 where a bound changed the gradient or the weight of the token, else 0.
"""


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of a policy loss. ``[batch, seq]`` unless stated; entry t describes one token.

    Methods that return ratios expect masked inputs: they give 0 (logarithm) or 1 (ratio) outside the mask.
    """

    logprobs: Tensor
    """Log-probabilities of the current policy, with gradient."""
    behaviour_logprobs: Tensor
    """Log-probabilities recorded when the token was sampled."""
    advantages: Tensor
    response_mask: Tensor
    """bool: tokens the policy chose."""
    proximal_logprobs: Tensor | None = None
    """Log-probabilities that the trainer recomputed before the first update on the batch."""
    scores: Tensor | None = None
    """``[batch]``: raw verifier output."""
    anchor: Anchor = "behaviour"
    """The policy in the denominator of the ratio."""

    def __post_init__(self) -> None:
        if self.anchor not in get_args(Anchor):
            raise ValueError(f"unknown anchor {self.anchor!r}; valid: {', '.join(get_args(Anchor))}")

    def masked(self) -> PolicyInputs:
        """Return a copy with 0 outside the mask, whatever the entries were."""
        mask, proximal = self.response_mask, self.proximal_logprobs
        return replace(
            self,
            logprobs=keep(self.logprobs, mask),
            behaviour_logprobs=keep(self.behaviour_logprobs, mask),
            advantages=keep(self.advantages, mask),
            proximal_logprobs=None if proximal is None else keep(proximal, mask),
        )

    def anchor_logprobs(self) -> Tensor:
        """Return the log-probabilities of the ratio's denominator. ``ValueError`` if they were not recomputed."""
        if self.anchor == "behaviour":
            return self.behaviour_logprobs
        if self.proximal_logprobs is None:
            raise ValueError("the anchor is `proximal`, but there are no proximal_logprobs")
        return self.proximal_logprobs

    def log_ratio(self) -> Tensor:
        """Return log(current / anchor)."""
        return self.logprobs - self.anchor_logprobs()

    def ratio(self) -> Tensor:
        """Return current / anchor. Not clamped: an overflow must be visible."""
        return self.log_ratio().exp()

    def behaviour_ratio(self) -> Tensor:
        """Return current / behaviour, whatever the anchor. Not clamped."""
        return (self.logprobs - self.behaviour_logprobs).exp()

    def response_lengths(self) -> Tensor:
        """Count the response tokens of each row, ``[batch, 1]``; at least 1, so that it can be a divisor."""
        return self.response_mask.sum(-1, keepdim=True).clamp(min=1)

    def sequence_log_ratio(self, mean: bool) -> Tensor:
        """Return the sum or mean of the log ratio over the response tokens of each row, ``[batch, 1]``; 0 without
        any."""
        total = keep(self.log_ratio(), self.response_mask).sum(-1, keepdim=True)
        return total / self.response_lengths() if mean else total


@dataclass(frozen=True)
class PolicyLossTraits:
    """Requirements and properties of a policy loss, from which the configuration checks tell if a configuration
    works."""

    uses_anchor: bool = True
    """True if the anchor enters the loss."""
    importance_weighted: bool = True
    """True if current / anchor is a weight of the loss; a second weight for the same distance would count twice."""
    corrects: bool = True
    """True if it handles stale tokens when anchored on the behaviour policy."""
    needs_proximal: bool = False
    """True if it needs ``proximal_logprobs`` whatever the anchor."""
    needs_scores: bool = False
    """True if it needs ``scores``."""
    sequence_valued: bool = False
    """True if the loss of a token is that of its whole response. A weight of one token then weighs all of them, and one
    advantage per response is assumed."""


@dataclass(frozen=True)
class PolicyLoss:
    """A named policy loss with its arguments filled in."""

    name: str
    function: Callable[[PolicyInputs, Any], tuple[Tensor, TokenMetrics]]
    knobs: Any
    traits: PolicyLossTraits

    def __call__(self, inputs: PolicyInputs) -> tuple[Tensor, TokenMetrics]:
        """Return loss and metrics per token ``[batch, seq]``, all 0 outside the mask; inputs there are never read.

        Raises ``ValueError`` if log-probabilities or scores that the loss needs are missing.
        """
        self._check(inputs)
        losses, metrics = self.function(inputs.masked(), self.knobs)
        mask = inputs.response_mask
        return keep(losses, mask), {name: keep(value.detach(), mask) for name, value in metrics.items()}

    def _check(self, inputs: PolicyInputs) -> None:
        needs_proximal = self.traits.needs_proximal or (self.traits.uses_anchor and inputs.anchor == "proximal")
        if needs_proximal and inputs.proximal_logprobs is None:
            raise ValueError(f"{self.name} with the anchor {inputs.anchor!r} needs proximal_logprobs, and got none")
        if self.traits.needs_scores:
            rows = (len(inputs.response_mask),)
            got = "none" if inputs.scores is None else f"shape {tuple(inputs.scores.shape)}"
            if inputs.scores is None or inputs.scores.shape != rows:
                raise ValueError(f"{self.name} needs scores of shape {rows}, and got {got}")


def make_policy_loss(name: str, args: Mapping[str, Any] | None = None) -> PolicyLoss:
    """Return the policy loss ``name`` with the arguments ``args``.

    Raises ``KnobError`` (a ``ValueError``) that lists every wrong name, type and range.
    """
    function, knobs = POLICY_LOSSES.build(name, args or {})
    return PolicyLoss(name, function, knobs, POLICY_LOSSES.traits(name, knobs))


def clip_fraction(changed: Tensor, like: Tensor) -> TokenMetrics:
    """Return the metric from a bool mask ``[batch, seq]``, or ``[batch, 1]`` for all tokens of a row."""
    return {"clip_fraction": changed.to(like.dtype).expand(like.shape)}


def nothing_clipped(like: Tensor) -> TokenMetrics:
    """Return the metric of a loss without bounds."""
    return {"clip_fraction": torch.zeros_like(like)}
