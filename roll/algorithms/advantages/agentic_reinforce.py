"""REINFORCE discounted per segment of response tokens, for trajectories whose turns are not recorded."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import response_segments, spread_over_tokens, turn_returns


@advantage_estimator(
    formula="A[segment k] = Σ over segments j ≥ k of gamma^(j − k) · r[segment j], a segment being an unbroken run of "
    "response tokens",
    source="ROLL; Williams 1992",
    use="Whole trajectories with the environment's tokens in between, where no turns are recorded: the mask alone "
    "tells the segments.",
    requirements=AdvantageRequirements(by_group=True, for_episodes=True),
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
    form one segment; `step_reinforce` distinguishes them. Where turns are recorded, segments count in the order of
    their turns: those of an agent's parallel conversations do not follow one another as their samples do.
    """
    segments = response_segments(inputs.response_mask)
    if inputs.turns is not None:
        segments = _by_turn(segments, inputs.turns)
    return spread_over_tokens(turn_returns(inputs.token_rewards, segments, gamma), segments)


def _by_turn(segments: Tensor, turns: Tensor) -> Tensor:
    """Return segment numbers, int64 ``[batch, seq]``, that are ordered by the first turn of each segment."""
    inside = segments >= 0
    number = int(segments.max()) + 1 if segments.numel() else 0
    first = turns.new_full((len(segments), number + 1), torch.iinfo(turns.dtype).max)  # of absent ones: behind all
    first = first.scatter_reduce(1, torch.where(inside, segments, number), turns, "amin")[:, :number]
    ranks = first.argsort(dim=1, stable=True).argsort(dim=1)
    return torch.where(inside, pad(ranks, (0, 1)).gather(1, torch.where(inside, segments, number)), -1)
