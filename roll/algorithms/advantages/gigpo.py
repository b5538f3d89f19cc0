"""GiGPO: compares episodes within their group, and turns with other turns of the group in the same state."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from roll.algorithms.advantages.base import AdvantageInputs, AdvantageRequirements, advantage_estimator
from roll.algorithms.advantages.shared import (
    Eps,
    checked_turns,
    compared,
    group_normalised,
    spread_over_tokens,
    turn_returns,
    turn_sums,
)
from roll.algorithms.aggregation import needed


@advantage_estimator(
    formula="A = grpo(R over the episodes of the group) + step_weight · grpo(G over its turns in the same state), "
    "G of turn k = Σ over turns j ≥ k of gamma^(j − k) · r[turn j]",
    source="GiGPO, arXiv 2505.10978",
    use="Episodes of one environment seed that pass through the same states: credit for single turns without a critic.",
    requirements=AdvantageRequirements(
        by_group=True, group_relative=True, needs_turns=True, needs_states=True, for_episodes=True
    ),
)
def gigpo(
    inputs: AdvantageInputs,
    *,
    gamma: Annotated[float, Field(ge=0, le=1, description="Discount per turn in the returns of turns.")] = 0.95,
    step_weight: Annotated[
        float, Field(ge=0, description="Weight of the comparison of turns beside that of episodes.")
    ] = 1.0,
    normalize_by_std: Annotated[
        bool, Field(description="Divide both by the standard deviation of what is compared.")
    ] = True,
    eps: Eps = 1e-6,
) -> Tensor:
    """Return the episode's advantage plus ``step_weight`` x the turn's advantage, ``[batch, seq]`` (arXiv 2505.10978).

    The episode's reward is undiscounted; turn returns are discounted by ``gamma``. A turn's advantage is exactly 0 if
    no other turn of its group acted in the same state, or if it has no state (-1). States are compared within a group
    only. ``ValueError`` if ``states`` has fewer turns than ``turns``.
    """
    turns = checked_turns(inputs)
    episode = compared(inputs, lambda rewards, groups, _: group_normalised(rewards, groups, normalize_by_std, eps))
    returns = turn_returns(inputs.token_rewards, turns, gamma)
    batch, number = returns.shape
    states = needed(inputs.states, "states")
    if states.dim() != 2 or len(states) != batch or states.shape[1] < number:
        raise ValueError(f"states must have the shape [{batch}, {number} turns or more], not {list(states.shape)}")
    states = states[:, :number]
    acted = turn_sums(inputs.response_mask.long(), turns) > 0
    anchored = acted & (states != -1)
    # Index of the (group, state) pair of each turn that has a state.
    _, group = inputs.groups[:, None].expand(states.shape)[anchored].unique(return_inverse=True)
    names, state = states[anchored].unique(return_inverse=True)
    pairs = group * len(names) + state
    compared_turns = group_normalised(returns[anchored], pairs, normalize_by_std, eps)
    step = torch.zeros_like(returns).masked_scatter(anchored, compared_turns)
    return episode + step_weight * spread_over_tokens(step, turns)
