"""Aggregation is a closed form of the whole batch, adds up over parts, and survives empty masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.aggregation import LOSS_AGG_MODES, LossNormalizers, aggregate
from tests.tiers import examples

VALUES = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
NORMALIZERS = LossNormalizers.of(MASK.sum(-1).tolist(), max_response_length=10)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (2 + 3 + 4 + 7) / 4),
        ("seq-mean-token-mean", (3 + 7) / 2),
        ("seq-mean-token-sum", (9 + 7) / 2),
        ("seq-mean-token-sum-norm", (9 + 7) / 2 / 10),
    ],
)
def test_value_is_the_closed_form_and_empty_sequences_count_nowhere(mode, expected):
    assert aggregate(VALUES, MASK, mode, NORMALIZERS).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
def test_parts_add_up_to_the_whole_in_any_order(mode, seed, cut):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.6
    normalizers = LossNormalizers.of(mask.sum(-1).tolist(), 7)
    whole = aggregate(values, mask, mode, normalizers)
    order = torch.randperm(6, generator=generator)
    parts = [aggregate(values[rows], mask[rows], mode, normalizers) for rows in (order[:cut], order[cut:])]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_no_response_token_at_all_gives_zero_and_zero_gradient(mode):
    values = torch.full((2, 3), float("nan"), requires_grad=True)
    result = aggregate(values, torch.zeros(2, 3, dtype=torch.bool), mode, LossNormalizers.of([0, 0], 4))
    result.backward()
    assert result.item() == 0.0
    assert values.grad.eq(0).all()


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="token-mean"):
        aggregate(VALUES, MASK, "mean", NORMALIZERS)
