"""KL estimators follow their formulas and estimate what they claim; penalties land on the right tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.kl import KL_ESTIMATORS, kl_penalised_token_rewards, sequence_token_rewards, token_kl
from tests.tiers import examples

VALUES_AND_GRADIENTS = {
    "k1": (lambda d: d, lambda d: 1.0),
    "abs": (abs, lambda d: math.copysign(1.0, d) if d else 0.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.expm1(-d) + d, lambda d: -math.expm1(-d)),
    "k3_straight_through": (lambda d: math.expm1(-d) + d, lambda d: d),
}
ONE_TOKEN = torch.ones(1, 1, dtype=torch.bool)
POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.2, 0.25, 0.35], dtype=torch.float64)


def random_tensors(seed, rows=4, width=6):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.randn(rows, width, generator=generator, dtype=torch.float64).abs()
    reference = logprobs + torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[0] = False
    mask[1] = torch.arange(width) == width - 1
    return logprobs, reference, mask


def test_every_estimator_has_its_formula_here():
    assert set(VALUES_AND_GRADIENTS) == set(KL_ESTIMATORS)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@settings(max_examples=examples(25))
@given(seed=st.integers(0, 10_000))
def test_values_and_gradients_follow_the_formula(estimator, seed):
    logprobs, reference, mask = random_tensors(seed)
    logprobs.requires_grad_()
    values = token_kl(logprobs, reference, mask, estimator)
    values.sum().backward()
    value, gradient = VALUES_AND_GRADIENTS[estimator]
    for row in range(len(mask)):
        for position in range(mask.shape[1]):
            d = (logprobs[row, position] - reference[row, position]).item()
            inside = mask[row, position].item()
            assert values[row, position].item() == pytest.approx(value(d) if inside else 0.0, abs=1e-10)
            assert logprobs.grad[row, position].item() == pytest.approx(gradient(d) if inside else 0.0, abs=1e-10)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("d", [20.0, -20.0, 0.0])
def test_extreme_ratios_and_ties_follow_the_formula(estimator, d):
    logprobs = torch.tensor([[d]], dtype=torch.float64, requires_grad=True)
    values = token_kl(logprobs, torch.zeros(1, 1, dtype=torch.float64), ONE_TOKEN, estimator)
    values.sum().backward()
    value, gradient = VALUES_AND_GRADIENTS[estimator]
    assert values.item() == pytest.approx(value(d), rel=1e-10)
    assert logprobs.grad.item() == pytest.approx(gradient(d), rel=1e-10)


@settings(max_examples=examples(100))
@given(d=st.one_of(st.floats(-80, 80), st.floats(-1e-6, 1e-6)), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_k2_and_both_k3_are_never_negative(d, dtype):
    difference = torch.full((1, 16), d, dtype=dtype)
    mask = torch.ones(1, 16, dtype=torch.bool)
    for estimator in ("k2", "k3", "k3_straight_through"):
        assert (token_kl(difference, torch.zeros_like(difference), mask, estimator) >= 0).all()


def exact_kl(first, second):
    return (first * (first / second).log()).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_straight_through"])
def test_expectation_under_the_policy_is_the_divergence(estimator):
    everything = torch.ones(1, 4, dtype=torch.bool)
    values = token_kl(POLICY.log()[None], REFERENCE.log()[None], everything, estimator)[0]
    torch.testing.assert_close((POLICY * values).sum(), exact_kl(POLICY, REFERENCE), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_samples_is_the_divergence_within_four_sigma(estimator):
    tokens = torch.multinomial(POLICY, 100_000, replacement=True, generator=torch.Generator().manual_seed(1))[None]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    values = token_kl(POLICY.log()[tokens], REFERENCE.log()[tokens], mask, estimator)
    error = (values.mean() - exact_kl(POLICY, REFERENCE)).abs()
    assert 0 < error < 4 * values.std() / math.sqrt(values.numel())


def expected_gradient(estimator):
    """Exact expectation, over tokens of the policy, of the gradient of the estimator in the policy's logits."""
    logits = POLICY.log().clone().requires_grad_()
    everything = torch.ones(1, 4, dtype=torch.bool)
    values = token_kl(logits.log_softmax(-1)[None], REFERENCE.log()[None], everything, estimator)[0]
    return torch.autograd.grad((POLICY * values).sum(), logits)[0]


def exact_gradient(divergence):
    logits = POLICY.log().clone().requires_grad_()
    return torch.autograd.grad(divergence(logits.softmax(-1)), logits)[0]


@pytest.mark.parametrize("estimator", ["k2", "k3_straight_through"])
def test_expected_gradient_of_k2_is_that_of_the_divergence_from_the_reference(estimator):
    expected = exact_gradient(lambda policy: exact_kl(policy, REFERENCE))
    torch.testing.assert_close(expected_gradient(estimator), expected, rtol=1e-10, atol=1e-12)


def test_expected_gradient_of_k3_is_that_of_the_other_direction_and_k1_has_none():
    expected = exact_gradient(lambda policy: exact_kl(REFERENCE, policy))
    torch.testing.assert_close(expected_gradient("k3"), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)


def test_sampled_gradient_of_the_straight_through_estimator_is_unbiased_within_four_sigma():
    number = 50_000
    tokens = torch.multinomial(POLICY, number, replacement=True, generator=torch.Generator().manual_seed(2))
    logprobs = POLICY.log()[tokens].clone().requires_grad_()
    mask = torch.ones(1, number, dtype=torch.bool)
    token_kl(logprobs[None], REFERENCE.log()[tokens][None], mask, "k3_straight_through").sum().backward()
    # grad log policy(token) in the logits is onehot(token) - policy.
    gradients = logprobs.grad[:, None] * (torch.nn.functional.one_hot(tokens, 4) - POLICY)
    expected = exact_gradient(lambda policy: exact_kl(policy, REFERENCE))
    error = (gradients.mean(0) - expected).abs()
    assert (error > 0).all() and (error < 4 * gradients.std(0) / math.sqrt(number)).all()


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -float("inf")])
def test_masked_tokens_reach_neither_value_nor_gradient(estimator, fill):
    logprobs, reference, mask = random_tensors(5)
    results = []
    for one, two in ((logprobs, reference), (logprobs.masked_fill(~mask, fill), reference.masked_fill(~mask, fill))):
        leaf = one.clone().requires_grad_()
        values = token_kl(leaf, two, mask, estimator)
        values.sum().backward()
        results.append((values.detach(), leaf.grad))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and dirty[~mask].eq(0).all()


def test_half_precision_is_widened_before_the_difference():
    values = token_kl(torch.full((1, 1), -1.0).bfloat16(), torch.full((1, 1), -300.0).bfloat16(), ONE_TOKEN, "k3")
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.item(), math.exp(-299) - 1 + 299, rtol=1e-6, atol=0)


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k1, abs, k2, k3, k3_straight_through"):
        token_kl(torch.zeros(1, 1), torch.zeros(1, 1), ONE_TOKEN, "k4")


def test_reward_sits_on_the_last_response_token_and_the_penalty_on_each():
    mask = torch.tensor([[False, True, True, False, True, False], [False, True, False, False, False, False]])
    logprobs = torch.where(mask, -1.0, float("nan"))
    reference = torch.where(mask, -1.5, float("nan"))
    rewards = torch.tensor([2.0, 3.0])
    values = kl_penalised_token_rewards(rewards, logprobs, reference, mask, kl_coef=0.1, estimator="k1")
    expected = torch.tensor([[0, -0.05, -0.05, 0, 1.95, 0], [0, 2.95, 0, 0, 0, 0]])
    torch.testing.assert_close(values, expected)
    assert rewards.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_every_estimator_makes_a_penalty_without_gradient(estimator):
    logprobs, reference, mask = random_tensors(6)
    logprobs.requires_grad_()
    rewards = torch.arange(4, dtype=torch.float64)
    values = kl_penalised_token_rewards(rewards, logprobs, reference, mask, 0.3, estimator)
    placed = sequence_token_rewards(rewards, mask)
    expected = placed - 0.3 * token_kl(logprobs.detach(), reference, mask, estimator)
    assert not values.requires_grad and values.dtype == torch.float64
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
    assert placed.sum(-1).tolist() == [0.0, 1.0, 2.0, 3.0] and placed[1, -1] == 1.0


def test_a_sequence_without_response_gets_no_reward():
    mask = torch.zeros(1, 3, dtype=torch.bool)
    values = kl_penalised_token_rewards(torch.tensor([5.0]), torch.zeros(1, 3), torch.zeros(1, 3), mask, 0.1)
    assert values.eq(0).all()


@pytest.mark.parametrize(("given_dtype", "dtype"), [(torch.int64, torch.float32), (torch.float64, torch.float64)])
def test_rewards_keep_double_precision_and_are_never_narrower_than_float32(given_dtype, dtype):
    assert sequence_token_rewards(torch.ones(1, dtype=given_dtype), ONE_TOKEN).dtype == dtype
