"""Discounted sums of rewards from a position on, and `reinforce`, the estimator that returns them unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from roll.algorithms.advantages.estimator import ADVANTAGE_ESTIMATORS, AdvantageInputs, AdvantageTraits
from roll.algorithms.registry import knob


def accumulate_from_the_end(values: Tensor, factors: Tensor) -> Tensor:
    """Return y with y[t] = values[t] + factors[t] x y[t + 1] and 0 after the end; all ``[batch, length]``.

    Works by doubling: after k rounds each entry holds the sum over 2^k positions, so a sequence of 32,768 takes 15
    rounds.
    """
    distance = 1
    while distance < values.shape[-1]:
        values = values + factors * pad(values[:, distance:], (0, distance))
        factors = factors * pad(factors[:, distance:], (0, distance))
        distance *= 2
    return values


def token_returns(token_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Return the return to go at each response token, ``[batch, seq]``, discounted per response token.

    ``token_rewards`` must be 0 outside ``response_mask`` (bool); both are ``[batch, seq]``.
    """
    step = torch.tensor(gamma, dtype=token_rewards.dtype, device=token_rewards.device)
    return accumulate_from_the_end(token_rewards, torch.where(response_mask, step, torch.ones_like(step)))


@dataclass(frozen=True)
class ReinforceKnobs:
    """Arguments of `reinforce`."""

    gamma: float = knob(1.0, help="Discount per response token.", at_least=0, at_most=1)


@ADVANTAGE_ESTIMATORS.register(
    "reinforce",
    ReinforceKnobs,
    formula="A[t] = Σ over response tokens k ≥ t of gamma^(k − t) · r[k]",
    source="Williams 1992, Machine Learning 8",
    use="The plain return: unbiased, with the highest variance. For rewards that are centred already, or with "
    "whitening.",
    traits=AdvantageTraits(returns_to_go=True),
)
def reinforce_advantages(inputs: AdvantageInputs, knobs: ReinforceKnobs) -> Tensor:
    """Return the discounted return to go, counted in response tokens, ``[batch, seq]`` (Williams 1992)."""
    return token_returns(inputs.token_rewards, inputs.response_mask, knobs.gamma)
