"""Generalised advantage estimation over response tokens only.

Positions between two response tokens (a tool's answer, padding) are skipped: the bootstrap is the value of the next
response token. After the last response token there is no bootstrap.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import TokenDiscount, accumulate_from_the_end, result_dtype, token_returns
from roll.algorithms.aggregation import keep, needed


def generalised_advantages(
    token_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lambda_: float
) -> Tensor:
    """Return GAE advantages ``[batch, seq]``; the returns that values are trained on are advantage + value.

    With t + 1 the next response token, d[t] = r[t] + gamma V[t + 1] - V[t] and A[t] = d[t] + gamma lambda_ A[t + 1]
    (arXiv 1506.02438). ``token_rewards`` and ``values`` are ``[batch, seq]``, ``response_mask`` is bool. The result has
    no gradient and is 0 outside the mask; it is float64 if the rewards are, else float32.
    """
    rewards = keep(token_rewards.detach(), response_mask).double()
    predicted = keep(values.detach(), response_mask).double()
    errors = keep(rewards + gamma * _next_value(predicted, response_mask) - predicted, response_mask)
    advantages = keep(token_returns(errors, response_mask, gamma * lambda_), response_mask)
    return advantages.to(result_dtype(token_rewards))


def _next_value(values: Tensor, response_mask: Tensor) -> Tensor:
    """Return the value of the response token that follows each position, 0 where none does."""
    outside = (~response_mask).to(values.dtype)
    carried = accumulate_from_the_end(values, outside)
    return pad(carried[:, 1:], (0, 1))


@advantage_estimator(
    formula="A[t] = d[t] + gamma · lambda_ · A[t+1], d[t] = r[t] + gamma · V[t+1] − V[t], over response tokens alone",
    source="GAE, arXiv 1506.02438",
    use="With a critic: credit for single tokens, and one sample a prompt is enough.",
    requirements=AdvantageRequirements(needs_values=True, returns_to_go=True),
)
def gae(
    inputs: AdvantageInputs,
    *,
    gamma: TokenDiscount = 1.0,
    lambda_: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="1: the return minus the value, unbiased; 0: the error of one step, with the least variance.",
        ),
    ] = 0.95,
) -> Tensor:
    """Return the advantages of `generalised_advantages`, ``[batch, seq]``."""
    values = needed(inputs.values, "values")
    return generalised_advantages(inputs.token_rewards, values, inputs.response_mask, gamma, lambda_)
