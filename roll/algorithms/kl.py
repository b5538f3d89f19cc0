"""Per-token estimators of a KL divergence, and the penalty they make in token rewards.

Samples come from the first distribution. k1 is unbiased with high variance, k2 biased with low variance, k3 unbiased
and never negative (J. Schulman, "Approximating KL divergence", 2020).
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.masking import keep, last_true

KL_ESTIMATORS = ("k1", "k2", "k3")


def token_kl(logprobs: Tensor, reference_logprobs: Tensor, response_mask: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate of KL(policy || reference) at each token, in nats.

    All tensors ``[batch, seq]``; tokens were sampled from the policy of ``logprobs``. With d = log policy - log
    reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. 0 outside the mask. Unknown estimator: ``ValueError``.
    """
    difference = keep(logprobs, response_mask) - keep(reference_logprobs, response_mask)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}; valid: {', '.join(KL_ESTIMATORS)}")


def sequence_token_rewards(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """The reward of each sequence ``[batch]`` placed on its last response token: float32 ``[batch, seq]``."""
    return keep(rewards.float()[:, None].expand(response_mask.shape), last_true(response_mask))


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
    return sequence_token_rewards(rewards, response_mask) - kl_coef * penalty
