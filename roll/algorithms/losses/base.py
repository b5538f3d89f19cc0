"""Base of the policy losses: inputs, requirements, lookup by name.

A loss is a function of `PolicyInputs` that returns per-token values; its keyword arguments are its settings. It never
decides which tokens count: inputs are 0 outside the mask, and `PolicyLoss` sets the results to 0 there too. A loss
whose required inputs are missing raises an error. To add a loss, add a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from roll.algorithms.aggregation import checked_mask, checked_shape, keep, needed
from roll.algorithms.registry import POLICY_LOSSES, About, built

policy_loss = About
"""Decorator that describes a loss. It can be omitted if the default `LossRequirements` apply."""

OldPolicy = Literal["behaviour", "proximal"]

TokenMetrics = dict[str, Tensor]
"""Metric name -> value per token, ``[batch, seq]``. Reported as the mean over response tokens.

Every loss reports ``clip_fraction``: 1 where a bound changed the token's gradient or weight, else 0.
"""


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of a policy loss, each ``[batch, seq]`` unless stated otherwise.

    Log-probabilities and advantages are set to 0 outside the mask, so ratios are 1 there. ``ValueError`` for a tensor
    of the wrong shape; nothing is broadcast.
    """

    logprobs: Tensor
    """Log-probabilities under the current policy, with gradient."""
    behaviour_logprobs: Tensor
    """Log-probabilities recorded by the engine when the tokens were sampled."""
    advantages: Tensor
    response_mask: Tensor
    """bool: tokens that the policy generated."""
    proximal_logprobs: Tensor | None = None
    """Log-probabilities recomputed by the trainer before the first update on the batch."""
    scores: Tensor | None = None
    """``[batch]``: raw rewards of the verifier."""
    selected: Tensor | None = None
    """bool: tokens that the loss selected from the whole batch (`LossRequirements.select`)."""
    old_policy: OldPolicy = "behaviour"
    """The log-probabilities that form the denominator of the ratio."""

    def __post_init__(self) -> None:
        if self.old_policy not in get_args(OldPolicy):
            raise ValueError(f"unknown old policy {self.old_policy!r}; valid: {', '.join(get_args(OldPolicy))}")
        checked_mask(self.response_mask)
        for name in ("logprobs", "behaviour_logprobs", "advantages", "proximal_logprobs"):
            value = getattr(self, name)
            if value is not None:
                checked_shape(name, value, tuple(self.response_mask.shape), floating=True)
                object.__setattr__(self, name, keep(value, self.response_mask))
        if self.selected is not None:
            checked_shape("selected", self.selected, tuple(self.response_mask.shape))
            object.__setattr__(self, "selected", self.selected & self.response_mask)

    def old_logprobs(self) -> Tensor:
        """Return the log-probabilities in the ratio's denominator. ``ValueError`` if they are missing."""
        if self.old_policy == "behaviour":
            return self.behaviour_logprobs
        if self.proximal_logprobs is None:
            raise ValueError("the old policy is `proximal`, but there are no proximal_logprobs")
        return self.proximal_logprobs

    def log_ratio(self) -> Tensor:
        """Return the log ratio log(current / old)."""
        return self.logprobs - self.old_logprobs()

    def ratio(self) -> Tensor:
        """Return the ratio current / old. Not clamped, so that an overflow is visible."""
        return self.log_ratio().exp()

    def response_lengths(self) -> Tensor:
        """Return the number of response tokens of each row, ``[batch, 1]``; at least 1, for use as a divisor."""
        return self.response_mask.sum(-1, keepdim=True).clamp(min=1)

    def sequence_log_ratio(self, mean: bool) -> Tensor:
        """Return the sum or mean of the log ratio over the response tokens of each row, ``[batch, 1]``."""
        total = keep(self.log_ratio(), self.response_mask).sum(-1, keepdim=True)
        return total / self.response_lengths() if mean else total


@dataclass(frozen=True)
class LossRequirements:
    """Requirements and properties of a policy loss, for configuration checks."""

    uses_old_policy: bool = True
    """True if the loss depends on the old policy."""
    importance_weighted: bool = True
    """True if the loss is weighted by the ratio current / old. A further importance weight would then count twice."""
    corrects: bool = True
    """True if the loss corrects for stale tokens, given that the old policy is the behaviour policy."""
    needs_proximal: bool = False
    """True if it always needs ``proximal_logprobs``, whatever the old policy."""
    needs_scores: bool = False
    """True if it needs ``scores``."""
    sequence_valued: bool = False
    """True if each token's loss is that of its whole response. A token's weight then scales the whole response, and one
    advantage per response is assumed."""
    ratio_one: Literal["vanilla", "noise"] | None = "vanilla"
    """Behaviour at ratio 1 up to rounding, as in the only optimizer step on a batch. ``vanilla``: the gradient is that
    of ``vanilla``; ``noise``: additional terms depend on rounding errors only; None: it differs from ``vanilla``."""
    select: Callable[..., Tensor] | None = None
    """Function that selects tokens from the whole batch, once before the first update on it, so that the selection does
    not depend on micro-batches. See `PolicyLoss.select`."""

    def reads_proximal(self, old_policy: OldPolicy) -> bool:
        """Return True if the loss needs ``proximal_logprobs`` with this choice of old policy."""
        return self.needs_proximal or (self.uses_old_policy and old_policy == "proximal")


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss with its settings bound."""

    name: str
    function: Callable[..., tuple[Tensor, TokenMetrics]]
    arguments: Mapping[str, Any]
    requirements: LossRequirements

    def __call__(self, inputs: PolicyInputs) -> tuple[Tensor, TokenMetrics]:
        """Return per-token losses and metrics, ``[batch, seq]``, 0 outside the mask.

        Raises ``ValueError`` if log-probabilities, scores or selected tokens that the loss needs are missing.
        """
        if self.requirements.reads_proximal(inputs.old_policy) and inputs.proximal_logprobs is None:
            raise ValueError(f"{self.name} with the old policy {inputs.old_policy!r} needs proximal_logprobs")
        rows = (len(inputs.response_mask),)
        if self.requirements.needs_scores and (inputs.scores is None or inputs.scores.shape != rows):
            got = "none" if inputs.scores is None else f"shape {tuple(inputs.scores.shape)}"
            raise ValueError(f"{self.name} needs scores of shape {rows}, and got {got}")
        if self.requirements.select is not None and inputs.selected is None:
            remedy = f"give `selected`, from `make_policy_loss({self.name!r}).select(...)`"
            raise ValueError(f"{self.name} needs the tokens that it has selected from the whole batch: {remedy}")
        losses, metrics = self.function(inputs, **self.arguments)
        mask = inputs.response_mask
        return keep(losses, mask), {name: keep(value.detach(), mask) for name, value in metrics.items()}

    def select(self, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
        """Run the loss's selection function on a whole batch. Return the selected tokens, bool ``[batch, seq]``.

        ``old_logprobs`` and ``advantages`` (float64) and ``mask`` (bool: the trained tokens) are ``[batch, seq]``;
        ``generator`` is for random choices. ``ValueError`` if the loss has no selection function.
        """
        function = needed(self.requirements.select, f"the tokens that {self.name} selects")
        return function(old_logprobs, advantages, mask, generator, **self.arguments)


def make_policy_loss(name: str, args: Mapping[str, Any] | None = None) -> PolicyLoss:
    """Return a policy loss with its settings bound. Raises `ConfigError` listing every wrong name, type and range."""
    paths = ("pg_variant", "pg_variant_args")
    return PolicyLoss(name, *built(POLICY_LOSSES, name, args or {}, paths, LossRequirements()))


def covariances(old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (log pi - mean(log pi)) x (A - mean(A)) for each token in ``mask``, ``[tokens]``, in order.

    Their mean is the covariance that drives the decrease of entropy (arXiv 2505.22617).
    """
    logprobs, advantages = old_logprobs[mask], advantages[mask]
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def clip_fraction(changed: Tensor, like: Tensor) -> TokenMetrics:
    """Return the metric ``clip_fraction``. ``changed`` is bool ``[batch, seq]``, or ``[batch, 1]`` for whole rows."""
    return {"clip_fraction": changed.to(like.dtype).expand(like.shape)}


def nothing_clipped(like: Tensor) -> TokenMetrics:
    """Return the metric ``clip_fraction`` of a loss without bounds: 0 for all tokens."""
    return {"clip_fraction": torch.zeros_like(like)}
