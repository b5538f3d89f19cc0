"""Reward shaping before advantages: rewards from raw scores, and the selection of samples to train on.

The order is fixed: scores are clipped, length and repetition penalties are added, the sum is normalised. Samples are
selected by their raw scores, so the other settings do not affect the selection. Inputs are not modified; the only state
is the caller's `RunningMoments`. All tensors cover a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.advantages.shared import (
    Groups,
    group_deviation,
    group_mean,
    group_range,
    group_tensor,
    result_dtype,
)
from roll.algorithms.aggregation import needed

MomentsOf = Literal["none", "batch", "group", "tag", "running"]
"""The samples over which the mean or standard deviation for normalisation is computed."""


@dataclass(frozen=True)
class LengthPenalty:
    """Settings of a length-dependent term that is added to the score."""

    kind: Literal["overlong", "relative"]
    """The function to use: `overlong_penalty` or `relative_length_reward`."""
    weight: float = 1.0
    """Scale of the term, in units of the reward."""
    max_length: int = 0
    """Maximum response length, in tokens; `overlong` only."""
    buffer: int = 0
    """Number of tokens below ``max_length`` over which the penalty grows; `overlong` only."""
    correct_above: float = 0.0
    """Raw score above which a response counts as correct; `relative` only."""

    def __post_init__(self) -> None:
        if self.kind not in ("overlong", "relative"):
            raise ValueError(f"unknown length penalty {self.kind!r}; valid: overlong, relative")
        if self.kind == "overlong" and not (self.max_length and self.buffer):
            raise ValueError("the overlong penalty needs max_length and buffer")


@dataclass(frozen=True)
class RepetitionPenalty:
    """Settings of `repetition_penalty`, which is added to the score."""

    ngram_size: int = 3
    """Number of tokens in an n-gram."""
    weight: float = 1.0
    """Scale of the penalty, in units of the reward."""


@dataclass
class RunningMoments:
    """Running mean and standard deviation of all values so far, computed in a numerically stable way."""

    count: int = 0
    """Number of values so far."""
    mean: float = 0.0
    squared_deviations: float = 0.0
    """Sum of (value - mean)^2 over all values so far."""

    @property
    def deviation(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return math.sqrt(self.squared_deviations / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Tensor) -> None:
        """Add a batch of values of any shape (Chan, Golub and LeVeque 1979).

        ``ValueError`` if a value is not finite, because it would corrupt all later results.
        """
        flat = values.detach().double().flatten()
        if not flat.isfinite().all():
            raise ValueError("running moments take finite values only; the batch holds NaN or infinity")
        if not len(flat):
            return
        mean = float(flat.mean().clamp(flat.min(), flat.max()))
        total = self.count + len(flat)
        difference = mean - self.mean
        own = float((flat - mean).square().sum())
        self.squared_deviations += own + difference**2 * self.count * len(flat) / total
        self.mean = self.mean + difference * len(flat) / total if self.count else mean
        self.count = total

    def state_dict(self) -> dict[str, float]:
        """Return the state to checkpoint, as plain values."""
        return {"count": self.count, "mean": self.mean, "squared_deviations": self.squared_deviations}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` returned. ``ValueError`` if it is incomplete or invalid."""
        wanted = ("count", "mean", "squared_deviations")
        values = {name: state.get(name, math.nan) for name in wanted}
        if not all(map(math.isfinite, values.values())) or values["count"] < 0 or values["squared_deviations"] < 0:
            raise ValueError(f"the state of running moments needs finite {', '.join(wanted)}, not {dict(state)}")
        self.count = int(values["count"])
        self.mean = float(values["mean"])
        self.squared_deviations = float(values["squared_deviations"])


@dataclass(frozen=True)
class RewardShaping:
    """Settings of `shape_rewards`. By default, rewards are the raw scores and all samples are kept."""

    clip: float | None = None
    """Scores are clipped to [-clip, clip]; None: no clipping."""
    length_penalty: LengthPenalty | None = None
    mean: MomentsOf = "none"
    """The samples over which the mean to subtract is computed."""
    std: MomentsOf = "none"
    """The samples over which the standard deviation to divide by is computed."""
    drop_truncated: bool = False
    """True to drop responses that were truncated at the maximum length."""
    difficulty: tuple[float, float] | None = None
    """Inclusive range of a group's mean raw score; groups outside it are dropped."""
    drop_zero_variance: bool = False
    """True to drop groups whose raw scores are all equal."""
    repetition_penalty: RepetitionPenalty | None = None


@dataclass(frozen=True)
class ShapedRewards:
    """The result of `shape_rewards`."""

    rewards: Tensor
    """``[batch]``: shaped rewards."""
    keep: Tensor
    """bool ``[batch]``: samples to train on."""
    metrics: dict[str, float]
    """Metrics of the settings in use: ``clipped_share``, ``length_penalty`` and ``repetition_penalty`` (means),
    ``running_mean``, ``running_std``, ``kept_share``."""


def shape_rewards(
    scores: Tensor,
    groups: Groups,
    lengths: Tensor,
    truncated: Tensor,
    settings: RewardShaping,
    running: RunningMoments | None = None,
    tags: Groups | None = None,
    penalties: Tensor | None = None,
    responses: Sequence[np.ndarray] | None = None,
) -> ShapedRewards:
    """Clip the scores, add penalties, normalise, and select samples by their raw scores. All tensors are ``[batch]``.

    ``lengths`` are in response tokens, ``truncated`` is bool; ``penalties`` are added to the clipped scores;
    ``responses`` are the token ids of each response, for a repetition penalty; ``tags`` are for moments by tag. Rewards
    are float64 if the scores are, else float32. If a setting is ``running``, ``running`` is first updated with this
    batch's rewards, so that it has moments for the first batch too; otherwise it is not changed. ``ValueError`` for a
    score that is not finite, or if running moments or responses are missing.
    """
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(f"the score of sample {wrong[0]} is {scores[wrong[0]].item()} ({len(wrong)} are not finite)")
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
    if settings.repetition_penalty is not None:
        found = needed(responses, "responses")
        penalty = repetition_penalty(found, settings.repetition_penalty.ngram_size, settings.repetition_penalty.weight)
        rewards = rewards + penalty
        metrics["repetition_penalty"] = _mean(penalty)
    if "running" in (settings.mean, settings.std) and running is not None:
        running.update(rewards)
        metrics |= {"running_mean": running.mean, "running_std": running.deviation}
    rewards = normalize_rewards(rewards, numbers, settings.mean, settings.std, running, tags=tags)
    keep = torch.ones_like(scores, dtype=torch.bool)
    if settings.drop_truncated:
        keep = keep & ~truncated.bool()
    if settings.difficulty is not None:
        keep = keep & difficulty_mask(scores, numbers, *settings.difficulty)
    if settings.drop_zero_variance:
        keep = keep & zero_variance_mask(scores, numbers)
    if settings.drop_truncated or settings.drop_zero_variance or settings.difficulty is not None:
        metrics["kept_share"] = _mean(keep)
    return ShapedRewards(rewards.to(result_dtype(scores)), keep, metrics)


def clip_rewards(rewards: Tensor, limit: float) -> Tensor:
    """Clip rewards (any shape) to [-limit, limit]. ``ValueError`` unless ``limit`` is above 0."""
    if not limit > 0:
        raise ValueError(f"rewards are clipped to a limit above 0, not {limit}")
    return rewards.to(result_dtype(rewards)).clamp(-limit, limit)


def normalize_rewards(
    rewards: Tensor,
    groups: Groups | None = None,
    mean: MomentsOf = "none",
    std: MomentsOf = "none",
    running: RunningMoments | None = None,
    eps: float = 1e-6,
    tags: Groups | None = None,
) -> Tensor:
    """Return (reward - mean) / (standard deviation + eps), ``[batch]``.

    ``mean`` and ``std`` name the samples over which each is computed: ``batch``, ``group``, ``tag`` (samples with equal
    ``tags``), ``running`` (from ``running``, which is not updated), or ``none`` (subtract 0, or do not divide).
    Deviations are unbiased (n - 1). If the deviation is 0 (a group of one, equal rewards), the result is exactly 0,
    whatever the mean. The result is float64 if the rewards are, else float32. ``ValueError`` for an unknown name, for
    missing running moments, groups or tags, or ``eps`` <= 0.
    """
    if not eps > 0:
        raise ValueError(f"eps must be above 0, not {eps}")
    values = rewards.detach().double()
    result = values
    if mean != "none":
        result = values - _moments(mean, values, groups, running, tags)[0]
    if std != "none":
        deviation = _moments(std, values, groups, running, tags)[1]
        result = torch.where(deviation > 0, result / (deviation + eps), torch.zeros_like(result))
    return result.to(result_dtype(rewards))


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Return 0 up to ``max_length - buffer`` tokens, decreasing linearly to -factor at ``max_length`` and beyond.

    This is the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13). ``lengths`` ``[batch]`` are in
    response tokens. Returns ``[batch]``, to be added to the reward; float64 if the lengths are, else float32.
    ``ValueError`` unless 0 < buffer <= max_length and factor >= 0.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the buffer must lie in (0, max_length = {max_length}], not be {buffer}")
    if not factor >= 0:
        raise ValueError(f"the factor of a penalty must be at least 0, not {factor}")
    excess = (lengths.double() - (max_length - buffer)) / buffer
    return (-factor * excess.clamp(0, 1)).to(result_dtype(lengths))


def relative_length_reward(lengths: Tensor, correct: Tensor, groups: Groups, weight: float = 1.0) -> Tensor:
    """Return the length reward of Kimi k1.5: shorter responses of a group get more than longer ones.

    It is weight x l for a correct response and weight x min(0, l) for a wrong one, where l = 1/2 - (length - shortest)
    / (longest - shortest) within the group, and 0 if all are equally long (arXiv 2501.12599, section 2.3.3).
    ``lengths`` (response tokens) and ``correct`` (bool) are ``[batch]``. Returns ``[batch]``, to be added to the
    reward; float64 if the lengths are, else float32. ``ValueError`` unless weight >= 0.
    """
    if not weight >= 0:
        raise ValueError(f"the weight of a penalty must be at least 0, not {weight}")
    values = lengths.double()
    shortest, longest = group_range(values, group_tensor(groups, lengths))
    span = longest - shortest
    place = torch.where(span > 0, 0.5 - (values - shortest) / span, torch.zeros_like(span))
    return (weight * torch.where(correct, place, place.clamp(max=0))).to(result_dtype(lengths))


def repetition_penalty(responses: Sequence[np.ndarray], ngram_size: int, weight: float = 1.0) -> Tensor:
    """Return -weight x (1 - distinct n-grams / n-grams) of each response; 0 for a response without any n-gram.

    ``responses`` are token ids, integer arrays ``[tokens]``. Returns float64 ``[batch]``, to be added to the reward.
    The formula is open-r1's (after Yeo et al., arXiv 2502.03373, who penalise the repeated tokens), but with n-grams of
    tokens instead of words, so that it works for every language. ``ValueError`` unless ngram_size >= 1 and weight >= 0.
    """
    if ngram_size < 1 or not weight >= 0:
        raise ValueError(f"a repetition penalty needs n-grams and a weight of at least 0, not {ngram_size}, {weight}")
    return torch.tensor([-weight * _repeated_share(ids, ngram_size) for ids in responses], dtype=torch.float64)


def _repeated_share(ids: np.ndarray, ngram_size: int) -> float:
    """Return the fraction of n-grams that already occurred earlier in the response."""
    total = len(ids) - ngram_size + 1
    if total < 1:
        return 0.0
    tokens = np.unique(ids, return_inverse=True)[1]
    codes, kinds = tokens, int(tokens.max()) + 1
    for length in range(2, ngram_size + 1):
        # An n-gram's code combines those of its (n-1)-gram prefix and last token. Renumbering prevents overflow.
        codes = np.unique(codes[:-1] * kinds + tokens[length - 1 :], return_inverse=True)[1]
    return 1 - (int(codes.max()) + 1) / total


def difficulty_mask(scores: Tensor, groups: Groups, low: float, high: float) -> Tensor:
    """Return a mask of the samples in groups whose mean score is in [low, high], bool ``[batch]``.

    ``ValueError`` if ``low`` is above ``high``."""
    if not low <= high:
        raise ValueError(f"the difficulty range [{low}, {high}] is empty")
    mean = group_mean(scores.detach().double(), group_tensor(groups, scores))
    return (mean >= low) & (mean <= high)


def zero_variance_mask(scores: Tensor, groups: Groups) -> Tensor:
    """Return a mask of the samples in groups with at least two different scores, bool ``[batch]``.

    A group of one has no variance."""
    lowest, highest = group_range(scores.detach(), group_tensor(groups, scores))
    return lowest < highest


def _length_penalty(scores: Tensor, groups: Tensor, lengths: Tensor, penalty: LengthPenalty) -> Tensor:
    if penalty.kind == "overlong":
        return overlong_penalty(lengths.double(), penalty.max_length, penalty.buffer, penalty.weight)
    return relative_length_reward(lengths.double(), scores > penalty.correct_above, groups, penalty.weight)


def _moments(
    of: MomentsOf, values: Tensor, groups: Groups | None, running: RunningMoments | None, tags: Groups | None
) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation to normalise each value with, ``[batch]`` each."""
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
    elif of == "group":
        if groups is None:
            raise ValueError("moments by group are asked for, but no groups are given")
        together = group_tensor(groups, values)
    else:
        together = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    return group_mean(values, together), group_deviation(values, together)


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
