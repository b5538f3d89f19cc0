"""Advantage estimators, by name, and what is done to advantages afterwards.

Rewards come per token (a sequence's reward sits on its last response token, KL penalties on their own tokens) and are
never changed in place. Tokens the policy did not choose carry no advantage and end no return: a reward after a tool's
answer reaches the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.kl import kl_penalised_token_rewards, sequence_token_rewards
from roll.algorithms.masking import keep
from roll.algorithms.registry import Registry

ADVANTAGE_ESTIMATORS = Registry("advantage estimator")

Groups = Tensor | np.ndarray | Sequence[int]
"""Group number of each sample ``[batch]``; any integers, in any order."""


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may look at."""

    token_rewards: Tensor
    """``[batch, seq]``."""
    response_mask: Tensor
    """bool ``[batch, seq]``."""
    groups: Tensor
    """int64 ``[batch]``."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """A named estimator with its knobs filled in."""

    name: str
    function: Callable[[AdvantageInputs, Any], Tensor]
    knobs: Any

    def __call__(self, token_rewards: Tensor, response_mask: Tensor, groups: Groups) -> Tensor:
        """Advantages float32 ``[batch, seq]``, without gradient and 0 outside the mask, whatever stood there."""
        group_tensor = torch.as_tensor(groups, dtype=torch.int64, device=token_rewards.device)
        rewards = keep(token_rewards.detach(), response_mask)
        advantages = self.function(AdvantageInputs(rewards, response_mask, group_tensor), self.knobs)
        return keep(advantages.float(), response_mask)


def make_advantage_estimator(name: str, args: Mapping[str, Any] | None = None) -> AdvantageEstimator:
    """The estimator ``name`` with the knobs ``args``.

    Raises ``KnobError`` (a ``ValueError``) that lists every wrong name, type and range.
    """
    function, knobs = ADVANTAGE_ESTIMATORS.build(name, args or {})
    return AdvantageEstimator(name, function, knobs)


@dataclass(frozen=True)
class ReinforceKnobs:
    """Knobs of `reinforce`."""

    gamma: float = 1.0
    """Discount per response token."""

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must lie in [0, 1], not be {self.gamma}")


@ADVANTAGE_ESTIMATORS.register("reinforce", ReinforceKnobs)
def reinforce_advantages(inputs: AdvantageInputs, knobs: ReinforceKnobs) -> Tensor:
    """Discounted return to go, sum over k >= t of gamma^(k - t) r_k, counted in response tokens (Williams 1992)."""
    returns = torch.zeros_like(inputs.token_rewards)
    running = torch.zeros_like(inputs.token_rewards[:, 0])
    for position in reversed(range(inputs.token_rewards.shape[1])):
        following = inputs.token_rewards[:, position] + knobs.gamma * running
        running = torch.where(inputs.response_mask[:, position], following, running)
        returns[:, position] = running
    return returns


@dataclass(frozen=True)
class GRPOKnobs:
    """Knobs of `grpo`."""

    normalize_by_std: bool = True
    """Divide by the group's standard deviation; false gives the estimator of Dr. GRPO (arXiv 2503.20783)."""
    eps: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ValueError(f"eps must be above 0, not {self.eps}")


@ADVANTAGE_ESTIMATORS.register("grpo", GRPOKnobs)
def grpo_advantages(inputs: AdvantageInputs, knobs: GRPOKnobs) -> Tensor:
    """Reward of the sequence minus its group's mean, over the group's standard deviation (arXiv 2402.03300).

    The reward is the sum of the sequence's token rewards; the deviation is the unbiased one (n - 1). A group of one and
    a group of equal rewards have nothing to compare: exactly 0.
    """
    rewards = inputs.token_rewards.double().sum(-1)
    return group_normalised(rewards, inputs.groups, knobs)[:, None].expand(inputs.response_mask.shape)


def group_normalised(rewards: Tensor, groups: Tensor, knobs: GRPOKnobs) -> Tensor:
    """The `grpo` advantage of each sample, ``[batch]``, from ``rewards`` float64 and ``groups`` int64, ``[batch]``."""
    _, index = groups.unique(return_inverse=True)
    number = int(index.max()) + 1 if len(index) else 0
    empty = rewards.new_zeros(number)
    counts = empty.index_add(0, index, torch.ones_like(rewards))
    centred = rewards - (empty.index_add(0, index, rewards) / counts)[index]
    lowest = empty.scatter_reduce(0, index, rewards, "amin", include_self=False)
    highest = empty.scatter_reduce(0, index, rewards, "amax", include_self=False)
    if knobs.normalize_by_std:
        variance = empty.index_add(0, index, centred.square()) / (counts - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + knobs.eps)[index]
    # Rounding leaves a remainder of 1e-17 in a group of equal rewards, which a small deviation would blow up.
    return torch.where((lowest == highest)[index], torch.zeros_like(centred), centred)


def whiten(advantages: Tensor, response_mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Advantages with mean 0 and deviation 1 over the response tokens of the whole batch, ``[batch, seq]``.

    Population moments. Equal values (or a single token, or none) give 0 up to rounding.
    """
    values = keep(advantages, response_mask).double()
    count = response_mask.sum().clamp(min=1)
    centred = keep(values - values.sum() / count, response_mask)
    deviation = (centred.square().sum() / count).sqrt()
    return (centred / (deviation + eps)).to(advantages.dtype)


def estimate_advantages(
    estimator: AdvantageEstimator,
    rewards: Tensor,
    response_mask: Tensor,
    groups: Groups,
    *,
    logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    whitened: bool = False,
) -> Tensor:
    """From the rewards of samples ``[batch]`` to the advantages of tokens, float32 ``[batch, seq]``.

    With ``logprobs`` and ``reference_logprobs`` (both or neither, else ``ValueError``) the KL penalty is part of the
    token rewards.
    """
    if (logprobs is None) != (reference_logprobs is None):
        raise ValueError("a KL penalty needs the log-probabilities of both the policy and the reference")
    if logprobs is None:
        token_rewards = sequence_token_rewards(rewards, response_mask)
    else:
        token_rewards = kl_penalised_token_rewards(
            rewards, logprobs, reference_logprobs, response_mask, kl_coef, kl_estimator
        )
    advantages = estimator(token_rewards, response_mask, groups)
    return whiten(advantages, response_mask) if whitened else advantages
