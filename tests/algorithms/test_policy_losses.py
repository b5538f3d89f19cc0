"""Each policy loss against a loop written from its formula, in float64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.policy_losses import POLICY_LOSSES, PolicyInputs, make_policy_loss


def clip(value, low, high):
    return min(max(value, low), high)


def ppo_value_and_gradient(logprob, behaviour, advantage, low=0.2, high=0.2, dual=None):
    ratio = math.exp(logprob - behaviour)
    plain, clipped = ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage
    value, gradient = (-plain, -plain) if plain <= clipped else (-clipped, 0.0)
    if dual is not None and advantage < 0 and value > -dual * advantage:
        return -dual * advantage, 0.0
    return value, gradient


def tis_value_and_gradient(logprob, behaviour, advantage, lower=0.0, upper=1.0):
    weight = clip(math.exp(logprob - behaviour), lower, upper)
    return -weight * advantage * logprob, -weight * advantage


CASES = {
    "vanilla": ("vanilla", {}, lambda p, b, a: (-a * p, -a)),
    "ppo": ("ppo", {}, ppo_value_and_gradient),
    "ppo asymmetric": (
        "ppo", {"clip_low": 0.1, "clip_high": 0.4}, lambda p, b, a: ppo_value_and_gradient(p, b, a, 0.1, 0.4)
    ),
    "ppo dual clip": ("ppo", {"dual_clip": 2.0}, lambda p, b, a: ppo_value_and_gradient(p, b, a, dual=2.0)),
    "tis": ("tis", {}, tis_value_and_gradient),
    "tis bounds": (
        "tis", {"lower": 0.5, "upper": 2.0}, lambda p, b, a: tis_value_and_gradient(p, b, a, 0.5, 2.0)
    ),
}


def random_inputs(seed, rows=4, width=6):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    behaviour = -draw().abs()
    return PolicyInputs(
        logprobs=behaviour + draw() * 0.8,
        behaviour_logprobs=behaviour,
        advantages=draw(),
        response_mask=torch.rand(rows, width, generator=generator) < 0.7,
    )


def with_gradient(inputs):
    return PolicyInputs(
        inputs.logprobs.clone().requires_grad_(), inputs.behaviour_logprobs, inputs.advantages, inputs.response_mask
    )


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_follow_the_formula(case):
    name, args, formula = CASES[case]
    inputs = with_gradient(random_inputs(1, 8, 16))
    losses, _ = make_policy_loss(name, args)(inputs)
    losses.sum().backward()
    for row, column in torch.cartesian_prod(torch.arange(8), torch.arange(16)).tolist():
        value, gradient = 0.0, 0.0
        if inputs.response_mask[row, column]:
            value, gradient = formula(
                inputs.logprobs[row, column].item(),
                inputs.behaviour_logprobs[row, column].item(),
                inputs.advantages[row, column].item(),
            )
        assert losses[row, column].item() == pytest.approx(value, abs=1e-12)
        assert inputs.logprobs.grad[row, column].item() == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), fill=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]))
def test_what_stands_outside_the_mask_is_never_read(name, seed, fill):
    clean = with_gradient(random_inputs(seed))
    mask = clean.response_mask
    dirty = with_gradient(
        PolicyInputs(*(values.detach().masked_fill(~mask, fill) for values in
                       (clean.logprobs, clean.behaviour_logprobs, clean.advantages)), mask)
    )
    loss = make_policy_loss(name)
    results = []
    for inputs in (clean, dirty):
        losses, metrics = loss(inputs)
        losses.sum().backward()
        results.append((losses.detach(), inputs.logprobs.grad, metrics["clip_fraction"]))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
        assert left[~mask].eq(0).all()


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_rows_are_independent_of_each_other_and_of_their_order(name):
    inputs = random_inputs(5)
    order = torch.tensor([2, 0, 3, 1])
    loss = make_policy_loss(name)
    whole, _ = loss(inputs)
    permuted, _ = loss(PolicyInputs(*(values[order] for values in (
        inputs.logprobs, inputs.behaviour_logprobs, inputs.advantages, inputs.response_mask))))
    assert torch.equal(whole[order], permuted)


def test_on_policy_ppo_and_tis_have_the_gradient_of_vanilla():
    inputs = random_inputs(7)
    gradients = []
    for name in ("vanilla", "ppo", "tis"):
        logprobs = inputs.behaviour_logprobs.clone().requires_grad_()
        on_policy = PolicyInputs(logprobs, inputs.behaviour_logprobs, inputs.advantages, inputs.response_mask)
        make_policy_loss(name)(on_policy)[0].sum().backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


def test_clip_fraction_marks_the_tokens_that_were_corrected():
    ratio = torch.tensor([[0.5, 0.5, 1.0, 1.5, 1.5]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, 1.0, 1.0, -1.0]], dtype=torch.float64)
    inputs = PolicyInputs(ratio.log(), torch.zeros_like(ratio), advantages, torch.ones(1, 5, dtype=torch.bool))
    assert make_policy_loss("ppo")(inputs)[1]["clip_fraction"].tolist() == [[0, 1, 0, 1, 0]]
    assert make_policy_loss("tis")(inputs)[1]["clip_fraction"].tolist() == [[0, 0, 0, 1, 1]]
    dual = make_policy_loss("ppo", {"dual_clip": 1.2})
    assert dual(inputs)[1]["clip_fraction"].tolist() == [[0, 1, 0, 1, 1]]
