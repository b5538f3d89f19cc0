"""The expected gradient of each baseline on a softmax bandit, by enumeration and by Monte Carlo."""

from __future__ import annotations

import itertools

import pytest
import torch

from roll.algorithms.advantages.base import make_advantage_estimator
from roll.algorithms.kl import sequence_token_rewards

LOGITS = torch.tensor([0.4, -0.3, 0.9], dtype=torch.float64)
REWARDS = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
POLICY = LOGITS.softmax(0)
SCORES = torch.eye(3, dtype=torch.float64) - POLICY
"""Gradient of the log-probability of each arm with respect to the logits, ``[arm, logit]``."""
TRUE_GRADIENT = POLICY @ (REWARDS[:, None] * SCORES)
EQUAL_LENGTHS = (1, 1, 1)
OWN_SHARE = {"rloo": 0, "remax": 0, "reinforce": 0, "opo": 1, "grpo": 1}
"""Whether a sample is part of its own baseline: its expected gradient is then (n - 1) / n of the true one."""


def group_gradients(name, arms, lengths=EQUAL_LENGTHS, args=None):
    """Gradient of each group ``[groups, logits]``, mean over its samples, for int64 ``arms`` ``[groups, samples]``."""
    groups, size = arms.shape
    flat = arms.flatten()
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[flat][:, None]
    estimator = make_advantage_estimator(name, {"normalize_by_std": False} if name == "grpo" else args)
    advantages = estimator(
        sequence_token_rewards(REWARDS[flat], mask),
        mask,
        torch.arange(groups).repeat_interleave(size),
        baseline_rewards=REWARDS[LOGITS.argmax()].expand(len(flat)),
    )[:, 0]
    return (advantages[:, None] * SCORES[flat]).view(groups, size, 3).mean(1)


def exact_expectation(name, size, lengths=EQUAL_LENGTHS, args=None):
    """Over all groups of ``size`` samples."""
    arms = torch.tensor(list(itertools.product(range(3), repeat=size)))
    return POLICY[arms].prod(-1) @ group_gradients(name, arms, lengths, args)


@pytest.mark.parametrize("name", ["rloo", "remax", "reinforce"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("lengths", [EQUAL_LENGTHS, (1, 5, 2)])
def test_a_baseline_without_the_own_reward_is_unbiased(name, size, lengths):
    torch.testing.assert_close(exact_expectation(name, size, lengths), TRUE_GRADIENT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["opo", "grpo"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_baseline_with_the_own_reward_shrinks_the_gradient_by_its_share(name, size):
    expected = TRUE_GRADIENT * (size - 1) / size
    torch.testing.assert_close(exact_expectation(name, size), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "k"), [(3, 2), (4, 2), (4, 3)])
def test_pass_at_k_without_the_own_reward_is_the_gradient_of_the_best_of_k_but_for_the_factor_k(size, k):
    logits = LOGITS.clone().requires_grad_()
    arms = torch.tensor(list(itertools.product(range(3), repeat=k)))
    best = (logits.softmax(0)[arms].prod(-1) * REWARDS[arms].max(-1).values).sum()
    (gradient,) = torch.autograd.grad(best, logits)
    expected = exact_expectation("pass_at_k", size, args={"k": k, "baseline": "leave_one_out"})
    torch.testing.assert_close(k * expected, gradient, rtol=1e-12, atol=1e-12)


def test_the_bias_of_opo_falls_with_the_size_of_the_group():
    biases = [(exact_expectation("opo", size, (1, 5, 2)) - TRUE_GRADIENT).norm().item() * size for size in (2, 4, 8)]
    assert 0.5 < biases[2] / biases[1] < 1.5 and 0.5 < biases[1] / biases[0] < 1.5
    assert biases[0] > 1e-3


@pytest.mark.parametrize("name", sorted(OWN_SHARE))
def test_monte_carlo_gradients_meet_their_expectation(name):
    size, groups = 4, 5000
    generator = torch.Generator().manual_seed(12)
    arms = torch.multinomial(POLICY, size * groups, replacement=True, generator=generator).view(groups, size)
    gradients = group_gradients(name, arms)
    expected = TRUE_GRADIENT * (size - OWN_SHARE[name]) / size
    sigma = gradients.std(0) / groups**0.5
    assert ((gradients.mean(0) - expected).abs() < 4 * sigma).all()
    assert (expected.abs() > 8 * sigma).any()


def test_opo_has_the_baseline_of_least_length_weighted_variance():
    lengths, arms = torch.tensor([1, 5, 2]), torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    mask = torch.arange(5)[None, :] < lengths[arms][:, None]
    rewards = REWARDS[arms]
    advantages = make_advantage_estimator("opo")(sequence_token_rewards(rewards, mask), mask, [0] * 10)[:, 0]
    baselines = rewards - advantages
    torch.testing.assert_close(baselines, baselines[:1].expand(10))

    def spread(baseline):
        return (lengths[arms] * (rewards - baseline).square()).sum().item()

    best = spread(baselines[0])
    assert best < min(spread(baselines[0] + 0.01), spread(baselines[0] - 0.01), spread(rewards.mean()))
