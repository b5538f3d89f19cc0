"""KL estimators follow their formulas and estimate what they claim; penalties land on the right tokens."""

from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms.kl import KL_ESTIMATORS, kl_penalised_token_rewards, token_kl


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(-d) - 1 + d)],
)
def test_each_token_follows_the_formula(estimator, formula):
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
    reference = torch.tensor([[-1.5, -0.25, -0.5]], dtype=torch.float64)
    values = token_kl(logprobs, reference, torch.ones(1, 3, dtype=torch.bool), estimator)
    expected = [formula(p - r) for p, r in zip(logprobs[0].tolist(), reference[0].tolist(), strict=True)]
    assert values[0].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_under_the_policy_is_the_divergence(estimator):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    everything = torch.ones(1, 3, dtype=torch.bool)
    values = token_kl(policy.log()[None], reference.log()[None], everything, estimator)[0]
    divergence = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * values).sum(), divergence)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -float("inf")])
def test_masked_tokens_reach_neither_value_nor_gradient(estimator, fill):
    mask = torch.tensor([[True, False]])
    logprobs = torch.tensor([[-1.0, fill]], requires_grad=True)
    values = token_kl(logprobs, torch.tensor([[-2.0, fill]]), mask, estimator)
    values.sum().backward()
    assert values[0, 1] == 0 and logprobs.grad[0, 1] == 0
    assert values.isfinite().all() and logprobs.grad.isfinite().all()


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        token_kl(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "k4")


def test_reward_sits_on_the_last_response_token_and_the_penalty_on_each():
    mask = torch.tensor([[False, True, True, False, True, False], [False, True, False, False, False, False]])
    logprobs = torch.where(mask, -1.0, float("nan"))
    reference = torch.where(mask, -1.5, float("nan"))
    rewards = torch.tensor([2.0, 3.0])
    values = kl_penalised_token_rewards(rewards, logprobs, reference, mask, kl_coef=0.1, estimator="k1")
    expected = torch.tensor([[0, -0.05, -0.05, 0, 1.95, 0], [0, 2.95, 0, 0, 0, 0]])
    torch.testing.assert_close(values, expected)
    assert rewards.tolist() == [2.0, 3.0]


def test_a_sequence_without_response_gets_no_reward():
    mask = torch.zeros(1, 3, dtype=torch.bool)
    values = kl_penalised_token_rewards(torch.tensor([5.0]), torch.zeros(1, 3), torch.zeros(1, 3), mask, 0.1)
    assert values.eq(0).all()
