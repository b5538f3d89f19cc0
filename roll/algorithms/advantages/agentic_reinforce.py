"""REINFORCE discounted per segment of response tokens, for trajectories whose turns are not recorded."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import response_segments, spread_over_tokens, turn_returns


@advantage_estimator(
    formula="A[segment k] = Σ over segments j ≥ k of gamma^(j − k) · r[segment j], a segment being an unbroken run of "
    "response tokens",
    source="ROLL; Williams 1992",
    use="Whole trajectories with the environment's tokens in between, where no turns are recorded: the mask alone "
    "tells the segments.",
    requirements=AdvantageRequirements(for_episodes=True),
)
def agentic_reinforce(
    inputs: AdvantageInputs,
    *,
    gamma: Annotated[float, Field(ge=0, le=1, description="Discount per segment of response tokens.")] = 1.0,
) -> Tensor:
    """Return the discounted return of each token's segment, ``[batch, seq]``.

    A segment is an unbroken run of response tokens. As in ROLL, the discount is applied once per segment, and all
    tokens of a segment share its return. ROLL counts only the reward on the last token of a segment; here all rewards
    of the segment count, so that KL penalties on the other tokens are not lost. Two turns without a token between them
    form one segment; `step_reinforce` distinguishes them.
    """
    segments = response_segments(inputs.response_mask)
    return spread_over_tokens(turn_returns(inputs.token_rewards, segments, gamma), segments)
