"""The value loss against a loop written from its formula, in float64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.aggregation import LossNormalizers, aggregate
from roll.algorithms.objective import value_loss
from tests.tiers import examples

ROWS, WIDTH = 5, 7


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.6
    mask[0] = False
    mask[1] = torch.arange(WIDTH) == 3
    old = draw()
    return {"values": old + 0.4 * draw(), "old_values": old, "returns": draw(), "response_mask": mask}


def token_value_gradient_and_cut(value, old, target, clip):
    plain, gradient = (value - target) ** 2 / 2, value - target
    if clip is None:
        return plain, gradient, 0.0
    clipped = (min(max(value, old - clip), old + clip) - target) ** 2 / 2
    return (clipped, 0.0, 1.0) if clipped > plain else (plain, gradient, 0.0)


def evaluate(tensors, clip):
    values = tensors["values"].clone().requires_grad_()
    losses, metrics = value_loss(**tensors | {"values": values}, clip=clip)
    losses.sum().backward()
    return losses.detach(), values.grad, metrics["clip_fraction"]


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
@settings(max_examples=examples(30))
@given(seed=st.integers(0, 10_000))
def test_values_and_gradients_follow_the_formula(clip, seed):
    tensors = random_tensors(seed)
    losses, gradient, cut = evaluate(tensors, clip)
    for row in range(ROWS):
        for position in range(WIDTH):
            expected = (0.0, 0.0, 0.0)
            if tensors["response_mask"][row, position]:
                numbers = [tensors[name][row, position].item() for name in ("values", "old_values", "returns")]
                expected = token_value_gradient_and_cut(*numbers, clip)
            found = [tensor[row, position].item() for tensor in (losses, gradient, cut)]
            assert found == pytest.approx(expected, abs=1e-10)


def test_only_a_value_that_moved_too_far_towards_its_return_loses_its_gradient():
    values = torch.tensor([[0.5, -0.5, 0.1, 0.5]], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([[1.0, 1.0, 1.0, 0.35]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    losses, metrics = value_loss(values, torch.zeros(1, 4, dtype=torch.float64), returns, mask, clip=0.2)
    losses.sum().backward()
    assert losses[0].tolist() == pytest.approx([0.32, 1.125, 0.405, 0.01125], abs=1e-12)
    assert values.grad[0].tolist() == pytest.approx([0.0, -1.5, -0.9, 0.15], abs=1e-12)
    assert metrics["clip_fraction"].tolist() == [[1, 0, 0, 0]]


def test_a_tie_keeps_its_whole_gradient():
    values = torch.tensor([[0.75]], dtype=torch.float64, requires_grad=True)
    everything, old, returns = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1), torch.tensor([[0.5]])
    value_loss(values, old, returns, everything, clip=0.25)[0].sum().backward()
    assert values.grad.item() == 0.25


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
def test_what_stands_outside_the_mask_is_never_read(clip, fill):
    tensors = random_tensors(3)
    mask = tensors["response_mask"]
    dirty = {name: tensor.masked_fill(~mask, fill) for name, tensor in tensors.items() if name != "response_mask"}
    before = {name: tensor.clone() for name, tensor in dirty.items()}
    results = evaluate(dirty | {"response_mask": mask}, clip)
    assert all(torch.equal(found, expected) for found, expected in zip(results, evaluate(tensors, clip), strict=True))
    assert all(torch.equal(dirty[name].nan_to_num(7.0), before[name].nan_to_num(7.0)) for name in dirty)
    assert all(result[~mask].eq(0).all() for result in results)


def test_targets_get_no_gradient():
    tensors = random_tensors(4)
    leaves = {name: tensors[name].requires_grad_() for name in ("values", "old_values", "returns")}
    value_loss(**tensors, clip=0.2)[0].sum().backward()
    assert leaves["values"].grad.abs().sum() > 0
    assert leaves["old_values"].grad is None and leaves["returns"].grad is None


@settings(max_examples=examples(50))
@given(seed=st.integers(0, 10_000), cut=st.integers(1, ROWS - 1))
def test_parts_in_any_order_add_up_to_the_whole(seed, cut):
    tensors = random_tensors(seed)
    normalizers = LossNormalizers.of(tensors["response_mask"].sum(-1).tolist(), WIDTH)

    def total(rows):
        part = {name: tensor[rows] for name, tensor in tensors.items()}
        return aggregate(value_loss(**part, clip=0.2)[0], part["response_mask"], "token-mean", normalizers)

    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    whole = total(torch.arange(ROWS))
    assert (total(order[:cut]) + total(order[cut:])).item() == pytest.approx(whole.item(), rel=1e-6, abs=1e-12)


def test_half_precision_is_widened():
    value = torch.zeros(1, 2, dtype=torch.bfloat16)
    losses, metrics = value_loss(value, value, value + 1, torch.ones(1, 2, dtype=torch.bool))
    assert losses.dtype == metrics["clip_fraction"].dtype == torch.float32 and losses.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("clip", [0.0, -0.1, math.nan])
def test_a_clip_that_is_not_positive_is_refused(clip):
    with pytest.raises(ValueError, match="above 0"):
        value_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), clip)
