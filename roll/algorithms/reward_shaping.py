"""From raw scores to rewards, and which samples stay out of training: what happens before advantages.

The order is fixed: scores are clipped, the length penalty is added, the sum is normalised. Which samples are kept is
decided on the raw scores, so that no setting above changes it. Nothing is changed in place; the only thing that
remembers is the `RunningMoments` of the caller. All tensors are those of a whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.moments import Groups, RunningMoments, group_deviation, group_mean, group_range, group_tensor
from roll.algorithms.needed import needed

MomentsOf = Literal["none", "batch", "group", "tag", "running"]
"""Whose mean or deviation rewards are normalised by."""


@dataclass(frozen=True)
class LengthPenalty:
    """A reward for being short, added to the score."""

    kind: Literal["overlong", "relative"]
    """`overlong_penalty` or `relative_length_reward`."""
    weight: float = 1.0
    """Its size, in units of the reward."""
    max_length: int | None = None
    """Longest possible response, in tokens; `overlong` only."""
    buffer: int | None = None
    """Tokens below it over which the penalty grows; `overlong` only."""
    correct_above: float = 0.0
    """A response is correct if its raw score is above this; `relative` only."""

    def __post_init__(self) -> None:
        if self.kind not in ("overlong", "relative"):
            raise ValueError(f"unknown length penalty {self.kind!r}; valid: overlong, relative")
        if self.kind == "overlong" and (self.max_length is None or self.buffer is None):
            raise ValueError("the overlong penalty needs max_length and buffer")


@dataclass(frozen=True)
class RewardShaping:
    """What is done to the scores of a batch; by default nothing."""

    clip: float | None = None
    """Scores are clipped to plus and minus this."""
    length_penalty: LengthPenalty | None = None
    mean: MomentsOf = "none"
    """Whose mean is subtracted."""
    std: MomentsOf = "none"
    """Whose deviation divides."""
    eps: float = 1e-6
    """Added to the deviation, in units of the reward."""
    drop_truncated: bool = False
    """Leave out responses that were cut at their longest length."""
    difficulty: tuple[float, float] | None = None
    """Leave out groups whose mean raw score lies outside these two, which belong to the range."""
    drop_zero_variance: bool = False
    """Leave out groups of equal raw scores."""


@dataclass(frozen=True)
class ShapedRewards:
    """What `shape_rewards` gives."""

    rewards: Tensor
    """``[batch]``."""
    keep: Tensor
    """bool ``[batch]``: samples to train on."""
    metrics: dict[str, float]
    """Of the settings that are on: ``clipped_share``, ``length_penalty`` (mean), ``running_mean``, ``running_std``,
    ``kept_share``."""


def shape_rewards(
    scores: Tensor,
    groups: Groups,
    lengths: Tensor,
    truncated: Tensor,
    settings: RewardShaping,
    running: RunningMoments | None = None,
    tags: Groups | None = None,
    penalties: Tensor | None = None,
) -> ShapedRewards:
    """Clip, length penalty, normalise; and the masks, from raw scores. All tensors ``[batch]``.

    ``lengths`` in response tokens, ``truncated`` bool; ``penalties`` are added to the clipped scores. Rewards are
    float64 if the scores are, else float32. With a running mean or deviation ``running`` learns the rewards of this
    batch first, so the first batch has moments too; otherwise it is not touched. ``ValueError`` for a score that is not
    finite, or running moments that are missing.
    """
    _check_finite(scores)
    numbers = group_tensor(groups, scores)
    metrics: dict[str, float] = {}
    rewards = scores.detach().to(torch.float64, copy=True)
    if settings.clip is not None:
        rewards = clip_rewards(rewards, settings.clip)
        metrics["clipped_share"] = _mean(rewards != scores)
    if penalties is not None:
        rewards = rewards + penalties.detach()
    if settings.length_penalty is not None:
        penalty = _length_penalty(scores, numbers, lengths, settings.length_penalty)
        rewards = rewards + penalty
        metrics["length_penalty"] = _mean(penalty)
    if "running" in (settings.mean, settings.std) and running is not None:
        running.update(rewards)
        metrics |= {"running_mean": running.mean, "running_std": running.deviation}
    rewards = normalize_rewards(rewards, numbers, settings.mean, settings.std, running, settings.eps, tags)
    keep = _kept(scores, numbers, truncated, settings)
    if settings.drop_truncated or settings.drop_zero_variance or settings.difficulty is not None:
        metrics["kept_share"] = _mean(keep)
    return ShapedRewards(rewards.to(_result_dtype(scores)), keep, metrics)


def clip_rewards(rewards: Tensor, limit: float) -> Tensor:
    """Rewards (any shape) clipped to [-limit, limit]. ``ValueError`` unless ``limit`` is above 0."""
    if not limit > 0:
        raise ValueError(f"rewards are clipped to a limit above 0, not {limit}")
    return rewards.to(_result_dtype(rewards)).clamp(-limit, limit)


def normalize_rewards(
    rewards: Tensor,
    groups: Groups,
    mean: MomentsOf = "none",
    std: MomentsOf = "none",
    running: RunningMoments | None = None,
    eps: float = 1e-6,
    tags: Groups | None = None,
) -> Tensor:
    """(reward - mean) / (deviation + eps), ``[batch]``, each of the two taken from its own place.

    ``none`` subtracts 0, or divides by nothing. Deviations are unbiased (n - 1). Where the deviation is 0 (a group of
    one, equal rewards) nothing can be told apart, and the result is exactly 0 whatever the mean. ``running`` is only
    read, ``tag`` takes the samples of equal ``tags``. float64 if the rewards are, else float32. ``ValueError`` for an
    unknown place, for running moments that are missing or have seen nothing, for missing tags, or ``eps`` <= 0.
    """
    if not eps > 0:
        raise ValueError(f"eps must be above 0, not {eps}")
    numbers = group_tensor(groups, rewards)
    values = rewards.detach().double()
    result = values
    if mean != "none":
        result = values - _moments(mean, values, numbers, running, tags)[0]
    if std != "none":
        deviation = _moments(std, values, numbers, running, tags)[1]
        result = torch.where(deviation > 0, result / (deviation + eps), torch.zeros_like(result))
    return result.to(_result_dtype(rewards))


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """0 up to ``max_length - buffer`` tokens, then falling in a line to -factor at ``max_length`` and beyond.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13). ``lengths`` ``[batch]`` in response tokens;
    returns ``[batch]`` to be added to the reward, float64 if the lengths are, else float32. ``ValueError`` unless
    0 < buffer <= max_length and factor >= 0.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the buffer must lie in (0, max_length = {max_length}], not be {buffer}")
    if not factor >= 0:
        raise ValueError(f"the factor of a penalty must be at least 0, not {factor}")
    excess = (lengths.double() - (max_length - buffer)) / buffer
    return (-factor * excess.clamp(0, 1)).to(_result_dtype(lengths))


def relative_length_reward(lengths: Tensor, correct: Tensor, groups: Groups, weight: float = 1.0) -> Tensor:
    """weight x l for a correct response and weight x min(0, l) for a wrong one, with l from 1/2 to -1/2.

    l = 1/2 - (length - shortest) / (longest - shortest) within the group, 0 where all are equally long (Kimi k1.5,
    arXiv 2501.12599, section 2.3.3). ``lengths`` in response tokens and ``correct`` (bool) ``[batch]``; returns
    ``[batch]`` to be added to the reward, float64 if the lengths are, else float32. ``ValueError`` unless weight >= 0.
    """
    if not weight >= 0:
        raise ValueError(f"the weight of a penalty must be at least 0, not {weight}")
    values = lengths.double()
    shortest, longest = group_range(values, group_tensor(groups, lengths))
    span = longest - shortest
    place = torch.where(span > 0, 0.5 - (values - shortest) / span, torch.zeros_like(span))
    return (weight * torch.where(correct, place, place.clamp(max=0))).to(_result_dtype(lengths))


def truncated_mask(truncated: Tensor) -> Tensor:
    """bool ``[batch]``: keep a response unless it was cut at its longest length (finish reason ``length``)."""
    return ~truncated.bool()


def difficulty_mask(scores: Tensor, groups: Groups, low: float, high: float) -> Tensor:
    """bool ``[batch]``: keep groups whose mean score lies in [low, high]. ``ValueError`` if low is above high."""
    if not low <= high:
        raise ValueError(f"the difficulty range [{low}, {high}] is empty")
    mean = group_mean(scores.detach().double(), group_tensor(groups, scores))
    return (mean >= low) & (mean <= high)


def zero_variance_mask(scores: Tensor, groups: Groups) -> Tensor:
    """bool ``[batch]``: keep groups with at least two different scores. A group of one is left out."""
    lowest, highest = group_range(scores.detach(), group_tensor(groups, scores))
    return lowest < highest


def _length_penalty(scores: Tensor, groups: Tensor, lengths: Tensor, settings: LengthPenalty) -> Tensor:
    if settings.kind == "overlong":
        return overlong_penalty(
            lengths.double(),
            needed(settings.max_length, "max_length"),
            needed(settings.buffer, "buffer"),
            settings.weight,
        )
    return relative_length_reward(lengths.double(), scores > settings.correct_above, groups, settings.weight)


def _kept(scores: Tensor, groups: Tensor, truncated: Tensor, settings: RewardShaping) -> Tensor:
    keep = torch.ones_like(scores, dtype=torch.bool)
    if settings.drop_truncated:
        keep = keep & truncated_mask(truncated)
    if settings.difficulty is not None:
        keep = keep & difficulty_mask(scores, groups, *settings.difficulty)
    if settings.drop_zero_variance:
        keep = keep & zero_variance_mask(scores, groups)
    return keep


def _moments(
    of: MomentsOf, values: Tensor, groups: Tensor, running: RunningMoments | None, tags: Groups | None
) -> tuple[Tensor, Tensor]:
    """Mean and deviation for each value, ``[batch]``."""
    if of == "running":
        if running is None or running.count == 0:
            raise ValueError("running moments are asked for, but there are none yet")
        return torch.full_like(values, running.mean), torch.full_like(values, running.deviation)
    if of not in ("batch", "group", "tag"):
        raise ValueError(f"unknown moments {of!r}; valid: none, batch, group, tag, running")
    if of == "tag":
        if tags is None:
            raise ValueError("moments by tag are asked for, but no tags are given")
        together = group_tensor(tags, values)
    else:
        together = group_tensor(groups if of == "group" else torch.zeros_like(groups), values)
    return group_mean(values, together), group_deviation(values, together)


def _check_finite(scores: Tensor) -> None:
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(f"the score of sample {wrong[0]} is {scores[wrong[0]].item()} ({len(wrong)} are not finite)")


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0


def _result_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
