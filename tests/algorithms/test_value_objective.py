"""The critic's objective: a masked squared error that any split of the batch adds up to."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.aggregation import LOSS_AGG_MODES
from roll.algorithms.metrics import combine, mean_over_updates
from roll.algorithms.objective import ValueObjective
from tests.tiers import examples


def make_part(seed, rows=3, width=5):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.6

    def fill():
        return torch.where(mask, torch.randn(rows, width, generator=generator), math.nan)

    return mask, {"old_values": fill(), "returns": fill()}, fill()


def run(objective, parts):
    """Loss, gradients and metrics of a batch that comes in these parts."""
    lengths = [int(count) for mask, _, _ in parts for count in mask.sum(-1)]
    normalizers = objective.normalizers(lengths)
    losses, metrics, gradients = [], [], []
    for mask, fields, values in parts:
        leaf = values.clone().requires_grad_()
        loss, found = objective(leaf, mask, normalizers, fields)
        loss.backward()
        losses.append(loss.detach())
        metrics.append(found)
        gradients.append(leaf.grad)
    sums, maxima = combine(metrics)
    return sum(losses), torch.cat(gradients), metrics[0].from_vectors(sums.tolist(), maxima.tolist())


@settings(max_examples=examples(40))
@given(st.sampled_from(LOSS_AGG_MODES), st.none() | st.floats(0.05, 2.0), st.integers(0, 1000))
def test_parts_add_up_to_the_whole(mode, clip, seed):
    parts = [make_part(seed + number) for number in range(3)]
    whole = [
        (
            torch.cat([mask for mask, _, _ in parts]),
            {name: torch.cat([fields[name] for _, fields, _ in parts]) for name in ("old_values", "returns")},
            torch.cat([values for _, _, values in parts]),
        )
    ]
    objective = ValueObjective(5, mode, clip)
    loss, gradient, metrics = run(objective, parts)
    expected_loss, expected_gradient, expected_metrics = run(objective, whole)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradient, expected_gradient)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-9)
    assert all(map(math.isfinite, metrics.values())) and gradient.isfinite().all()


def test_it_is_half_the_squared_error_over_tokens():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    fields = {"old_values": torch.zeros(2, 3), "returns": torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])}
    loss, gradient, metrics = run(ValueObjective(3), [(mask, fields, torch.tensor([[0.0, 1.0, 5.0], [1.0, 5.0, 5.0]]))])
    assert loss.item() == pytest.approx((1 + 1 + 4) / 2 / 3)
    torch.testing.assert_close(gradient, torch.tensor([[-1 / 3, -1 / 3, 0.0], [-2 / 3, 0.0, 0.0]]))
    assert metrics["value"] == pytest.approx(2 / 3) and metrics["return"] == 2.0 and metrics["error_max"] == 2.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 2.0, 4.0], 1.0), ([7 / 3] * 3, 0.0), ([0.0, 0.0, 0.0], 0.0), ([-1.0, -2.0, -4.0], -3.0)],
)
def test_explained_variance_is_what_statisticians_mean(values, expected):
    mask = torch.ones(1, 3, dtype=torch.bool)
    fields = {"old_values": torch.zeros(1, 3), "returns": torch.tensor([[1.0, 2.0, 4.0]])}
    _, _, metrics = run(ValueObjective(3), [(mask, fields, torch.tensor([values]))])
    assert metrics["explained_variance"] == pytest.approx(expected, abs=1e-6)


def test_equal_returns_and_no_tokens_at_all_give_numbers():
    for mask in (torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.bool)):
        fields = {"old_values": torch.zeros(1, 2), "returns": torch.ones(1, 2)}
        loss, _, metrics = run(ValueObjective(2), [(mask, fields, torch.zeros(1, 2))])
        assert metrics["explained_variance"] == 0.0 and math.isfinite(loss)


def test_tokens_that_are_left_out_of_the_loss_teach_nothing():
    mask, fields, values = make_part(3)
    kept = mask & (torch.arange(5) % 2 == 0)
    leaf = values.clone().requires_grad_()
    objective = ValueObjective(5)
    objective(leaf, mask, objective.normalizers(kept.sum(-1).tolist()), fields, kept)[0].backward()
    assert (leaf.grad[~kept] == 0).all() and (leaf.grad[kept] != 0).any()


def test_wrong_settings_and_missing_fields_are_refused():
    with pytest.raises(ValueError, match="loss_agg_mode"):
        ValueObjective(5, "mean")
    with pytest.raises(ValueError, match="above 0"):
        ValueObjective(5, clip=0.0)
    mask, fields, values = make_part(0)
    del fields["returns"]
    with pytest.raises(ValueError, match="lacks returns"):
        ValueObjective(5)(values, mask, ValueObjective(5).normalizers([5, 5, 5]), fields)


def test_of_several_updates_the_largest_error_is_the_largest():
    updates = [{"error_max": 1.0, "loss": 1.0}, {"error_max": 3.0, "loss": 2.0}]
    assert mean_over_updates(updates) == {"error_max": 3.0, "loss": 1.5}
