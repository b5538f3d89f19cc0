"""REINFORCE discounted per turn: all tokens of a turn get the turn's discounted return.

A long turn is therefore not discounted more than a short one.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import checked_turns, spread_over_tokens, turn_returns


@advantage_estimator(
    formula="A[turn k] = Σ over turns j ≥ k of gamma^(j − k) · r[turn j], for every token of turn k",
    source="Williams 1992, counted in turns as in ROLL",
    use="Episodes with rewards along the way: each turn answers for what comes after it, whatever its length.",
    requirements=AdvantageRequirements(by_group=True, needs_turns=True, for_episodes=True),
)
def step_reinforce(
    inputs: AdvantageInputs, *, gamma: Annotated[float, Field(ge=0, le=1, description="Discount per turn.")] = 1.0
) -> Tensor:
    """Return the discounted return of each token's turn, ``[batch, seq]``. Turns without tokens are discounted too."""
    turns = checked_turns(inputs)
    return spread_over_tokens(turn_returns(inputs.token_rewards, turns, gamma), turns)
