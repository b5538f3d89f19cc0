"""Returns counted in turns: `step_reinforce` and `agentic_reinforce`.

The reward of a turn is the sum of its token rewards, and all tokens of a turn get the turn's discounted return. A long
answer is therefore not discounted more than a short one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from roll.algorithms.advantages.estimator import ADVANTAGE_ESTIMATORS, AdvantageInputs, AdvantageTraits
from roll.algorithms.advantages.returns import accumulate_from_the_end
from roll.algorithms.aggregation import needed
from roll.algorithms.registry import knob


def response_segments(response_mask: Tensor) -> Tensor:
    """Number the unbroken runs of response tokens: int64 ``[batch, seq]`` from 0, -1 outside the mask."""
    before = torch.cat([torch.zeros_like(response_mask[:, :1]), response_mask[:, :-1]], dim=-1)
    return torch.where(response_mask, (response_mask & ~before).cumsum(-1) - 1, -1)


def checked_turns(inputs: AdvantageInputs) -> Tensor:
    """Return the turns of ``inputs``. ``ValueError`` if a response token has none: its reward would be lost."""
    turns = needed(inputs.turns, "turns")
    if (inputs.response_mask & (turns < 0)).any():
        raise ValueError("turns: a response token belongs to no turn; turns are counted from 0")
    return turns


def turn_sums(token_values: Tensor, turns: Tensor) -> Tensor:
    """Sum over the tokens of each turn: ``[batch, turns]`` from ``[batch, seq]`` and int64 turns, -1 for none."""
    number = int(turns.max()) + 1 if turns.numel() else 0
    sums = token_values.new_zeros(len(turns), number + 1)
    return sums.scatter_add(1, torch.where(turns < 0, number, turns), token_values)[:, :number]


def turn_returns(token_rewards: Tensor, turns: Tensor, gamma: float) -> Tensor:
    """Return the return to go of each turn, ``[batch, turns]``, discounted by ``gamma`` per turn number."""
    rewards = turn_sums(token_rewards, turns)
    return accumulate_from_the_end(rewards, torch.full_like(rewards, gamma))


def spread_over_tokens(turn_values: Tensor, turns: Tensor) -> Tensor:
    """Give each token the value of its turn, ``[batch, seq]``; 0 where there is no turn."""
    number = turn_values.shape[-1]
    return pad(turn_values, (0, 1)).gather(1, torch.where(turns < 0, number, turns))


@dataclass(frozen=True)
class StepReinforceKnobs:
    """Arguments of `step_reinforce`."""

    gamma: float = knob(1.0, help="Discount per turn.", at_least=0, at_most=1)


@ADVANTAGE_ESTIMATORS.register(
    "step_reinforce",
    StepReinforceKnobs,
    formula="A[turn k] = Σ over turns j ≥ k of gamma^(j − k) · r[turn j], for every token of turn k",
    source="Williams 1992, counted in turns as in ROLL",
    use="Episodes with rewards along the way: each turn answers for what comes after it, whatever its length.",
    traits=AdvantageTraits(needs_turns=True, for_episodes=True),
)
def step_reinforce_advantages(inputs: AdvantageInputs, knobs: StepReinforceKnobs) -> Tensor:
    """Return the discounted return of each token's turn, ``[batch, seq]``. A turn without tokens is still
    discounted."""
    turns = checked_turns(inputs)
    return spread_over_tokens(turn_returns(inputs.token_rewards, turns, knobs.gamma), turns)


@dataclass(frozen=True)
class AgenticReinforceKnobs:
    """Arguments of `agentic_reinforce`."""

    gamma: float = knob(1.0, help="Discount per segment of response tokens.", at_least=0, at_most=1)


@ADVANTAGE_ESTIMATORS.register(
    "agentic_reinforce",
    AgenticReinforceKnobs,
    formula="A[segment k] = Σ over segments j ≥ k of gamma^(j − k) · r[segment j], a segment being an unbroken run of "
    "response tokens",
    source="ROLL; Williams 1992",
    use="Whole trajectories with the environment's tokens in between, where no turns are recorded: the mask alone "
    "tells the segments.",
    traits=AdvantageTraits(for_episodes=True),
)
def agentic_reinforce_advantages(inputs: AdvantageInputs, knobs: AgenticReinforceKnobs) -> Tensor:
    """Return the discounted return of each token's segment, ``[batch, seq]``.

    The discount is applied once per segment, and all tokens of a segment share its return; ROLL does the same. But ROLL
    counts only the reward on the last token of a segment. Here all rewards of the segment count, so that a KL penalty
    on the other tokens is not lost. Two turns without a token between them are one segment; `step_reinforce` tells them
    apart.
    """
    segments = response_segments(inputs.response_mask)
    return spread_over_tokens(turn_returns(inputs.token_rewards, segments, knobs.gamma), segments)
