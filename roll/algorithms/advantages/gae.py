"""Generalised advantage estimation (GAE) over response tokens only.

Other positions (a tool's answer, padding) are skipped: a token bootstraps from the value at the next response token.
The last response token has no bootstrap.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import TokenDiscount, accumulate_from_the_end, token_returns
from roll.algorithms.aggregation import keep, needed


@advantage_estimator(
    formula="A[t] = d[t] + gamma · lambda_ · A[t+1], d[t] = r[t] + gamma · V[t+1] − V[t], over response tokens alone",
    source="GAE, arXiv 1506.02438",
    use="With a critic: credit for single tokens, and one sample a prompt is enough.",
    requirements=AdvantageRequirements(by_group=True, needs_values=True, returns_to_go=True),
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
    """Return GAE advantages, ``[batch, seq]`` (arXiv 1506.02438). The critic's training target is advantage + value.

    d[t] = r[t] + gamma V[t + 1] - V[t] and A[t] = d[t] + gamma lambda_ A[t + 1], with t + 1 the next response token.
    """
    values, mask = needed(inputs.values, "values"), inputs.response_mask
    # Value at the next response token after each position; 0 if there is none.
    carried = accumulate_from_the_end(values, (~mask).to(values.dtype))
    following = pad(carried[:, 1:], (0, 1))
    errors = keep(inputs.token_rewards + gamma * following - values, mask)
    return token_returns(errors, mask, gamma * lambda_)
