"""Reward shaping against loops written from the formulas; order, degenerate groups, masks."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.rewards import (
    LengthPenalty,
    RepetitionPenalty,
    RewardShaping,
    RunningMoments,
    clip_rewards,
    difficulty_mask,
    normalize_rewards,
    overlong_penalty,
    relative_length_reward,
    repetition_penalty,
    shape_rewards,
    zero_variance_mask,
)
from tests.tiers import examples

PLACES = ("none", "batch", "group", "running")

batches = st.lists(
    st.tuples(st.integers(-1, 2), st.one_of(st.integers(0, 1), st.integers(-5000, 5000)).map(lambda n: n / 8)),
    min_size=1,
    max_size=10,
)


def tensors(data):
    groups = torch.tensor([group for group, _ in data])
    return torch.tensor([value for _, value in data], dtype=torch.float64), groups


def seen_before():
    running = RunningMoments()
    running.update(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    return running


def loop_moments(place, data, row, running):
    if place == "running":
        return running.mean, running.deviation
    members = [value for group, value in data if place == "batch" or group == data[row][0]]
    return statistics.fmean(members), statistics.stdev(members) if len(set(members)) > 1 else 0.0


@pytest.mark.parametrize("mean", PLACES)
@pytest.mark.parametrize("std", PLACES)
@settings(max_examples=examples(50))
@given(data=batches)
def test_mean_and_deviation_each_come_from_their_own_place(mean, std, data):
    rewards, groups = tensors(data)
    before, running = rewards.clone(), seen_before()
    result = normalize_rewards(rewards, groups, mean, std, running, eps=1e-3)
    assert result.shape == rewards.shape and result.dtype == torch.float64 and result.isfinite().all()
    for row, (_, value) in enumerate(data):
        expected = value - (0.0 if mean == "none" else loop_moments(mean, data, row, running)[0])
        if std != "none":
            deviation = loop_moments(std, data, row, running)[1]
            expected = expected / (deviation + 1e-3) if deviation > 0 else 0.0
        assert result[row].item() == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert torch.equal(rewards, before) and running == seen_before()


@pytest.mark.parametrize("mean", ["none", "batch", "group"])
@pytest.mark.parametrize("value", [0.1, 1.0, -3.3e7, 1 / 3])
def test_a_group_of_one_and_equal_rewards_are_exactly_zero_after_scaling(mean, value):
    rewards = torch.tensor([value] * 3 + [0.7], dtype=torch.float64)
    assert normalize_rewards(rewards, [5, 5, 5, 2], mean, "group").eq(0).all()
    assert normalize_rewards(rewards[:3], [1, 2, 3], "batch", "batch").eq(0).all()
    assert normalize_rewards(rewards, [5, 5, 5, 2], "group").eq(0).all()


@settings(max_examples=examples(50))
@given(data=batches, seed=st.integers(0, 1000))
def test_order_of_samples_does_not_matter(data, seed):
    rewards, groups = tensors(data)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    for mean, std in (("group", "batch"), ("batch", "group"), ("group", "group")):
        expected = normalize_rewards(rewards, groups, mean, std)[order]
        moved = normalize_rewards(rewards[order], 9 - groups[order] * 4, mean, std)
        torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-9)


def test_unknown_places_missing_running_moments_and_wrong_eps_are_refused():
    rewards = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="unknown moments 'prompt'"):
        normalize_rewards(rewards, [0, 0], mean="prompt")
    for running in (None, RunningMoments()):
        with pytest.raises(ValueError, match="running"):
            normalize_rewards(rewards, [0, 0], std="running", running=running)
    with pytest.raises(ValueError, match="eps"):
        normalize_rewards(rewards, [0, 0], eps=0.0)
    with pytest.raises(ValueError, match="groups"):
        normalize_rewards(rewards, [0, 0, 1], mean="group")


def test_clipped_rewards_stay_within_the_limit():
    rewards = torch.tensor([-3.0, -1.0, 0.5, 3.0])
    assert clip_rewards(rewards, 1.5).tolist() == [-1.5, -1.0, 0.5, 1.5]
    assert rewards.tolist() == [-3.0, -1.0, 0.5, 3.0]
    assert clip_rewards(torch.tensor([-3, 1]), 1.5).tolist() == [-1.5, 1.0]
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="limit"):
            clip_rewards(rewards, limit)


def test_the_overlong_penalty_falls_in_a_line_within_its_buffer():
    lengths = torch.tensor([0, 80, 81, 90, 99, 100, 130], dtype=torch.float64)
    penalty = overlong_penalty(lengths, max_length=100, buffer=20, factor=2.0)
    expected = [0, 0, -2 * 1 / 20, -2 * 10 / 20, -2 * 19 / 20, -2, -2]
    assert penalty.tolist() == pytest.approx(expected, abs=1e-12)
    assert overlong_penalty(lengths.long(), 100, 20).dtype == torch.float32
    assert overlong_penalty(lengths.long(), 100, 100).tolist() == pytest.approx([0, -0.8, -0.81, -0.9, -0.99, -1, -1])


@pytest.mark.parametrize(("buffer", "factor"), [(0, 1.0), (101, 1.0), (-1, 1.0), (20, -1.0), (20, float("nan"))])
def test_an_overlong_penalty_that_cannot_be_meant_is_refused(buffer, factor):
    with pytest.raises(ValueError):
        overlong_penalty(torch.tensor([1]), 100, buffer, factor)


lengths_lists = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.booleans()), min_size=1, max_size=10)


@settings(max_examples=examples(80))
@given(data=lengths_lists, weight=st.floats(0, 3))
def test_the_relative_length_reward_compares_within_the_group(data, weight):
    groups, lengths, correct = (torch.tensor([item[i] for item in data]) for i in range(3))
    values = relative_length_reward(lengths.double(), correct, groups, weight)
    for row, (group, length, is_correct) in enumerate(data):
        peers = [other for number, other, _ in data if number == group]
        place = 0.5 - (length - min(peers)) / (max(peers) - min(peers)) if max(peers) > min(peers) else 0.0
        expected = weight * (place if is_correct else min(0.0, place))
        assert values[row].item() == pytest.approx(expected, abs=1e-10)
        assert is_correct or values[row] <= 0
    assert relative_length_reward(lengths, correct, groups).dtype == torch.float32


def test_a_negative_weight_would_reward_length_and_is_refused():
    with pytest.raises(ValueError, match="weight"):
        relative_length_reward(torch.tensor([1, 2]), torch.tensor([True, True]), [0, 0], -1.0)


def test_truncated_responses_are_left_out():
    scores, truncated = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([True, False, False])
    shaped = shape_rewards(scores, [0, 0, 0], torch.ones(3), truncated, RewardShaping(drop_truncated=True))
    assert shaped.keep.tolist() == [False, True, True]


def test_groups_outside_the_difficulty_range_are_left_out():
    scores = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.5])
    groups = [3, 3, 1, 1, 8, 8, 0]
    assert difficulty_mask(scores, groups, 0.1, 0.9).tolist() == [False, False, True, True, False, False, True]
    assert difficulty_mask(scores, groups, 0.5, 0.5).tolist() == [False, False, True, True, False, False, True]
    assert difficulty_mask(scores, groups, 0.0, 1.0).all()
    for low, high in ((0.6, 0.5), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="range"):
            difficulty_mask(scores, groups, low, high)


def test_groups_of_equal_scores_are_left_out():
    scores = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.2, 0.7])
    assert zero_variance_mask(scores, [1, 1, 1, 0, 0, 5]).tolist() == [False, False, False, True, True, False]


def shape(scores, groups, shaping, lengths=None, truncated=None, running=None):
    number = len(scores)
    return shape_rewards(
        scores,
        groups,
        torch.full((number,), 5) if lengths is None else lengths,
        torch.zeros(number, dtype=torch.bool) if truncated is None else truncated,
        shaping,
        running,
    )


def test_by_default_rewards_are_the_scores_and_nothing_is_left_out():
    scores = torch.tensor([0.0, 3.0, 3.0], dtype=torch.float64)
    shaped = shape(scores, [0, 0, 1], RewardShaping(), truncated=torch.ones(3, dtype=torch.bool))
    assert torch.equal(shaped.rewards, scores) and shaped.keep.all() and shaped.metrics == {}
    shaped.rewards.add_(1)
    assert scores.tolist() == [0.0, 3.0, 3.0]


def test_scores_are_clipped_then_penalised_then_normalised():
    scores = torch.tensor([5.0, 0.0, -9.0, 1.0], dtype=torch.float64)
    lengths, groups = torch.tensor([100, 90, 10, 10]), np.array([4, 4, 2, 2])
    penalty = LengthPenalty("overlong", weight=2.0, max_length=100, buffer=20)
    shaping = RewardShaping(clip=2.0, length_penalty=penalty, mean="group", std="batch")
    shaped = shape(scores, groups, shaping, lengths)
    before = [2.0 - 2.0, 0.0 - 1.0, -2.0, 1.0]
    means = [-0.5, -0.5, -0.5, -0.5]
    expected = [(value - mean) / (statistics.stdev(before) + 1e-6) for value, mean in zip(before, means, strict=True)]
    assert shaped.rewards.tolist() == pytest.approx(expected, abs=1e-10)
    assert shaped.metrics == {"clipped_share": 0.5, "length_penalty": -0.75}
    assert shape(scores.float(), groups, shaping, lengths).rewards.dtype == torch.float32


def test_correctness_and_masks_are_judged_by_raw_scores():
    scores = torch.tensor([2.0, 3.0, 1.0, 1.0], dtype=torch.float64)
    groups, lengths = [0, 0, 1, 1], torch.tensor([1, 3, 1, 3])
    penalty = LengthPenalty("relative", weight=1.0, correct_above=1.5)
    settings_ = RewardShaping(
        clip=1.0, length_penalty=penalty, mean="batch", difficulty=(1.0, 2.5), drop_zero_variance=True
    )
    shaped = shape(scores, groups, settings_, lengths)
    before = torch.tensor([1 + 0.5, 1 - 0.5, 1 + 0.0, 1 - 0.5], dtype=torch.float64)
    torch.testing.assert_close(shaped.rewards, before - before.mean(), rtol=1e-10, atol=1e-10)
    assert shaped.keep.tolist() == [True, True, False, False]
    assert shaped.metrics["kept_share"] == 0.5


def test_a_sample_stays_only_if_every_mask_keeps_it():
    scores = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    groups, truncated = [0, 0, 1, 1, 2, 2], torch.tensor([True, False, False, False, False, False])
    for shaping, expected in (
        (RewardShaping(drop_truncated=True), [False, True, True, True, True, True]),
        (RewardShaping(drop_zero_variance=True), [True, True, False, False, False, False]),
        (RewardShaping(difficulty=(0.2, 1.0)), [True, True, True, True, False, False]),
        (
            RewardShaping(drop_truncated=True, drop_zero_variance=True, difficulty=(0.2, 1.0)),
            [False, True, False, False, False, False],
        ),
    ):
        shaped = shape(scores, groups, shaping, truncated=truncated)
        assert shaped.keep.tolist() == expected
        assert torch.equal(shaped.rewards, scores)
        assert shaped.metrics == {"kept_share": sum(expected) / 6}


def test_running_moments_learn_the_batch_before_it_is_normalised():
    running, shaping = RewardShaping(mean="running", std="running", clip=3.0), RewardShaping(clip=3.0)
    moments = RunningMoments()
    batches_seen = [torch.tensor([1.0, 2.0, 9.0]).double(), torch.tensor([0.0, 2.0]).double()]
    for step, scores in enumerate(batches_seen):
        shaped = shape(scores, list(range(len(scores))), running, running=moments)
        seen = torch.cat(batches_seen[: step + 1]).clamp(-3, 3).tolist()
        mean, deviation = statistics.fmean(seen), statistics.stdev(seen)
        expected = [(value - mean) / (deviation + 1e-6) for value in scores.clamp(-3, 3).tolist()]
        assert shaped.rewards.tolist() == pytest.approx(expected, abs=1e-10)
        assert shaped.metrics["running_mean"] == pytest.approx(mean)
        assert shaped.metrics["running_std"] == pytest.approx(deviation)
    shape(batches_seen[0], [0, 1, 2], shaping, running=moments)
    assert moments.count == 5
    with pytest.raises(ValueError, match="running"):
        shape(batches_seen[0], [0, 1, 2], running)


def test_inputs_are_left_as_they_were():
    scores, lengths = torch.tensor([0.0, 5.0, 1.0]), torch.tensor([1, 50, 100])
    truncated, groups = torch.tensor([False, False, True]), torch.tensor([1, 1, 2])
    before = [tensor.clone() for tensor in (scores, lengths, truncated, groups)]
    penalty = LengthPenalty("overlong", max_length=100, buffer=60)
    shaping = RewardShaping(
        1.0, penalty, "running", "batch", drop_truncated=True, difficulty=(0.0, 1.0), drop_zero_variance=True
    )
    shape_rewards(scores, groups, lengths, truncated, shaping, RunningMoments())
    for tensor, old in zip((scores, lengths, truncated, groups), before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_not_finite_is_refused_before_anything_learns_it(wrong):
    moments = RunningMoments()
    with pytest.raises(ValueError, match=r"sample 2 is (nan|inf|-inf) \(1 "):
        shape(torch.tensor([0.0, 1.0, wrong]), [0, 0, 1], RewardShaping(mean="running"), running=moments)
    assert moments.count == 0


def test_an_empty_batch_is_an_empty_batch():
    penalty = LengthPenalty("relative")
    shaping = RewardShaping(1.0, penalty, "group", "batch", drop_zero_variance=True, difficulty=(0, 1))
    shaped = shape(torch.zeros(0), [], shaping)
    assert shaped.rewards.shape == (0,) and shaped.keep.shape == (0,)
    assert shaped.metrics == {"clipped_share": 0.0, "length_penalty": 0.0, "kept_share": 0.0}


def test_a_length_penalty_must_be_complete():
    with pytest.raises(ValueError, match="max_length and buffer"):
        LengthPenalty("overlong", max_length=10)
    with pytest.raises(ValueError, match="unknown length penalty 'cosine'"):
        LengthPenalty("cosine")


def loop_repetition(ids, size):
    grams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@settings(max_examples=examples(60))
@given(
    responses=st.lists(st.lists(st.sampled_from([0, 1, 2**31 - 1]), max_size=12), max_size=4), size=st.integers(1, 6)
)
def test_the_repetition_penalty_counts_ngrams_that_stood_there_before(responses, size):
    arrays = [np.array(ids, dtype=np.int32) for ids in responses]
    expected = [-0.5 * loop_repetition(ids, size) for ids in responses]
    assert repetition_penalty(arrays, size, 0.5).tolist() == pytest.approx(expected)


def test_a_loop_is_nearly_the_whole_penalty_and_long_responses_do_not_overflow():
    ids = np.tile(np.array([7, 150_000, 3], dtype=np.int32), 10_000)
    distinct = np.random.default_rng(0).permutation(30_000).astype(np.int32)
    assert repetition_penalty([ids, distinct], 20, 2.0).tolist() == pytest.approx([-2 * (1 - 3 / 29_981), 0.0])
    for wrong in ((0, 1.0), (2, -1.0)):
        with pytest.raises(ValueError, match="at least 0"):
            repetition_penalty([ids], *wrong)


def test_repetition_lowers_the_clipped_score():
    shaping = RewardShaping(clip=1.0, repetition_penalty=RepetitionPenalty(1, 0.5))
    given = (torch.tensor([3.0, 1.0]), [0, 0], torch.tensor([4, 2]), torch.zeros(2), shaping)
    shaped = shape_rewards(*given, responses=[np.array([5, 5, 5, 5]), np.array([5, 6])])
    assert shaped.rewards.tolist() == [1 - 0.5 * 0.75, 1.0]
    assert shaped.metrics["repetition_penalty"] == pytest.approx(-0.1875)
    with pytest.raises(ValueError, match="responses"):
        shape_rewards(*given)
