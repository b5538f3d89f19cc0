"""The comparison with published runs finds inputs that steps were made with, and keeps to what a source tells."""

from __future__ import annotations

import numpy as np
import pytest
from published_runs import ANY_AGE, Case, fit, simulated

from roll.simulation.workload import response_lengths

ROW = {
    "id": "made",
    "system": "NeMo-RL 9.9",
    "model": "Llama-3.1-8B",
    "gpus": {"sync": 16, "async": 16, "kind": "H100"},
    "split": {"train": 8, "generate": 8},
    "batch": 16,
    "group": 8,
    "lengths": {"total_max": 4096, "mean_sync": 1100, "mean_async": 1100},
    "sync_step_seconds": 1.0,
    "async_step_seconds": 1.0,
    "breakdown": {},
    "steps_off": 1,
    "settings": {
        "engine_tp_sync": 1,
        "engine_tp_async": 1,
        "train_sync[TP,CP,EP,PP]": [1, 1, 1, 1],
        "train_async[TP,CP,EP,PP]": [1, 1, 1, 1],
    },
}
HIDDEN = {"engine.scale": 2.5, "trainer.scale": 0.5, "weight_update.exchange_bandwidth": 0.2}


def test_a_row_that_calibrates_tells_what_it_needs_of_others():
    made = {asynchronous: simulated(Case(ROW, asynchronous), HIDDEN) for asynchronous in (False, True)}
    plain = {asynchronous: simulated(Case(ROW, asynchronous), {}) for asynchronous in (False, True)}
    assert min(made[each] / plain[each] for each in made) > 1.4
    row = {**ROW, "sync_step_seconds": made[False], "async_step_seconds": made[True]}
    factors = fit([Case(row, False), Case(row, True)])
    assert "lengths.median" not in factors and "lengths.prompt" not in factors  # the source has a mean
    for asynchronous in (False, True):
        assert simulated(Case(row, asynchronous), factors) == pytest.approx(made[asynchronous], rel=0.05)
    larger = {**ROW, "batch": 24}
    for asynchronous in (False, True):
        case = Case(larger, asynchronous)
        assert simulated(case, factors) == pytest.approx(simulated(case, HIDDEN), rel=0.1)
        assert abs(simulated(case, factors) / simulated(case, {}) - 1) > 0.2


def test_lengths_keep_the_published_mean_however_they_are_spread():
    for sigma in (0.5, 1.0, 1.8):
        config, inputs = Case(ROW, True).build({"lengths.sigma": sigma, "lengths.median": 3.0, "lengths.prompt": 3.0})
        made = response_lengths(inputs.lengths, config.response_length, (4096, 8), np.random.default_rng(0))
        assert inputs.lengths.sigma == pytest.approx(0.8 * sigma)
        assert inputs.lengths.prompt + made.mean() == pytest.approx(1100, rel=0.05)


def test_lengths_that_no_source_tells_are_shares_of_the_limits():
    case = Case({**ROW, "lengths": {"response_max": 4000, "prompt_max": 500}}, True)
    _, inputs = case.build({"lengths.median": 0.3, "lengths.sigma": 1.5, "lengths.prompt": 0.5})
    assert (inputs.lengths.median, inputs.lengths.prompt) == (300, 125) and inputs.lengths.sigma == pytest.approx(1.2)


def test_responses_that_go_on_after_any_update_have_no_bound_of_age():
    partial = {**ROW, "settings": {**ROW["settings"], "partial_rollout": True}}
    assert Case(partial, True).build()[0].max_staleness == ANY_AGE
    assert Case(partial, False).build()[0].max_staleness is None
    assert Case(ROW, True).build()[0].max_staleness is None
