"""GiGPO: compares episodes within their group, and turns with other turns that acted in the same state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.estimator import ADVANTAGE_ESTIMATORS, AdvantageInputs, AdvantageTraits
from roll.algorithms.advantages.group_relative import GRPOKnobs, compared, group_normalised
from roll.algorithms.advantages.turns import checked_turns, spread_over_tokens, turn_returns, turn_sums
from roll.algorithms.aggregation import needed
from roll.algorithms.registry import knob


@dataclass(frozen=True)
class GiGPOKnobs:
    """Arguments of `gigpo`."""

    gamma: float = knob(0.95, help="Discount per turn in the returns of turns.", at_least=0, at_most=1)
    step_weight: float = knob(1.0, help="Weight of the comparison of turns beside that of episodes.", at_least=0)
    normalize_by_std: bool = knob(True, help="Divide both by the standard deviation of what is compared.")
    eps: float = knob(1e-6, help="Added to the standard deviation, in units of the reward.", above=0)


@ADVANTAGE_ESTIMATORS.register(
    "gigpo",
    GiGPOKnobs,
    formula="A = grpo(R over the episodes of the group) + step_weight · grpo(G over its turns in the same state), "
    "G of turn k = Σ over turns j ≥ k of gamma^(j − k) · r[turn j]",
    source="GiGPO, arXiv 2505.10978",
    use="Episodes of one environment seed that pass through the same states: credit for single turns without a critic.",
    traits=AdvantageTraits(group_relative=True, needs_turns=True, needs_states=True, for_episodes=True),
)
def gigpo_advantages(inputs: AdvantageInputs, knobs: GiGPOKnobs) -> Tensor:
    """Return the episode's advantage plus ``step_weight`` x the turn's advantage, ``[batch, seq]`` (arXiv 2505.10978).

    The reward of an episode is undiscounted. A turn has a step advantage of exactly 0 if no other turn of its group
    shares its state, or if it has no state (-1). Equal states of different groups are different states. ``ValueError``
    if ``states`` has fewer turns than ``turns``.
    """
    normalisation = GRPOKnobs(knobs.normalize_by_std, knobs.eps)
    turns = checked_turns(inputs)
    episode = compared(inputs, lambda rewards, groups, _: group_normalised(rewards, groups, normalisation))
    returns = turn_returns(inputs.token_rewards, turns, knobs.gamma)
    states = _states_of_turns(inputs, returns.shape[-1])
    acted = turn_sums(inputs.response_mask.long(), turns) > 0
    anchored = acted & (states != -1)
    compared_turns = group_normalised(returns[anchored], _anchors(inputs.groups, states, anchored), normalisation)
    step = torch.zeros_like(returns).masked_scatter(anchored, compared_turns)
    return episode + knobs.step_weight * spread_over_tokens(step, turns)


def _states_of_turns(inputs: AdvantageInputs, number: int) -> Tensor:
    batch = len(inputs.response_mask)
    states = needed(inputs.states, "states")
    if states.dim() != 2 or len(states) != batch or states.shape[1] < number:
        raise ValueError(f"states must have the shape [{batch}, {number} turns or more], not {list(states.shape)}")
    return states[:, :number]


def _anchors(groups: Tensor, states: Tensor, anchored: Tensor) -> Tensor:
    """Return the number of the pair (group, state) of each anchored turn, ``[anchored turns]``."""
    _, group = groups[:, None].expand(states.shape)[anchored].unique(return_inverse=True)
    names, state = states[anchored].unique(return_inverse=True)
    return group * len(names) + state
