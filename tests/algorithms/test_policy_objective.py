"""The whole objective: closed form, independence from the split, and metrics that add up exactly."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.aggregation import LOSS_AGG_MODES
from roll.algorithms.metrics import combine
from roll.algorithms.objective import PolicyObjective
from roll.algorithms.policy_losses import PolicyInputs

ROWS, WIDTH = 5, 6


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    return {
        "logprobs": -draw().abs(),
        "behaviour_logprobs": -draw().abs(),
        "advantages": draw(),
        "response_mask": torch.rand(ROWS, WIDTH, generator=generator) < 0.6,
        "entropy": draw().abs(),
        "reference_logprobs": -draw().abs(),
    }


def evaluate(objective, tensors, parts):
    """Loss, gradients and metrics when the rows are handed over in these parts."""
    leaves = {name: tensors[name].clone().requires_grad_() for name in ("logprobs", "entropy")}
    tensors = tensors | leaves
    normalizers = objective.normalizers(tensors["response_mask"].sum(-1).tolist())
    total, metrics = 0.0, []
    for rows in parts:
        part = {name: value[rows] for name, value in tensors.items()}
        entropy, reference = part.pop("entropy"), part.pop("reference_logprobs")
        loss, part_metrics = objective(PolicyInputs(**part), entropy, normalizers, reference)
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
        metrics.append(part_metrics)
    sums, maxima = combine(metrics)
    gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves.values()]
    return total, gradients, metrics[0].from_vectors(sums.tolist(), maxima.tolist())


WHOLE = [list(range(ROWS))]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), labels=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_any_split_gives_the_same_loss_gradients_and_metrics(mode, seed, labels):
    objective = PolicyObjective(9, "tis", {"upper": 2.0}, mode, use_kl_loss=True, entropy_loss_coef=0.1)
    tensors = random_tensors(seed)
    parts = [[row for row in range(ROWS) if labels[row] == label] for label in sorted(set(labels))]
    loss, gradients, metrics = evaluate(objective, tensors, WHOLE)
    split_loss, split_gradients, split_metrics = evaluate(objective, tensors, parts)
    assert split_loss == pytest.approx(loss, rel=1e-6, abs=1e-9)
    for left, right in zip(gradients, split_gradients, strict=True):
        torch.testing.assert_close(left, right)
    assert split_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)


def test_loss_is_policy_loss_plus_kl_minus_entropy():
    tensors = random_tensors(1)
    mask = tensors["response_mask"]
    objective = PolicyObjective(
        9, "vanilla", use_kl_loss=True, kl_loss_coef=0.3, kl_estimator="k2", entropy_loss_coef=0.2
    )
    loss, (logprob_gradient, entropy_gradient), metrics = evaluate(objective, tensors, WHOLE)
    tokens = mask.sum()
    difference = (tensors["logprobs"] - tensors["reference_logprobs"])[mask]
    policy = -(tensors["advantages"] * tensors["logprobs"])[mask].sum() / tokens
    kl = difference.square().sum() / 2 / tokens
    entropy = tensors["entropy"][mask].sum() / tokens
    assert loss == pytest.approx((policy + 0.3 * kl - 0.2 * entropy).item(), rel=1e-6)
    assert metrics["loss"] == pytest.approx(loss)
    assert metrics["pg_loss"] == pytest.approx(policy.item(), rel=1e-6)
    assert metrics["kl_loss"] == pytest.approx(kl.item(), rel=1e-6)
    assert metrics["entropy"] == pytest.approx(entropy.item(), rel=1e-6)
    expected = torch.where(mask, (-tensors["advantages"] + 0.3 * (tensors["logprobs"] - tensors["reference_logprobs"]))
                           / tokens, 0.0)
    torch.testing.assert_close(logprob_gradient, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(entropy_gradient, torch.where(mask, -0.2 / tokens.double(), 0.0), rtol=1e-6, atol=1e-9)


def test_ratio_metrics_follow_their_definitions():
    tensors = random_tensors(2)
    mask = tensors["response_mask"]
    _, _, metrics = evaluate(PolicyObjective(9), tensors, WHOLE)
    log_ratio = (tensors["logprobs"] - tensors["behaviour_logprobs"])[mask]
    ratio = log_ratio.exp()
    assert metrics["ratio_mean"] == pytest.approx(ratio.mean().item())
    assert metrics["ratio_max"] == pytest.approx(ratio.max().item())
    assert metrics["ess"] == pytest.approx((ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())).item())
    assert metrics["kl"] == pytest.approx((ratio - 1 - log_ratio).mean().item())


def test_on_policy_tokens_have_full_effective_sample_size_and_no_divergence():
    tensors = random_tensors(3)
    _, _, metrics = evaluate(PolicyObjective(9), tensors | {"behaviour_logprobs": tensors["logprobs"]}, WHOLE)
    assert metrics["ess"] == pytest.approx(1.0)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["clip_fraction"] == 0.0


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -float("inf")])
def test_what_stands_outside_the_mask_is_never_read(fill):
    objective = PolicyObjective(9, use_kl_loss=True, entropy_loss_coef=0.1)
    tensors = random_tensors(4)
    mask = tensors["response_mask"]
    dirty = {name: value if name == "response_mask" else value.masked_fill(~mask, fill)
             for name, value in tensors.items()}
    loss, gradients, metrics = evaluate(objective, tensors, WHOLE)
    dirty_loss, dirty_gradients, dirty_metrics = evaluate(objective, dirty, WHOLE)
    assert dirty_loss == loss and dirty_metrics == metrics
    for left, right in zip(gradients, dirty_gradients, strict=True):
        assert torch.equal(left, right)


def test_a_fully_masked_batch_is_zero_everywhere():
    tensors = random_tensors(5)
    tensors["response_mask"][:] = False
    loss, gradients, metrics = evaluate(PolicyObjective(9, use_kl_loss=True), tensors, WHOLE)
    assert loss == 0.0 and all(value == 0.0 for value in metrics.values())
    assert all(gradient.eq(0).all() for gradient in gradients)


def test_it_survives_pickling_and_refuses_what_cannot_work():
    objective = PolicyObjective(9, "tis", {"upper": 3.0})
    assert pickle.loads(pickle.dumps(objective)) == objective
    for wrong in (
        {"pg_variant": "nope"}, {"pg_variant_args": {"lower": 0.1}}, {"loss_agg_mode": "mean"},
        {"kl_estimator": "k9"}, {"max_response_length": 0},
    ):
        with pytest.raises(ValueError):
            PolicyObjective(**{"max_response_length": 9} | wrong)


def test_a_kl_loss_without_reference_is_refused():
    tensors = random_tensors(6)
    objective = PolicyObjective(9, use_kl_loss=True)
    assert objective.needs_reference and not PolicyObjective(9).needs_reference
    entropy, _ = tensors.pop("entropy"), tensors.pop("reference_logprobs")
    with pytest.raises(ValueError, match="reference"):
        objective(PolicyInputs(**tensors), entropy, objective.normalizers([1] * ROWS))
