"""The whole objective: closed form, independence from the split, and metrics that add up exactly."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.aggregation import LOSS_AGG_MODES, LossNormalizers
from roll.algorithms.correction import correct, parse_correction
from roll.algorithms.losses.base import POLICY_LOSSES, PolicyInputs
from roll.algorithms.metrics import combine, mean_over_updates
from roll.algorithms.objective import PolicyObjective
from roll.configs.errors import ConfigError
from tests.tiers import examples

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
    trained = tensors.get("loss_mask", tensors["response_mask"]) & tensors["response_mask"]
    normalizers = objective.normalizers(trained.sum(-1).tolist())
    total, metrics = 0.0, []
    for rows in parts:
        part = {name: value[rows] for name, value in tensors.items()}
        loss, part_metrics = objective(
            part.pop("logprobs"),
            part.pop("entropy"),
            part.pop("response_mask"),
            normalizers,
            part,
            part.get("loss_mask"),
        )
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
        metrics.append(part_metrics)
    sums, maxima = combine(metrics)
    gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves.values()]
    return total, gradients, metrics[0].from_vectors(sums.tolist(), maxima.tolist())


WHOLE = [list(range(ROWS))]


def assert_no_split_matters(objective, tensors, labels):
    """Rows of equal label make a part."""
    parts = [[row for row in range(ROWS) if labels[row] == label] for label in sorted(set(labels))]
    loss, gradients, metrics = evaluate(objective, tensors, WHOLE)
    split_loss, split_gradients, split_metrics = evaluate(objective, tensors, parts)
    assert split_loss == pytest.approx(loss, rel=1e-10, abs=1e-12)
    for left, right in zip(gradients, split_gradients, strict=True):
        torch.testing.assert_close(left, right)
    assert split_metrics == pytest.approx(metrics, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=examples(20))
@given(seed=st.integers(0, 10_000), labels=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_any_split_gives_the_same_loss_gradients_and_metrics(mode, seed, labels):
    objective = PolicyObjective(9, "tis", {"upper": 2.0}, mode, use_kl_loss=True, entropy_loss_coef=0.1)
    assert_no_split_matters(objective, random_tensors(seed), labels)


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
    assert loss == pytest.approx((policy + 0.3 * kl - 0.2 * entropy).item(), rel=1e-10)
    assert metrics["loss"] == pytest.approx(loss)
    assert metrics["pg_loss"] == pytest.approx(policy.item(), rel=1e-10)
    assert metrics["kl_loss"] == pytest.approx(kl.item(), rel=1e-10)
    assert metrics["entropy"] == pytest.approx(entropy.item(), rel=1e-10)
    expected = torch.where(
        mask, (-tensors["advantages"] + 0.3 * (tensors["logprobs"] - tensors["reference_logprobs"])) / tokens, 0.0
    )
    torch.testing.assert_close(logprob_gradient, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(entropy_gradient, torch.where(mask, -0.2 / tokens.double(), 0.0), rtol=1e-10, atol=1e-12)


def test_the_entropy_bonus_is_over_the_tokens_of_the_loss_and_the_metric_over_all():
    tensors = random_tensors(1)
    mask = tensors["response_mask"]
    tensors["loss_mask"] = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(7)) < 0.5
    kept = tensors["loss_mask"] & mask
    assert 0 < kept.sum() < mask.sum()
    tensors["advantages"] = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    loss, (_, gradient), metrics = evaluate(PolicyObjective(9, "vanilla", entropy_loss_coef=0.2), tensors, WHOLE)
    assert loss == pytest.approx(-0.2 * tensors["entropy"][kept].mean().item(), rel=1e-10)
    torch.testing.assert_close(gradient, torch.where(kept, -0.2 / kept.sum().double(), 0.0))
    assert metrics["entropy"] == pytest.approx(tensors["entropy"][mask].mean().item(), rel=1e-10)


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 10_000), labels=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_no_split_matters_to_weighted_samples(seed, labels):
    objective = PolicyObjective(9, "kimi15", use_kl_loss=True, entropy_loss_coef=0.1, weighted=True)
    assert_no_split_matters(objective, full_tensors(seed), labels)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_weight_multiplies_all_of_the_loss_of_a_sample_and_no_normaliser(mode):
    tensors = full_tensors(5)
    shared = {"loss_agg_mode": mode, "use_kl_loss": True, "entropy_loss_coef": 0.1}
    single = [
        tensors | {"loss_mask": tensors["loss_mask"] & (torch.arange(ROWS) == row)[:, None]} for row in range(ROWS)
    ]
    objective, weighted = PolicyObjective(9, "kimi15", **shared), PolicyObjective(9, "kimi15", weighted=True, **shared)
    whole = (tensors["loss_mask"] & tensors["response_mask"]).sum(-1).tolist()
    for each in (objective, weighted):
        each.normalizers = lambda lengths: LossNormalizers.of(whole, 9)
    expected = sum(
        weight * evaluate(objective, one, WHOLE)[0]
        for weight, one in zip(tensors["sample_weights"].tolist(), single, strict=True)
    )
    assert evaluate(weighted, tensors, WHOLE)[0] == pytest.approx(expected, rel=1e-10)
    ones = tensors | {"sample_weights": torch.ones(ROWS)}
    assert evaluate(weighted, ones, WHOLE)[0] == evaluate(objective, tensors, WHOLE)[0]


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
    dirty = {
        name: value if name == "response_mask" else value.masked_fill(~mask, fill) for name, value in tensors.items()
    }
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
        {"pg_variant": "nope"},
        {"pg_variant_args": {"lower": 0.1}},
        {"loss_agg_mode": "mean"},
        {"kl_estimator": "k9"},
        {"max_response_length": 0},
    ):
        with pytest.raises((ValueError, ConfigError)):
            PolicyObjective(**{"max_response_length": 9} | wrong)


def test_missing_fields_are_named():
    tensors = random_tensors(6)
    assert "reference_logprobs" not in PolicyObjective(9).token_fields
    objective = PolicyObjective(9, "topr", use_kl_loss=True, corrected=True, old_policy="proximal", max_lag=1)
    fields = {"behaviour_logprobs": tensors["behaviour_logprobs"]}
    with pytest.raises(ValueError) as caught:
        objective(
            tensors["logprobs"], tensors["entropy"], tensors["response_mask"], objective.normalizers([1] * ROWS), fields
        )
    for name in (
        "advantages",
        "proximal_logprobs",
        "reference_logprobs",
        "correction_weights",
        "lags",
        "scores",
    ):
        assert name in str(caught.value)


def full_tensors(seed):
    """With every field that a variant may ask for."""
    tensors = random_tensors(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    return tensors | {
        "proximal_logprobs": tensors["behaviour_logprobs"] + 0.1 * tensors["advantages"],
        "correction_weights": torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) * 2,
        "scores": torch.randint(0, 2, (ROWS,), generator=generator).double(),
        "sample_weights": 3 * torch.rand(ROWS, generator=torch.Generator().manual_seed(seed + 2)),
        "lags": torch.randint(0, 4, (ROWS, WIDTH), generator=generator),
        "selected_tokens": torch.rand(ROWS, WIDTH, generator=generator) < 0.3,
        "loss_mask": torch.rand(ROWS, WIDTH, generator=generator) < 0.7,
    }


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
@settings(max_examples=examples(10))
@given(seed=st.integers(0, 10_000), labels=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_no_variant_depends_on_the_split_whatever_is_left_of_the_batch(name, seed, labels):
    objective = PolicyObjective(9, name, old_policy="proximal", corrected=True, max_lag=2, lags_capped=True)
    assert_no_split_matters(objective, full_tensors(seed), labels)


def test_rejected_tokens_leave_numerator_and_normaliser_but_not_the_ratio_of_their_sequence():
    tensors = full_tensors(7)
    tensors["response_mask"][:] = True
    tensors["loss_mask"][:] = True
    tensors["loss_mask"][0, 2:] = False
    objective = PolicyObjective(9, "gmpo")
    loss, (gradient, _), metrics = evaluate(objective, tensors, WHOLE)
    whole = objective.policy_loss(objective_inputs(tensors))[0]
    expected = whole[tensors["loss_mask"]].sum() / tensors["loss_mask"].sum()
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    assert gradient[0, 2:].eq(0).all(), "the tokens are part of their sequence's ratio, but not moved by it"
    assert gradient[0, :2].ne(0).any()
    assert metrics["trained_share"] == pytest.approx((ROWS * WIDTH - WIDTH + 2) / (ROWS * WIDTH))


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        *((name, {}) for name in POLICY_LOSSES.names()),
        ("kimi15", {"level": "sequence"}),
        ("tis", {"level": "sequence"}),
    ],
)
def test_no_loss_moves_a_token_that_is_not_trained_on(name, knobs):
    tensors = full_tensors(10)
    tensors["response_mask"][:] = True
    objective = PolicyObjective(9, name, knobs, old_policy="proximal", use_kl_loss=True)
    _, (gradient, _), _ = evaluate(objective, tensors, WHOLE)
    assert gradient[~tensors["loss_mask"]].eq(0).all()
    assert gradient[tensors["loss_mask"]].ne(0).any()


def test_metrics_of_several_updates_are_weighted_by_what_each_has_seen():
    updates = [
        {"loss": 1.0, "ratio_max": 3.0, "lag_0/share": 0.25, "lag_0/ess": 1.0, "lag_1/share": 0.75, "lag_1/ess": 0.5},
        {"loss": 3.0, "ratio_max": 2.0, "lag_1/share": 0.25, "lag_1/ess": 0.9, "lag_2+/share": 0.75, "lag_2+/ess": 0.2},
    ]
    assert mean_over_updates(updates) == pytest.approx(
        {
            "loss": 2.0,
            "ratio_max": 3.0,
            "lag_0/share": 0.125,
            "lag_0/ess": 1.0,
            "lag_1/share": 0.5,
            "lag_1/ess": 0.6,
            "lag_2+/share": 0.375,
            "lag_2+/ess": 0.2,
        }
    )


def objective_inputs(tensors):
    names = ("logprobs", "behaviour_logprobs", "advantages", "response_mask")
    return PolicyInputs(**{name: tensors[name] for name in names})


def test_correction_weights_multiply_the_policy_loss_and_nothing_else():
    tensors = full_tensors(8)
    del tensors["loss_mask"]
    options = {"use_kl_loss": True, "kl_loss_coef": 0.5, "entropy_loss_coef": 0.2}
    _, _, plain = evaluate(PolicyObjective(9, "vanilla", **options), tensors, WHOLE)
    doubled = tensors | {"correction_weights": torch.full((ROWS, WIDTH), 2.0, dtype=torch.float64)}
    _, _, weighted = evaluate(PolicyObjective(9, "vanilla", corrected=True, **options), doubled, WHOLE)
    assert weighted["pg_loss"] == pytest.approx(2 * plain["pg_loss"])
    assert weighted["kl_loss"] == pytest.approx(plain["kl_loss"])
    assert weighted["loss"] - plain["loss"] == pytest.approx(plain["pg_loss"])


def test_metrics_are_told_apart_by_lag():
    tensors = full_tensors(9)
    _, _, metrics = evaluate(PolicyObjective(9, max_lag=2, lags_capped=True), tensors, WHOLE)
    mask, lags = tensors["response_mask"], tensors["lags"].clamp(max=2)
    log_ratio = tensors["logprobs"] - tensors["behaviour_logprobs"]
    for lag, name in ((0, "lag_0"), (1, "lag_1"), (2, "lag_2+")):
        values = log_ratio[mask & (lags == lag)]
        assert metrics[f"{name}/k3"] == pytest.approx((values.exp() - 1 - values).mean().item())
        assert metrics[f"{name}/share"] == pytest.approx(len(values) / mask.sum().item())


CORRECTION = parse_correction(
    {
        "weight": {"level": "sequence", "upper": 3.0},
        "reject": [
            {"level": "token", "divergence": "abs", "threshold": 1.2},
            {"level": "geometric", "lower": 0.6, "upper": 1.6},
            {"level": "geometric", "divergence": "k1", "threshold": 0.1, "only_negative": True},
            {"level": "segment", "lower": 0.3},
            {"level": "veto", "upper": 3.5},
        ],
    }
)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10_000), labels=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_one_pass_over_parts_of_unknown_totals_is_the_corrected_pass_over_the_batch(mode, seed, labels):
    """The whole batch: proximal log-probabilities first, then weights and rejection, then the loss of what is left."""
    shared = {"loss_agg_mode": mode, "use_kl_loss": True, "entropy_loss_coef": 0.1, "corrected": True}
    dice = torch.Generator().manual_seed(seed + 1)
    tensors = random_tensors(seed) | {"loss_mask": torch.rand(ROWS, WIDTH, generator=dice) < 0.8}
    mask, logprobs = tensors["response_mask"], tensors["logprobs"]
    result = correct(
        logprobs,
        tensors["behaviour_logprobs"],
        mask,
        CORRECTION,
        advantages=tensors["advantages"],
        trained=tensors["loss_mask"] & mask,
    )
    corrected = tensors | {
        "correction_weights": result.weights,
        "loss_mask": tensors["loss_mask"] & result.kept,
        "proximal_logprobs": logprobs,
    }
    whole = PolicyObjective(WIDTH, "ppo", {}, old_policy="proximal", **shared)
    loss, gradients, metrics = evaluate(whole, corrected, WHOLE)

    objective = PolicyObjective(WIDTH, "ppo", {}, old_policy="proximal", one_pass=True, correction=CORRECTION, **shared)
    objective.normalizers = lambda lengths: LossNormalizers.unknown(WIDTH)
    parts = [[row for row in range(ROWS) if labels[row] == label] for label in sorted(set(labels))]
    streamed = evaluate(objective, tensors, parts)
    tokens = (corrected["loss_mask"] & mask).sum(-1)
    divisor = float(tokens.sum() if mode == "token-mean" else (tokens > 0).sum()) or 1.0
    assert streamed[0] / divisor == pytest.approx(loss, rel=1e-9, abs=1e-12)
    for gradient, expected in zip(streamed[1], gradients, strict=True):
        assert torch.allclose(gradient / divisor, expected, rtol=1e-9, atol=1e-12)
    assert metrics["trained_share"] == pytest.approx(streamed[2]["trained_share"])
    assert streamed[2]["pg_loss"] / divisor == pytest.approx(metrics["pg_loss"], rel=1e-9, abs=1e-12)
