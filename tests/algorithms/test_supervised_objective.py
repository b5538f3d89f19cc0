"""The cross-entropy of given responses: its value, its gradient, and that only trained tokens count."""

from __future__ import annotations

import pytest
import torch

from roll.algorithms.aggregation import LOSS_AGG_MODES, aggregate
from roll.algorithms.metrics import combine
from roll.algorithms.objective import SupervisedObjective

MASK = torch.tensor([[True, True, False], [False, True, False], [False, False, False]])


def test_it_is_the_mean_over_trained_tokens_and_others_have_no_gradient():
    logprobs = torch.tensor([[-1.0, -3.0, float("nan")], [float("inf"), -5.0, -9.0], [-7.0, -7.0, -7.0]])
    logprobs.requires_grad_()
    objective = SupervisedObjective(3)
    loss, part = objective(logprobs, torch.ones(3, 3), MASK, objective.normalizers(MASK.sum(-1).tolist()), {})
    loss.backward()
    assert loss.item() == pytest.approx(3.0)
    torch.testing.assert_close(logprobs.grad, -MASK.float() / 3)
    sums, maxima = combine([part])
    metrics = part.from_vectors(sums.tolist(), maxima.tolist())
    assert metrics == pytest.approx(
        {"loss": 3.0, "cross_entropy": 3.0, "entropy": 1.0, "error_max": 5.0, "tokens": 3.0}
    )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_parts_of_a_batch_add_up_to_it(mode):
    logprobs = -torch.rand(3, 3, generator=torch.Generator().manual_seed(0))
    objective = SupervisedObjective(4, mode)
    normalizers = objective.normalizers(MASK.sum(-1).tolist())
    whole, _ = objective(logprobs, logprobs, MASK, normalizers, {})
    rows = [(logprobs[row : row + 1], MASK[row : row + 1]) for row in range(3)]
    parts = [objective(values, values, mask, normalizers, {})[0] for values, mask in rows]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(whole, aggregate(-logprobs, MASK, mode, normalizers))


def test_a_loss_mask_takes_tokens_out():
    logprobs, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, True]])
    objective = SupervisedObjective(2)
    loss, _ = objective(logprobs, logprobs, mask, objective.normalizers([1]), {}, torch.tensor([[False, True]]))
    assert loss.item() == 2.0


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="unknown loss_agg_mode"):
        SupervisedObjective(2, "mean")
