"""Per-token estimators of a KL divergence, the penalty they make in token rewards, and who sets its weight.

Samples come from the first distribution. As values: k1 is unbiased with high variance, k2 biased with low variance, k3
unbiased and never negative (J. Schulman, "Approximating KL divergence", 2020). As a loss that is differentiated, the
order is another one: k1 has no expected gradient at all, k3 that of the forward divergence, KL(reference || policy),
and only k2 the gradient of the divergence that is meant, KL(policy || reference) (Liu et al., arXiv 2510.01555; Shah et
al., arXiv 2512.21852).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from roll.algorithms.masking import keep, last_true


def k1(difference: Tensor) -> Tensor:
    """d: unbiased, and of either sign. As a loss it does nothing: its gradient has expectation 0."""
    return difference


def absolute(difference: Tensor) -> Tensor:
    """abs(d): distance of the log-probabilities, whichever is larger; no estimate of a KL divergence."""
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """d^2 / 2: biased and never negative. On tokens of the policy its gradient, d x grad log policy, is unbiased."""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative. Its gradient is that of KL(reference || policy)."""
    return torch.expm1(-difference) + difference


def k3_straight_through(difference: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2: a low-variance value, and the right expected gradient.

    For a token x sampled from the policy, E[d grad log policy(x)] is the gradient of KL(policy || reference) of the
    next-token distribution, since E[grad log policy] = 0 (arXiv 2510.01555, 2512.21852). That a token also changes the
    divergence of the tokens after it is no part of any per-token loss; the penalty in the rewards accounts for it. On
    tokens of another policy the estimate needs importance weights.
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
    """Estimate of KL(policy || reference) at each token, in nats.

    All tensors ``[batch, seq]``; tokens were sampled from the policy of ``logprobs``; ``estimator`` is a name of
    `KL_ESTIMATORS`. float32, or float64 if either input is; 0 outside the mask. Unknown estimator: ``ValueError``.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}; valid: {', '.join(KL_ESTIMATORS)}")
    difference = _wide(keep(logprobs, response_mask)) - _wide(keep(reference_logprobs, response_mask))
    return KL_ESTIMATORS[estimator](difference)


def sequence_token_rewards(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """The reward of each sequence ``[batch]`` placed on its last response token, ``[batch, seq]``.

    float32, or float64 if the rewards are.
    """
    return keep(_wide(rewards)[:, None].expand(response_mask.shape), last_true(response_mask))


def kl_penalised_token_rewards(
    rewards: Tensor,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    estimator: str = "k3",
) -> Tensor:
    """Token rewards: -kl_coef x KL at each response token, plus the sequence's reward at its last.

    ``rewards`` ``[batch]``, the others ``[batch, seq]``; returns ``[batch, seq]`` without gradient, 0 outside the mask
    (Ziegler et al., arXiv 1909.08593). A sequence without response tokens has no place for its reward, and gets none.
    """
    penalty = token_kl(logprobs.detach(), reference_logprobs.detach(), response_mask, estimator)
    return sequence_token_rewards(rewards.detach(), response_mask) - kl_coef * penalty


class KLController(Protocol):
    """Who sets the weight of a KL penalty."""

    coef: float
    """The weight to use now."""

    def update(self, kl: float, samples: int) -> None:
        """Learn that the divergence was ``kl`` nats per response, over ``samples`` responses."""

    def state(self) -> dict[str, float]:
        """What a checkpoint must keep, as plain values."""

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave."""


class FixedKLController:
    """A weight that stays. It has no state, so the configuration of a resumed run decides."""

    def __init__(self, coef: float) -> None:
        """``ValueError`` unless ``coef`` is finite and at least 0."""
        if not 0 <= coef < math.inf:
            raise ValueError(f"a KL coefficient must be finite and at least 0, not {coef}")
        self.coef = coef

    def update(self, kl: float, samples: int) -> None:
        """Nothing to learn."""

    def state(self) -> dict[str, float]:
        """Nothing to keep."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Nothing to restore."""


class AdaptiveKLController:
    """A weight that is raised while the divergence is above its target and lowered while it is below.

    error = clip(kl / target - 1, -0.2, 0.2); coef <- coef x (1 + error x samples / horizon) (Ziegler et al., arXiv
    1909.08593, section 2.2).
    """

    LARGEST_ERROR = 0.2

    def __init__(self, init_coef: float, target: float, horizon: int) -> None:
        """``target`` in nats, ``horizon`` in samples. ``ValueError`` unless all are finite and above 0: a weight of 0
        could never leave 0."""
        for name, value in (("init_coef", init_coef), ("target", target), ("horizon", horizon)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} of an adaptive KL controller must be finite and above 0, not {value}")
        self.coef = init_coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """One step towards the target.

        More samples than the horizon count as the horizon, or the weight could become negative. An infinite ``kl`` is a
        very large one, and the clipped error bounds its step. NaN says nothing about the divergence: the weight stays.
        """
        if math.isnan(kl):
            return
        error = min(max(kl / self.target - 1, -self.LARGEST_ERROR), self.LARGEST_ERROR)
        self.coef *= 1 + error * min(samples, self.horizon) / self.horizon

    def state(self) -> dict[str, float]:
        """The weight; target and horizon are configuration."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take the weight of a `state`. ``ValueError`` if there is none, or it is not finite and above 0."""
        coef = state.get("coef")
        if coef is None or not 0 < coef < math.inf:
            raise ValueError(f"the state of an adaptive KL controller needs a finite coef above 0, not {dict(state)}")
        self.coef = coef


def make_kl_controller(kind: str, init_coef: float, target: float, horizon: int) -> KLController:
    """The controller called ``kind``: ``fixed`` (target and horizon are not read) or ``adaptive``.

    ``ValueError`` for another name, or a number that cannot work.
    """
    if kind == "fixed":
        return FixedKLController(init_coef)
    if kind == "adaptive":
        return AdaptiveKLController(init_coef, target, horizon)
    raise ValueError(f"unknown KL controller {kind!r}; valid: fixed, adaptive")


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
