"""Advantages against plain loops; groups, masks and degenerate cases."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    estimate_advantages,
    make_advantage_estimator,
    whiten,
)
from roll.algorithms.kl import sequence_token_rewards


def random_case(seed, rows=6, width=7):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, width, generator=generator),
        torch.rand(rows, width, generator=generator) < 0.6,
        torch.randint(0, 3, (rows,), generator=generator),
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_is_the_discounted_return_over_response_tokens(gamma):
    rewards, mask, groups = random_case(0)
    values = make_advantage_estimator("reinforce", {"gamma": gamma})(rewards, mask, groups)
    for row in range(len(rewards)):
        chosen = mask[row].nonzero()[:, 0].tolist()
        for start, position in enumerate(chosen):
            expected = sum(gamma**k * rewards[row, later].item() for k, later in enumerate(chosen[start:]))
            assert values[row, position].item() == pytest.approx(expected, abs=1e-5)
    assert values[~mask].eq(0).all()


def test_a_reward_after_a_tool_answer_reaches_the_tokens_before_it():
    mask = torch.tensor([[False, True, True, False, False, True]])
    rewards = sequence_token_rewards(torch.tensor([2.0]), mask)
    values = make_advantage_estimator("reinforce")(rewards, mask, [0])
    assert values.tolist() == [[0, 2, 2, 0, 0, 2]]


@pytest.mark.parametrize("normalize", [True, False])
def test_grpo_compares_with_the_own_group(normalize):
    rewards, groups = [1.0, 5.0, 2.0, 9.0, 4.0, 3.0], [7, 3, 7, 3, 7, 3]
    mask = torch.ones(6, 2, dtype=torch.bool)
    estimator = make_advantage_estimator("grpo", {"normalize_by_std": normalize})
    values = estimator(sequence_token_rewards(torch.tensor(rewards), mask), mask, np.array(groups))
    for row, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        expected = reward - statistics.mean(peers)
        if normalize:
            expected /= statistics.stdev(peers) + 1e-6
        assert values[row].tolist() == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize("reward", [0.1, 1.0, -3.3e7, 1e-9])
def test_equal_rewards_and_groups_of_one_are_exactly_zero(reward):
    mask = torch.ones(4, 3, dtype=torch.bool)
    rewards = sequence_token_rewards(torch.tensor([reward, reward, reward, 12.0]), mask)
    assert make_advantage_estimator("grpo")(rewards, mask, [0, 0, 0, 1]).eq(0).all()


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.names())
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), fill=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_what_stands_outside_the_mask_is_never_read(name, seed, fill):
    rewards, mask, groups = random_case(seed)
    dirty = rewards.masked_fill(~mask, fill)
    before = dirty.clone()
    estimator = make_advantage_estimator(name)
    values = estimator(dirty, mask, groups)
    assert torch.equal(values, estimator(rewards, mask, groups))
    assert values[~mask].eq(0).all() and values.isfinite().all()
    assert torch.equal(dirty.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.names())
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_order_and_names_of_groups_do_not_matter(name, seed):
    rewards, mask, groups = random_case(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    estimator = make_advantage_estimator(name)
    expected = estimator(rewards, mask, groups)[order]
    torch.testing.assert_close(estimator(rewards[order], mask[order], 100 - groups[order] * 17), expected)


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_tokens():
    advantages, mask, _ = random_case(3)
    values = whiten(advantages.masked_fill(~mask, float("nan")), mask)
    tokens = values[mask].double()
    assert tokens.mean().item() == pytest.approx(0, abs=1e-6)
    assert tokens.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert values[~mask].eq(0).all()
    assert whiten(advantages, torch.zeros_like(mask)).eq(0).all()
    assert whiten(torch.full_like(advantages, 3.0), mask).abs().max() < 1e-6


def test_a_kl_penalty_lowers_the_returns_before_it():
    mask = torch.tensor([[False, True, True]])
    logprobs, reference = torch.full((1, 3), -1.0), torch.full((1, 3), -2.0)
    estimator = make_advantage_estimator("reinforce")
    values = estimate_advantages(
        estimator, torch.tensor([1.0]), mask, [0],
        logprobs=logprobs, reference_logprobs=reference, kl_coef=0.1, kl_estimator="k1",
    )
    torch.testing.assert_close(values, torch.tensor([[0.0, 0.8, 0.9]]))
    plain = estimate_advantages(estimator, torch.tensor([1.0]), mask, [0])
    assert plain.tolist() == [[0, 1, 1]]
    with pytest.raises(ValueError, match="both"):
        estimate_advantages(estimator, torch.tensor([1.0]), mask, [0], logprobs=logprobs)
