import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.metrics import (
    BINS_PER_DECADE,
    MISMATCH_SUMS,
    combine,
    mean_over_updates,
    mismatch_metrics,
    mismatch_sums,
)
from roll.algorithms.objective import PolicyObjective
from tests.tiers import examples

NAMES = {"mean", "abs_mean", "std", "p50", "p99", "max", "tokens"}
RESOLUTION = 10 ** (1 / BINS_PER_DECADE)


def measured(difference, mask=None):
    difference = torch.as_tensor(difference, dtype=torch.float64)
    mask = torch.ones_like(difference, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    sums, largest = mismatch_sums(difference, mask)
    assert sums.shape == (MISMATCH_SUMS,)
    metrics = mismatch_metrics(sums.tolist(), float(largest))
    return {name.removeprefix("mismatch/"): value for name, value in metrics.items()}


@given(seed=st.integers(0, 1000), scale=st.sampled_from([1e-6, 1e-3, 0.1, 5.0]))
def test_the_figures_are_those_of_the_differences(seed, scale):
    difference = np.random.default_rng(seed).normal(0.2 * scale, scale, (6, 50))
    found = measured(difference)
    assert found.keys() == NAMES
    assert found["tokens"] == 300
    assert found["mean"] == pytest.approx(difference.mean())
    assert found["abs_mean"] == pytest.approx(np.abs(difference).mean())
    assert found["std"] == pytest.approx(difference.std())
    assert found["max"] == np.abs(difference).max()
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        exact = np.quantile(np.abs(difference), share, method="inverted_cdf")
        assert exact / RESOLUTION <= found[name] <= exact * RESOLUTION


def test_equal_log_probabilities_have_no_mismatch():
    found = measured(torch.zeros(2, 3))
    assert all(found[name] == 0 for name in NAMES - {"tokens"}) and found["tokens"] == 6


def test_quantiles_outside_the_bins_are_zero_or_the_largest():
    assert measured([[1e-9, 1e-10]])["p50"] == 0
    assert measured([[250.0, 300.0]])["p50"] == 300.0
    assert measured([[1e-8]])["p50"] == 1e-8, "never above the largest"


def test_masked_tokens_never_count_whatever_stands_there():
    difference = torch.tensor([[0.1, math.nan, 0.3], [math.inf, -0.2, 9.0]])
    mask = torch.tensor([[True, False, True], [False, True, False]])
    assert measured(difference, mask) == pytest.approx(measured(torch.tensor([[0.1, 0.3, -0.2]])))


def test_without_a_token_nothing_is_claimed():
    assert measured([[1.0, 2.0]], [[False, False]]) == {"tokens": 0}


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_difference_that_is_not_finite_shows(odd):
    found = measured([[0.1, odd, 0.2]])
    assert not math.isfinite(found["abs_mean"]) and not math.isfinite(found["mean"]) and math.isnan(found["std"])
    assert found["tokens"] == 3


ROWS, WIDTH = 8, 11


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    engine = -torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return {
        "logprobs": engine + 0.01 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64),
        "response_mask": torch.rand(ROWS, WIDTH, generator=generator) < 0.7,
        "behaviour_logprobs": engine,
        "advantages": torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64),
        "same_weights": torch.rand(ROWS, WIDTH, generator=generator) < 0.4,
    }


def metrics_of(objective, data, parts=(slice(None),)):
    normalizers = objective.normalizers(data["response_mask"].sum(1).tolist())
    found = []
    for rows in parts:
        own = {name: value[rows] for name, value in data.items()}
        logprobs, mask = own.pop("logprobs").requires_grad_(), own.pop("response_mask")
        found.append(objective(logprobs, torch.zeros_like(logprobs), mask, normalizers, own)[1])
    sums, maxima = combine(found)
    return found[0].from_vectors(sums.tolist(), maxima.tolist())


def mismatch_of(metrics):
    return {name: value for name, value in metrics.items() if name.startswith("mismatch/")}


def test_only_response_tokens_of_the_trainers_own_version_count():
    data = tensors(0)
    objective = PolicyObjective(WIDTH, monitored=True)
    counted = data["response_mask"] & data["same_weights"]
    difference = (data["logprobs"] - data["behaviour_logprobs"])[counted].numpy()
    found = mismatch_of(metrics_of(objective, data))
    assert found["mismatch/tokens"] == counted.sum() > 0
    assert found["mismatch/mean"] == pytest.approx(difference.mean())
    assert found["mismatch/max"] == np.abs(difference).max()
    for name in ("logprobs", "behaviour_logprobs"):
        data[name] = torch.where(counted, data[name], data[name] - 7.0)
    assert mismatch_of(metrics_of(objective, data)) == pytest.approx(found)


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 1000), labels=st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS))
def test_the_figures_do_not_depend_on_how_the_batch_is_split(seed, labels):
    data = tensors(seed)
    objective = PolicyObjective(WIDTH, monitored=True)
    parts = [[row for row in range(ROWS) if labels[row] == label] for label in sorted(set(labels))]
    split, whole = metrics_of(objective, data, parts), metrics_of(objective, data)
    assert mismatch_of(split) == pytest.approx(mismatch_of(whole), rel=1e-12)
    for name in ("p50", "p99", "max", "tokens"):
        assert split[f"mismatch/{name}"] == whole[f"mismatch/{name}"]


def test_what_is_measured_beside_it_and_the_loss_stay_the_same():
    data = tensors(1)
    plain, monitored = (metrics_of(PolicyObjective(WIDTH, monitored=value), data) for value in (False, True))
    assert mismatch_of(plain) == {}
    assert {name: value for name, value in monitored.items() if not name.startswith("mismatch/")} == plain


def test_a_monitored_objective_asks_which_tokens_had_the_same_weights():
    assert "same_weights" in PolicyObjective(WIDTH, monitored=True).token_fields
    assert "same_weights" not in PolicyObjective(WIDTH).token_fields


def test_of_several_updates_only_the_first_one_counts():
    updates = [
        {"loss": 1.0, "mismatch/mean": 0.1, "mismatch/tokens": 5.0},
        {"loss": 3.0, "mismatch/mean": 9.0, "mismatch/tokens": 7.0},
    ]
    assert mean_over_updates(updates) == {"loss": 2.0, "mismatch/mean": 0.1, "mismatch/tokens": 5.0}
    updates[0] = {"loss": 1.0, "mismatch/tokens": 0.0}
    assert mean_over_updates(updates) == {"loss": 2.0, "mismatch/tokens": 0.0}
