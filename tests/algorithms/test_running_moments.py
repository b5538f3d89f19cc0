"""Moments of groups and of everything seen so far, against the whole data at once."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages.shared import (
    group_deviation,
    group_mean,
    group_range,
    group_sizes,
    group_tensor,
)
from roll.algorithms.rewards import RunningMoments
from tests.tiers import examples

values_lists = st.lists(st.floats(-100, 100, allow_subnormal=False), max_size=30)


@settings(max_examples=examples(60))
@given(parts=st.lists(values_lists, min_size=1, max_size=6), offset=st.sampled_from([0.0, 1e4, -1e6]))
def test_batches_merge_to_the_moments_of_all_values(parts, offset):
    running = RunningMoments()
    for part in parts:
        running.update(torch.tensor(part, dtype=torch.float64) + offset)
    everything = np.concatenate([np.array(part) for part in parts]) + offset
    assert running.count == len(everything)
    if len(everything):
        assert running.mean == pytest.approx(everything.mean(), rel=1e-12, abs=1e-10)
    expected = everything.std(ddof=1) if len(everything) > 1 else 0.0
    assert running.deviation == pytest.approx(expected, rel=1e-8, abs=1e-8)


def test_a_large_mean_does_not_swallow_a_small_deviation():
    values = 1e9 + np.random.default_rng(0).normal(size=4000) * 1e-2
    running = RunningMoments()
    for part in np.split(values, 40):
        running.update(torch.from_numpy(part))
    assert running.deviation == pytest.approx(statistics.stdev(values.tolist()), rel=1e-5)


def test_equal_values_have_no_deviation_at_all():
    running = RunningMoments()
    for size in (3, 7, 1, 11):
        running.update(torch.full((size,), 0.1, dtype=torch.float64))
    assert running.mean == 0.1 and running.deviation == 0.0


def test_a_single_value_and_an_empty_batch_have_no_deviation():
    running = RunningMoments()
    running.update(torch.zeros(0))
    assert running == RunningMoments() and running.deviation == 0.0
    running.update(torch.tensor([4.0]))
    assert (running.count, running.mean, running.deviation) == (1, 4.0, 0.0)
    running.update(torch.zeros(0))
    assert (running.count, running.mean) == (1, 4.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_and_leave_no_trace(wrong):
    running = RunningMoments(count=2, mean=1.0, squared_deviations=2.0)
    with pytest.raises(ValueError, match="finite"):
        running.update(torch.tensor([0.0, wrong]))
    assert running == RunningMoments(count=2, mean=1.0, squared_deviations=2.0)


def test_a_restored_state_goes_on_as_if_nothing_had_happened():
    first, second = torch.randn(20, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    straight, resumed = RunningMoments(), RunningMoments()
    straight.update(first)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    straight.update(second)
    resumed.update(second)
    assert resumed == straight and isinstance(resumed.count, int)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"count": 1, "mean": 0.0},
        {"count": -1, "mean": 0.0, "squared_deviations": 0.0},
        {"count": 1, "mean": math.nan, "squared_deviations": 0.0},
        {"count": 1, "mean": 0.0, "squared_deviations": -1.0},
    ],
)
def test_an_impossible_state_is_refused(state):
    with pytest.raises(ValueError, match="state"):
        RunningMoments().load_state_dict(state)


@settings(max_examples=examples(60))
@given(data=st.lists(st.tuples(st.integers(-2, 2), st.floats(-10, 10, allow_subnormal=False)), max_size=20))
def test_group_moments_are_those_of_the_members(data):
    groups = torch.tensor([group for group, _ in data], dtype=torch.int64)
    values = torch.tensor([value for _, value in data], dtype=torch.float64)
    weights = torch.arange(1, len(data) + 1)
    sizes, mean, deviation = group_sizes(groups), group_mean(values, groups), group_deviation(values, groups)
    weighted = group_mean(values, groups, weights)
    lowest, highest = group_range(values, groups)
    for row, (group, _) in enumerate(data):
        rows = [i for i, (other, _) in enumerate(data) if other == group]
        members = [data[i][1] for i in rows]
        assert sizes[row] == len(members)
        assert mean[row].item() == pytest.approx(sum(members) / len(members), abs=1e-10)
        expected = statistics.stdev(members) if len(members) > 1 else 0.0
        assert deviation[row].item() == pytest.approx(expected, abs=1e-10)
        by_weight = sum((i + 1) * data[i][1] for i in rows) / sum(i + 1 for i in rows)
        assert weighted[row].item() == pytest.approx(by_weight, abs=1e-10)
        assert (lowest[row], highest[row]) == (min(members), max(members))


@pytest.mark.parametrize("value", [0.1, -3.3e7, 1e-9, 1 / 3])
def test_equal_members_have_exactly_their_own_value_as_mean(value):
    values = torch.full((7,), value, dtype=torch.float64)
    groups = torch.zeros(7, dtype=torch.int64)
    assert group_mean(values, groups).eq(value).all()
    assert group_mean(values, groups, torch.tensor([3, 1, 4, 1, 5, 9, 2])).eq(value).all()
    assert group_deviation(values, groups).eq(0).all()


def test_groups_of_another_length_are_refused():
    assert group_tensor(np.array([3, 1]), torch.zeros(2)).tolist() == [3, 1]
    with pytest.raises(ValueError, match="groups"):
        group_tensor([1, 2, 3], torch.zeros(2))
