"""Per-token estimators of a KL divergence, the KL penalty in token rewards, and controllers of its coefficient.

Tokens are sampled from the policy, and d = log policy - log reference. As values, k1 is unbiased with high variance, k2
is biased with low variance, and k3 is unbiased and never negative (J. Schulman, "Approximating KL divergence", 2020).
As losses, the expected gradient of k1 is 0, and that of k3 is the gradient of the forward divergence, KL(reference ||
policy). Only k2 has the gradient of the intended divergence, KL(policy || reference) (Liu et al., arXiv 2510.01555;
Shah et al., arXiv 2512.21852).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from roll.algorithms.aggregation import checked_mask, checked_shape, keep, wide


def k1(difference: Tensor) -> Tensor:
    """Return d = ``difference``, an unbiased estimate of KL(policy || reference), which may be negative. Useless as a
    loss, because its expected gradient is 0."""
    return difference


def absolute(difference: Tensor) -> Tensor:
    """Return abs(d): a distance between log-probabilities, not an estimate of a KL divergence."""
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """Return d^2 / 2: biased, never negative. Its gradient is unbiased on tokens sampled from the policy."""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d, an unbiased estimate of KL(policy || reference), never negative. Its expected gradient is
    that of KL(reference || policy)."""
    return torch.expm1(-difference) + difference


def k3_straight_through(difference: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2: a low-variance value, and the right expected gradient.

    For a token x sampled from the policy, E[d grad log policy(x)] is the gradient of KL(policy || reference) of the
    next-token distribution, since E[grad log policy] = 0 (arXiv 2510.01555, 2512.21852). A token also affects the
    divergence at later tokens; no per-token loss includes that effect, but a KL penalty in the rewards does. For tokens
    sampled from another policy, the estimate needs importance weights.
    """
    carrier = k2(difference)
    return k3(difference).detach() + (carrier - carrier.detach())


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k3_straight_through": k3_straight_through,
}
"""Name -> function of d = log policy - log reference at sampled tokens, any shape, in nats."""


def token_kl(logprobs: Tensor, reference_logprobs: Tensor, response_mask: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) at each token, in nats.

    All tensors are ``[batch, seq]``; tokens were sampled from the policy of ``logprobs``; ``estimator`` is a name of
    `KL_ESTIMATORS`. The result is float32, or float64 if either input is; 0 outside the mask. ``ValueError`` for an
    unknown estimator and for a wrong shape or type.
    """
    checked_mask(response_mask)
    for name, tensor in (("logprobs", logprobs), ("reference_logprobs", reference_logprobs)):
        checked_shape(name, tensor, tuple(response_mask.shape), floating=True)
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}; valid: {', '.join(KL_ESTIMATORS)}")
    difference = wide(keep(logprobs, response_mask)) - wide(keep(reference_logprobs, response_mask))
    return KL_ESTIMATORS[estimator](difference)


def sequence_token_rewards(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Return token rewards ``[batch, seq]`` with each sequence's reward ``[batch]`` on its last response token.

    The result is float32, or float64 if the rewards are. ``ValueError`` for a wrong shape.
    """
    checked_mask(response_mask)
    checked_shape("rewards", rewards, tuple(response_mask.shape[:1]))
    responded = response_mask.any(-1)
    rewards, width = wide(rewards)[responded], response_mask.shape[-1]
    token_rewards = rewards.new_zeros(response_mask.shape)
    if len(rewards):
        # The first of the largest entries, counted from the end.
        from_end = response_mask[responded].flip(-1).byte().argmax(-1)
        token_rewards[responded, width - 1 - from_end] = rewards
    return token_rewards


def kl_penalised_token_rewards(
    rewards: Tensor,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    estimator: str = "k3",
) -> Tensor:
    """Return token rewards: -kl_coef x KL at each response token, plus the sequence's reward on the last one.

    ``rewards`` are ``[batch]``, the other tensors ``[batch, seq]``; the result is ``[batch, seq]``, without gradient, 0
    outside the mask (Ziegler et al., arXiv 1909.08593). The reward of a sequence without response tokens is lost.
    """
    penalty = token_kl(logprobs.detach(), reference_logprobs.detach(), response_mask, estimator)
    return sequence_token_rewards(rewards.detach(), response_mask) - kl_coef * penalty


class KLController:
    """The coefficient ``coef`` of a KL penalty. Constant here; subclasses may adapt it."""

    def __init__(self, coef: float) -> None:
        """Raise ``ValueError`` unless ``coef`` is finite and at least 0."""
        if not 0 <= coef < math.inf:
            raise ValueError(f"a KL coefficient must be finite and at least 0, not {coef}")
        self.coef = coef

    def update(self, kl: float, samples: int) -> None:
        """Adapt the coefficient to a measured divergence of ``kl`` nats per response, over ``samples`` responses."""

    def state_dict(self) -> dict[str, float]:
        """Return the state to checkpoint, as plain values; empty for a constant, which the configuration sets."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` returned."""


class AdaptiveKLController(KLController):
    """A coefficient that rises while the divergence is above its target, and falls while it is below.

    error = clip(kl / target - 1, -0.2, 0.2); coef <- coef x (1 + error x samples / horizon) (Ziegler et al., arXiv
    1909.08593, section 2.2).
    """

    LARGEST_ERROR = 0.2

    def __init__(self, init_coef: float, target: float, horizon: int) -> None:
        """Set the ``target`` in nats and the ``horizon`` in samples.

        ``ValueError`` unless all arguments are finite and above 0: a coefficient of 0 would stay 0.
        """
        for name, value in (("init_coef", init_coef), ("target", target), ("horizon", horizon)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} of an adaptive KL controller must be finite and above 0, not {value}")
        super().__init__(init_coef)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Move the coefficient one step, given a measured divergence of ``kl`` nats per response.

        ``samples`` is capped at the horizon, so that the coefficient stays positive. An infinite ``kl`` counts as a
        very large one, because the error is clipped. With NaN the coefficient does not change.
        """
        if math.isnan(kl):
            return
        error = min(max(kl / self.target - 1, -self.LARGEST_ERROR), self.LARGEST_ERROR)
        self.coef *= 1 + error * min(samples, self.horizon) / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the coefficient. ``ValueError`` if it is missing, not finite or not above 0."""
        coef = state.get("coef")
        if coef is None or not 0 < coef < math.inf:
            raise ValueError(f"the state of an adaptive KL controller needs a finite coef above 0, not {dict(state)}")
        self.coef = coef
