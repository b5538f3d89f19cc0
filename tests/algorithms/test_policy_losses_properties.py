"""What must hold of every policy loss: masks, splits, order, old policies, on-policy gradients, bounds."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.aggregation import LOSS_AGG_MODES, LossNormalizers, aggregate
from roll.algorithms.losses.base import PolicyInputs, make_policy_loss
from tests.algorithms.policy_loss_reference import CASES, random_inputs
from tests.tiers import examples

LOSSES = {label: (name, args) for label, (name, args, _) in CASES.items()}
ROWS = 5
TENSORS = ("logprobs", "behaviour_logprobs", "advantages", "proximal_logprobs")
OLD_POLICIES = st.sampled_from(["behaviour", "proximal"])
SEEDS = st.integers(0, 10_000)
some = settings(max_examples=examples(12))
"""Examples for each loss; there are enough losses for some hundred of them."""


def select(inputs, rows):
    tensors = (*TENSORS, "response_mask", "scores", "selected")
    return replace(inputs, **{name: getattr(inputs, name)[rows] for name in tensors})


def evaluate(label, inputs):
    """Losses, gradient of their sum, and clip fractions."""
    name, args = LOSSES[label]
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    losses, metrics = make_policy_loss(name, args)(replace(inputs, logprobs=logprobs))
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses.detach(), gradient, metrics["clip_fraction"]


@pytest.mark.parametrize("label", LOSSES)
@some
@given(seed=SEEDS, old_policy=OLD_POLICIES, fill=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_what_stands_outside_the_mask_is_never_read(label, seed, old_policy, fill):
    clean = random_inputs(seed, old_policy=old_policy)
    outside = ~clean.response_mask
    empty = outside.all(-1)
    dirty = replace(clean, **{name: getattr(clean, name).masked_fill(outside, fill) for name in TENSORS})
    dirty = replace(dirty, scores=clean.scores.masked_fill(empty, fill), selected=clean.selected | outside)
    for left, right in zip(evaluate(label, clean), evaluate(label, dirty), strict=True):
        assert torch.equal(left, right)
        assert left[outside].eq(0).all()


@pytest.mark.parametrize("label", LOSSES)
@some
@given(seed=SEEDS, order=st.permutations(range(ROWS)))
def test_permuting_samples_permutes_results(label, seed, order):
    inputs = random_inputs(seed, ROWS)
    for left, right in zip(evaluate(label, inputs), evaluate(label, select(inputs, order)), strict=True):
        torch.testing.assert_close(left[order], right, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("label", LOSSES)
@some
@given(
    seed=SEEDS,
    parts=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS),
    mode=st.sampled_from(LOSS_AGG_MODES),
    pad=st.integers(0, 3),
)
def test_micro_batches_of_any_padding_add_up_to_the_whole(label, seed, parts, mode, pad):
    inputs = random_inputs(seed, ROWS)
    name, args = LOSSES[label]
    loss, normalizers = make_policy_loss(name, args), LossNormalizers.of(inputs.response_mask.sum(-1).tolist(), 9)

    def total(piece):
        logprobs = piece.logprobs.clone().requires_grad_()
        losses, _ = loss(replace(piece, logprobs=logprobs))
        value = aggregate(losses, piece.response_mask, mode, normalizers)
        return value.item(), torch.autograd.grad(value, logprobs)[0]

    whole, whole_gradient = total(inputs)
    added = 0.0
    for part in set(parts):
        rows = [row for row in range(ROWS) if parts[row] == part]
        piece = select(inputs, rows)
        wider = {field: torch.nn.functional.pad(getattr(piece, field), (pad, part)) for field in TENSORS}
        wider["selected"] = torch.nn.functional.pad(piece.selected, (pad, part), value=True)
        wider["response_mask"] = torch.nn.functional.pad(piece.response_mask, (pad, part))
        value, gradient = total(replace(piece, **wider))
        added += value
        width = inputs.logprobs.shape[1]
        torch.testing.assert_close(gradient[:, pad : pad + width], whole_gradient[rows], rtol=1e-12, atol=1e-14)
    assert added == pytest.approx(whole, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("label", LOSSES)
@some
@given(seed=SEEDS, old_policy=OLD_POLICIES)
def test_inputs_are_never_changed_in_place(label, seed, old_policy):
    inputs = random_inputs(seed, old_policy=old_policy)
    before = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    copies = {name: value.clone() for name, value in before.items() if isinstance(value, torch.Tensor)}
    evaluate(label, inputs)
    for name, copy in copies.items():
        assert getattr(inputs, name) is before[name] and torch.equal(before[name], copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("label", LOSSES)
def test_results_have_the_precision_of_the_inputs(label, dtype):
    inputs = random_inputs(2)
    cast = {name: getattr(inputs, name).to(dtype) for name in (*TENSORS, "scores")}
    for result in evaluate(label, replace(inputs, **cast)):
        assert result.dtype == dtype


def on_policy(seed, old_policy, uniform):
    """Inputs whose three policies agree wherever the old_policy looks, and advantages of either sign."""
    inputs = random_inputs(seed, old_policy=old_policy)
    advantages = inputs.advantages[:, :1].expand_as(inputs.advantages) if uniform else inputs.advantages
    current, selected = inputs.logprobs, torch.zeros_like(inputs.selected)
    return replace(
        inputs, behaviour_logprobs=current, proximal_logprobs=current, advantages=advantages, selected=selected
    )


@pytest.mark.parametrize("label", [label for label in LOSSES if not label.startswith(("gmpo", "topr knobs"))])
@some
@given(seed=SEEDS, old_policy=OLD_POLICIES)
def test_on_policy_every_token_has_the_gradient_of_vanilla(label, seed, old_policy):
    inputs = on_policy(seed, old_policy, uniform=False)
    _, gradient, changed = evaluate(label, inputs)
    torch.testing.assert_close(gradient, evaluate("vanilla", inputs)[1], rtol=1e-12, atol=1e-14)
    assert changed.eq(0).all()


@pytest.mark.parametrize("label", ["gmpo", "gmpo narrow", "gspo", "kimi15 sequence"])
@some
@given(seed=SEEDS, old_policy=OLD_POLICIES)
def test_on_policy_sequence_losses_have_the_aggregated_gradient_of_vanilla(label, seed, old_policy):
    inputs = on_policy(seed, old_policy, uniform=True)
    normalizers = LossNormalizers.of(inputs.response_mask.sum(-1).tolist(), 9)
    gradients = []
    for name, args in (LOSSES["vanilla"], LOSSES[label]):
        logprobs = inputs.logprobs.clone().requires_grad_()
        losses, _ = make_policy_loss(name, args)(replace(inputs, logprobs=logprobs))
        value = aggregate(losses, inputs.response_mask, "seq-mean-token-mean", normalizers)
        gradients.append(torch.autograd.grad(value, logprobs)[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-9)


def test_with_a_proximal_anchor_the_behaviour_policy_does_not_matter_and_the_other_way_round():
    proximal = random_inputs(8, old_policy="proximal")
    behaviour = replace(proximal, old_policy="behaviour")
    elsewhere = proximal.behaviour_logprobs - 1.0
    for label, (name, _) in LOSSES.items():
        traits = make_policy_loss(name).requirements
        if traits.needs_proximal:
            continue
        against_proximal = evaluate(label, proximal)
        swapped = replace(behaviour, behaviour_logprobs=proximal.proximal_logprobs, proximal_logprobs=None)
        moved = replace(proximal, behaviour_logprobs=elsewhere)
        for same in (evaluate(label, swapped), evaluate(label, moved)):
            assert all(torch.equal(left, right) for left, right in zip(against_proximal, same, strict=True))
        assert torch.equal(against_proximal[1], evaluate(label, behaviour)[1]) != traits.uses_old_policy
    torch.testing.assert_close(proximal.ratio(), (proximal.logprobs - proximal.proximal_logprobs).exp(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "bounded", "free"),
    [
        ("tis", {"upper": 0.8}, {"upper": math.inf}),
        ("tis", {"upper": 1.0}, {"upper": 1.5}),
        ("cispo", {"epsilon_high": 0.1}, {"epsilon_high": 1e9}),
        ("cispo", {"use_unified_mask": True, "epsilon_low": 0.1}, {"epsilon_low": 0.1}),
        ("decoupled_ppo", {"behaviour_weight_cap": 0.9}, {}),
        ("dppo", {"ratio_cap": 1.1}, {}),
        ("dppo", {"threshold": 0.01}, {"threshold": 0.9}),
        ("topr", {"level": "sequence"}, {"level": "sequence", "positive_above": -math.inf}),
    ],
)  # fmt: skip
@some
@given(seed=SEEDS)
def test_a_bound_never_raises_a_weight(name, bounded, free, seed):
    inputs = random_inputs(seed)
    gradients = []
    for args in (bounded, free):
        logprobs = inputs.logprobs.clone().requires_grad_()
        gradients.append(
            torch.autograd.grad(make_policy_loss(name, args)(replace(inputs, logprobs=logprobs))[0].sum(), logprobs)[0]
        )
    assert (gradients[0].abs() <= gradients[1].abs() * (1 + 1e-12)).all()
    assert (gradients[0] * gradients[1] >= 0).all()


SAMPLES = 40_000


def expected_and_estimated_gradient(name, args):
    """Exact on-policy gradient with respect to the logits of five actions; its estimate from another policy's samples
    with one standard deviation."""
    logits = torch.tensor([0.3, -0.8, 1.1, 0.0, -0.4], dtype=torch.float64)
    behaviour = torch.tensor([0.15, 0.25, 0.2, 0.1, 0.3], dtype=torch.float64)
    values = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)
    policy = logits.softmax(0)
    scores = torch.eye(5, dtype=torch.float64) - policy
    exact = -(policy * values) @ scores
    actions = torch.multinomial(behaviour, SAMPLES, True, generator=torch.Generator().manual_seed(3))
    logprobs = policy.log()[actions][:, None].requires_grad_()
    inputs = PolicyInputs(
        logprobs,
        behaviour.log()[actions][:, None],
        values[actions][:, None],
        torch.ones(SAMPLES, 1, dtype=torch.bool),
        proximal_logprobs=logprobs.detach(),
        scores=values[actions],
    )
    losses, _ = make_policy_loss(name, args)(inputs)
    per_sample = torch.autograd.grad(losses.sum(), logprobs)[0] * scores[actions]
    return exact, per_sample.mean(0), per_sample.std(0) / math.sqrt(SAMPLES)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("tis", {"upper": math.inf}),
        ("cispo", {"epsilon_high": 1e9}),
        ("ppo", {"clip_low": 1.0, "clip_high": 1e9}),
        ("decoupled_ppo", {}),
        ("dppo", {"divergence": "kl", "threshold": 1e9}),
    ],
)
def test_without_bounds_the_expected_gradient_is_that_of_the_policy_itself(name, args):
    exact, estimate, deviation = expected_and_estimated_gradient(name, args)
    assert ((estimate - exact).abs() < 4 * deviation).all()


@pytest.mark.parametrize(("name", "args"), [("vanilla", {}), ("tis", {"upper": 1.0}), ("tis", {"upper": 1.5})])
def test_without_the_whole_weight_the_expected_gradient_is_biased(name, args):
    exact, estimate, deviation = expected_and_estimated_gradient(name, args)
    assert ((estimate - exact).abs() > 8 * deviation).any()
