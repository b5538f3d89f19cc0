"""Functions shared by estimators: group statistics, returns per token, returns per turn.

The reward of a sample or turn is the sum of its token rewards. Standard deviations are unbiased (n - 1), and 0 for
fewer than two values. For equal values the mean is exactly their value and the deviation exactly 0; otherwise a
rounding error of 1e-17, divided by a small deviation, would become an advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from roll.algorithms.aggregation import keep, needed

if TYPE_CHECKING:
    from roll.algorithms.advantages.base import AdvantageInputs

TokenDiscount = Annotated[float, Field(ge=0, le=1, description="Discount per response token.")]
"""Type of the discount setting of per-token returns."""
Eps = Annotated[float, Field(gt=0, description="Added to the standard deviation, in units of the reward.")]
"""Type of the epsilon setting of estimators that divide by a group's standard deviation."""
BatchEps = Annotated[float, Field(gt=0, description="Added to the deviation of the batch, in units of the reward.")]
"""Type of the epsilon setting of estimators that divide by the standard deviation over a batch's response tokens."""

Groups = Tensor | np.ndarray | Sequence[int] | Sequence[str]
"""Group id of each sample, ``[batch]``: integers or strings, in any order."""


def group_tensor(groups: Groups, like: Tensor) -> Tensor:
    """Return group ids as an int64 tensor ``[batch]`` on the device of ``like`` ``[batch, ...]``.

    ``ValueError`` if the sizes differ.
    """
    if not isinstance(groups, Tensor) and any(isinstance(each, str) for each in groups):
        places = {name: place for place, name in enumerate(dict.fromkeys(groups))}
        groups = [places[each] for each in groups]
    numbers = torch.as_tensor(groups, dtype=torch.int64, device=like.device)
    if numbers.shape != like.shape[:1]:
        raise ValueError(f"groups must be [batch] = [{like.shape[0]}], not {list(numbers.shape)}")
    return numbers


def group_sizes(groups: Tensor) -> Tensor:
    """Return the size of each value's group, int64 ``[values]``; ``groups`` is int64 ``[values]``."""
    _, index, sizes = groups.unique(return_inverse=True, return_counts=True)
    return sizes[index]


def group_range(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum of each value's group, two tensors ``[values]``; ``groups`` is int64."""
    names, index = groups.unique(return_inverse=True)
    empty = values.new_zeros(len(names))
    lowest = empty.scatter_reduce(0, index, values, "amin", include_self=False)
    highest = empty.scatter_reduce(0, index, values, "amax", include_self=False)
    return lowest[index], highest[index]


def group_mean(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean of each value's group, ``[values]``; weighted by ``weights`` (positive, same shape) if given."""
    names, index = groups.unique(return_inverse=True)
    weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    empty = values.new_zeros(len(names))
    mean = empty.index_add(0, index, weights * values) / empty.index_add(0, index, weights)
    lowest, highest = group_range(values, groups)
    return mean[index].clamp(lowest, highest)


def group_deviation(values: Tensor, groups: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each value's group, ``[values]``; 0 in a group of one."""
    squared = (values - group_mean(values, groups)).square()
    sizes = group_sizes(groups)
    return (group_mean(squared, groups) * sizes / (sizes - 1).clamp(min=1)).sqrt()


def result_dtype(values: Tensor) -> torch.dtype:
    """Return float64 for float64 values, else float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def compared(inputs: AdvantageInputs, compare: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Compute one advantage per sample with ``compare``, and return it for all tokens of the sample, ``[batch, seq]``.

    ``compare(rewards, groups, lengths)`` takes and returns tensors ``[samples]``: ``rewards`` float64, ``groups`` and
    ``lengths`` (in response tokens) int64. Samples without response tokens are left out, so they do not count as
    members of their groups; their advantage is 0.
    """
    lengths = inputs.response_mask.sum(-1)
    present = lengths > 0
    rewards = inputs.token_rewards.sum(-1)
    found = compare(rewards[present], inputs.groups[present], lengths[present])
    advantages = rewards.new_zeros(rewards.shape).masked_scatter(present, found)
    return advantages[:, None].expand(inputs.response_mask.shape)


def group_normalised(rewards: Tensor, groups: Tensor, normalize_by_std: bool, eps: float) -> Tensor:
    """Return the `grpo` advantage of each sample, ``[batch]``; ``rewards`` (float64) and ``groups`` (int64) are too."""
    centred = rewards - group_mean(rewards, groups)
    return centred / (group_deviation(rewards, groups) + eps) if normalize_by_std else centred


def accumulate_from_the_end(values: Tensor, factors: Tensor) -> Tensor:
    """Solve y[t] = values[t] + factors[t] x y[t + 1], with y = 0 after the end; all ``[batch, length]``.

    A parallel scan by doubling: after k rounds each entry is the sum over 2^k positions, so 32,768 positions take 15
    rounds.
    """
    distance = 1
    while distance < values.shape[-1]:
        values = values + factors * pad(values[:, distance:], (0, distance))
        factors = factors * pad(factors[:, distance:], (0, distance))
        distance *= 2
    return values


def token_returns(token_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Return the return-to-go at each response token, ``[batch, seq]``, discounted per response token.

    ``token_rewards`` must be 0 outside ``response_mask`` (bool); both are ``[batch, seq]``.
    """
    step = torch.tensor(gamma, dtype=token_rewards.dtype, device=token_rewards.device)
    return accumulate_from_the_end(token_rewards, torch.where(response_mask, step, torch.ones_like(step)))


def response_segments(response_mask: Tensor) -> Tensor:
    """Return the segment number of each token, int64 ``[batch, seq]``, from 0; -1 outside the mask.

    A segment is an unbroken run of response tokens."""
    before = torch.cat([torch.zeros_like(response_mask[:, :1]), response_mask[:, :-1]], dim=-1)
    return torch.where(response_mask, (response_mask & ~before).cumsum(-1) - 1, -1)


def checked_turns(inputs: AdvantageInputs) -> Tensor:
    """Return ``inputs.turns``. ``ValueError`` if a response token has no turn, because its reward would be lost."""
    turns = needed(inputs.turns, "turns")
    if (inputs.response_mask & (turns < 0)).any():
        raise ValueError("turns: a response token belongs to no turn; turns are counted from 0")
    return turns


def turn_sums(token_values: Tensor, turns: Tensor) -> Tensor:
    """Sum token values ``[batch, seq]`` over each turn, ``[batch, turns]``. ``turns`` is int64, -1 for no turn."""
    number = int(turns.max()) + 1 if turns.numel() else 0
    sums = token_values.new_zeros(len(turns), number + 1)
    return sums.scatter_add(1, torch.where(turns < 0, number, turns), token_values)[:, :number]


def turn_returns(token_rewards: Tensor, turns: Tensor, gamma: float) -> Tensor:
    """Return the return-to-go of each turn, ``[batch, turns]``, discounted by ``gamma`` per turn."""
    rewards = turn_sums(token_rewards, turns)
    return accumulate_from_the_end(rewards, torch.full_like(rewards, gamma))


def spread_over_tokens(turn_values: Tensor, turns: Tensor) -> Tensor:
    """Return the value of each token's turn, ``[batch, seq]``; 0 for tokens without a turn."""
    number = turn_values.shape[-1]
    return pad(turn_values, (0, 1)).gather(1, torch.where(turns < 0, number, turns))


def segment_means(token_values: Tensor, response_mask: Tensor) -> Tensor:
    """Return the mean over each token's segment (run of response tokens), ``[batch, seq]``; 0 outside the mask."""
    segments = response_segments(response_mask)
    sums = turn_sums(keep(token_values, response_mask), segments)
    return spread_over_tokens(sums / turn_sums(response_mask.to(sums.dtype), segments).clamp(min=1), segments)
