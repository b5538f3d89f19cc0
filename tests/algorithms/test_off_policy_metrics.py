"""Distances of the behaviour policy: closed forms by loop, independence from the split, lags, and overflow."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.metrics import combine, lag_buckets, off_policy_metrics, off_policy_sums, policy_metrics
from tests.tiers import examples

ROWS, WIDTH = 6, 5
MU = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
PI = torch.tensor([0.3, 0.3, 0.2, 0.2], dtype=torch.float64)


def random_tensors(seed, oldest=4):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.6
    mask[0] = False
    mask[1] = torch.arange(WIDTH) == WIDTH - 1
    behaviour = -torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).abs()
    return {
        "logprobs": behaviour + torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64),
        "behaviour_logprobs": behaviour,
        "response_mask": mask,
        "lags": torch.randint(0, oldest + 1, (ROWS, WIDTH), generator=generator),
    }


def sums_of(log_ratio, mask, *lags):
    return off_policy_sums(log_ratio, lag_buckets(mask, *lags))


def log_ratio_of(tensors):
    return tensors["logprobs"] - tensors["behaviour_logprobs"]


def metrics_by_loop(log_ratios):
    """ess, k1, k3 and chi2 of a plain list."""
    ratios = [math.exp(value) for value in log_ratios]
    number = len(ratios)
    squares = sum(ratio**2 for ratio in ratios)
    return {
        "ess": sum(ratios) ** 2 / (number * squares),
        "k1": sum(-value for value in log_ratios) / number,
        "k3": sum(ratio - 1 - value for ratio, value in zip(ratios, log_ratios, strict=True)) / number,
        "chi2": squares / number - 1,
    }


def everything_by_loop(tensors, max_lag, last):
    """All metrics per lag 0..max_lag, ``last`` being the name of the last bucket."""
    tokens = [
        (log_ratio, min(lag, max_lag))
        for log_ratio, lag, inside in zip(
            log_ratio_of(tensors).flatten().tolist(),
            tensors["lags"].flatten().tolist(),
            tensors["response_mask"].flatten().tolist(),
            strict=True,
        )
        if inside
    ]
    expected = metrics_by_loop([log_ratio for log_ratio, _ in tokens])
    for lag in range(max_lag + 1):
        chosen = [log_ratio for log_ratio, own in tokens if own == lag]
        if chosen:
            name = last if lag == max_lag else f"lag_{lag}"
            expected |= {f"{name}/{key}": value for key, value in metrics_by_loop(chosen).items()}
            expected[f"{name}/share"] = len(chosen) / len(tokens)
    return expected


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10_000), max_lag=st.integers(0, 5), capped=st.booleans())
def test_metrics_follow_their_definitions_overall_and_per_lag(seed, max_lag, capped):
    tensors = random_tensors(seed)
    sums = sums_of(log_ratio_of(tensors), tensors["response_mask"], tensors["lags"], max_lag, capped)
    last = f"lag_{max_lag}+" if capped else f"lag_{max_lag}"
    assert off_policy_metrics(sums) == pytest.approx(everything_by_loop(tensors, max_lag, last), rel=1e-10, abs=1e-10)


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10_000), labels=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_sums_of_any_split_add_up_to_those_of_the_whole(seed, labels):
    tensors = random_tensors(seed)
    arguments = (log_ratio_of(tensors), tensors["response_mask"], tensors["lags"])
    whole = sums_of(*arguments, 3)
    parts = [sums_of(*(tensor[torch.tensor(labels) == label] for tensor in arguments), 3) for label in range(3)]
    assert all(list(part) == list(whole) for part in parts)
    added = {name: sum(part[name] for part in parts) for name in whole}
    assert off_policy_metrics(added) == pytest.approx(off_policy_metrics(whole), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
def test_what_stands_outside_the_mask_is_never_read(fill):
    tensors = random_tensors(3)
    mask, lags = tensors["response_mask"], tensors["lags"]
    dirty = log_ratio_of(tensors).masked_fill(~mask, fill)
    sums = sums_of(log_ratio_of(tensors), mask, lags, 3)
    assert sums_of(dirty, mask, lags.masked_fill(~mask, 2), 3) == sums
    assert all(value.dtype == torch.float64 and value.ndim == 0 for value in sums.values())


def test_inputs_stay_as_they_were_and_sums_carry_no_gradient():
    tensors = random_tensors(4)
    log_ratio = log_ratio_of(tensors).requires_grad_()
    before = log_ratio.detach().clone(), tensors["response_mask"].clone(), tensors["lags"].clone()
    sums = sums_of(log_ratio, tensors["response_mask"], tensors["lags"], 2)
    assert not any(value.requires_grad for value in sums.values())
    for tensor, copy in zip((log_ratio, tensors["response_mask"], tensors["lags"]), before, strict=True):
        assert torch.equal(tensor, copy)


def whole_row(*log_ratios):
    values = torch.tensor([log_ratios], dtype=torch.float64)
    return off_policy_metrics(sums_of(values, torch.ones_like(values, dtype=torch.bool)))


def test_on_policy_tokens_have_full_effective_sample_size_and_no_divergence():
    assert whole_row(0.0, 0.0, 0.0) == {"ess": 1.0, "k1": 0.0, "k3": 0.0, "chi2": 0.0}


def test_without_any_token_everything_is_zero_and_no_lag_is_named():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    sums = sums_of(torch.full((2, 3), math.nan), nothing, torch.zeros(2, 3, dtype=torch.long), 2)
    assert off_policy_metrics(sums) == {"ess": 0.0, "k1": 0.0, "k3": 0.0, "chi2": 0.0}
    assert "lag_2/tokens" in sums


@pytest.mark.parametrize("log_ratio", [20.0, -20.0, 40.0, -40.0])
def test_large_ratios_are_exact(log_ratio):
    assert whole_row(log_ratio, 0.5) == pytest.approx(metrics_by_loop([log_ratio, 0.5]), rel=1e-10)


@pytest.mark.parametrize(
    ("log_ratios", "ess", "chi2"),
    [((2000.0, 0.0), 0.0, math.inf), ((-2000.0, -2000.0), 0.0, -1.0), ((-2000.0, 0.0), 0.5, -0.5)],
)
def test_ratios_beyond_double_precision_give_limits_and_never_nan(log_ratios, ess, chi2):
    metrics = whole_row(*log_ratios)
    assert not any(math.isnan(value) for value in metrics.values())
    assert metrics["ess"] == ess and metrics["chi2"] == chi2
    assert metrics["k1"] == -sum(log_ratios) / 2


def test_the_squared_sum_of_ratios_may_exceed_double_precision():
    assert whole_row(354.5, 354.5)["ess"] == pytest.approx(1.0)


def test_a_log_probability_that_is_nan_is_seen():
    assert math.isnan(whole_row(math.nan, 0.0)["ess"]) and math.isnan(whole_row(math.nan, 0.0)["k3"])


@settings(max_examples=examples(100))
@given(log_ratios=st.lists(st.floats(-30, 30) | st.floats(-1e-7, 1e-7), min_size=1, max_size=12))
def test_k3_is_never_negative_and_the_effective_sample_size_is_a_share(log_ratios):
    metrics = whole_row(*log_ratios)
    assert metrics["k3"] >= 0 and 0 < metrics["ess"] <= 1 and metrics["chi2"] >= -1


@pytest.mark.parametrize("lags", [None, torch.zeros(1, 1, dtype=torch.long)])
def test_metrics_per_lag_need_lags_and_a_bound(lags):
    with pytest.raises(ValueError, match="max_lag"):
        sums_of(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), lags, -1 if lags is not None else 2)


def test_lags_without_a_bound_are_not_reported():
    one = torch.ones(1, 1, dtype=torch.bool)
    assert list(off_policy_metrics(sums_of(torch.zeros(1, 1), one, one.long()))) == ["ess", "k1", "k3", "chi2"]


def test_means_over_samples_of_the_behaviour_policy_estimate_what_they_claim_within_four_sigma():
    number = 100_000
    tokens = torch.multinomial(MU, number, replacement=True, generator=torch.Generator().manual_seed(1))
    log_ratio = (PI / MU).log()[tokens]
    ratio = log_ratio.exp()
    metrics = off_policy_metrics(sums_of(log_ratio[None], torch.ones(1, number, dtype=torch.bool)))
    divergence = (MU * (MU / PI).log()).sum()
    chi_squared = ((PI - MU).square() / MU).sum()
    estimates = [
        (ratio.mean(), ratio, torch.ones(())),
        (metrics["k1"], -log_ratio, divergence),
        (metrics["k3"], ratio - 1 - log_ratio, divergence),
        (metrics["chi2"], ratio.square(), chi_squared),
    ]
    for estimate, values, truth in estimates:
        error = abs(float(estimate) - truth.item())
        assert 0 < error < 4 * values.std().item() / math.sqrt(number)
    assert metrics["ess"] == pytest.approx(1 / (1 + chi_squared.item()), rel=0.02)


def metrics_of_part(totals, token_metrics, part, max_lag, **options):
    buckets = lag_buckets(part["response_mask"], part["lags"], max_lag, **options)
    return policy_metrics(totals, token_metrics, part["logprobs"], part["behaviour_logprobs"], buckets)


def part_metrics(tensors, rows, **options):
    part = {name: tensor[rows] for name, tensor in tensors.items()}
    mask = part["response_mask"]
    token_metrics = {"clip_fraction": (part["logprobs"] > -0.5).double()}
    total = torch.where(mask, part["logprobs"], 0.0).sum()
    return metrics_of_part({"loss": total}, token_metrics, part, 3, **options)


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10_000), labels=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_metrics_of_a_loss_are_the_same_for_any_split(seed, labels):
    tensors = random_tensors(seed)
    whole = part_metrics(tensors, torch.arange(ROWS))
    parts = [part_metrics(tensors, torch.tensor(labels) == label) for label in sorted(set(labels))]
    assert all(list(part.sums) == list(whole.sums) for part in parts)
    results = []
    for pieces in ([whole], parts):
        sums, maxima = combine(pieces)
        results.append(pieces[0].from_vectors(sums.tolist(), maxima.tolist()))
    assert results[1] == pytest.approx(results[0], rel=1e-10, abs=1e-12)


def test_metrics_of_a_loss_have_their_names_and_values():
    tensors = random_tensors(5)
    metrics = part_metrics(tensors, torch.arange(ROWS))
    found = metrics.from_vectors(*(vector.tolist() for vector in metrics.vectors()))
    mask = tensors["response_mask"]
    ratio = log_ratio_of(tensors)[mask].exp()
    expected = everything_by_loop(tensors, 3, "lag_3")
    expected["kl"] = expected.pop("k3")
    expected |= {
        "loss": tensors["logprobs"][mask].sum().item(),
        "clip_fraction": (tensors["logprobs"][mask] > -0.5).double().mean().item(),
        "ratio_mean": ratio.mean().item(),
        "ratio_max": ratio.max().item(),
    }
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_the_largest_ratio_is_that_of_a_response_token():
    mask = torch.tensor([[True, False]])
    metrics = policy_metrics({}, {}, torch.tensor([[-2.0, 0.0]]), torch.tensor([[-1.0, -5.0]]), {"": mask})
    assert metrics.maxima["ratio_max"].item() == pytest.approx(math.exp(-1), rel=1e-12)


def test_a_capped_last_bucket_says_so_in_the_metrics_of_a_loss():
    names = part_metrics(random_tensors(6), torch.arange(ROWS), capped=True).sums
    assert "off_policy/lag_3+/tokens" in names and "off_policy/lag_3/tokens" not in names


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
def test_metrics_of_a_loss_never_read_what_stands_outside_the_mask(fill):
    tensors = random_tensors(7)
    mask = tensors["response_mask"]
    dirty = tensors | {name: tensors[name].masked_fill(~mask, fill) for name in ("logprobs", "behaviour_logprobs")}
    ones = torch.ones(ROWS, WIDTH)
    results = [
        metrics_of_part({}, {"entropy": values}, part, 2)
        for part, values in ((tensors, ones), (dirty, ones.masked_fill(~mask, fill)))
    ]
    clean, filled = (metrics.from_vectors(*(vector.tolist() for vector in metrics.vectors())) for metrics in results)
    assert clean == filled and clean["entropy"] == 1.0
