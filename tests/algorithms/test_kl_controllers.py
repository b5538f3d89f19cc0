"""KL controllers: the formula, its bounds, and what survives a bad measurement or a restart."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.kl import AdaptiveKLController, KLController
from tests.tiers import examples


def test_a_fixed_weight_stays():
    controller = KLController(0.3)
    controller.update(50.0, 64)
    assert controller.coef == 0.3


@pytest.mark.parametrize(
    ("kl", "error"), [(0.1, 0.0), (0.11, 0.1), (0.09, -0.1), (0.4, 0.2), (0.0, -0.2), (-3.0, -0.2), (math.inf, 0.2)]
)
def test_one_step_follows_the_formula(kl, error):
    controller = AdaptiveKLController(0.5, target=0.1, horizon=1000)
    controller.update(kl, 64)
    assert controller.coef == pytest.approx(0.5 * (1 + error * 64 / 1000), abs=1e-12)


def test_steps_compound_until_the_target_is_met():
    controller = AdaptiveKLController(0.1, target=1.0, horizon=100)
    for _ in range(1000):
        controller.update(0.05 / controller.coef, 10)
    assert controller.coef == pytest.approx(0.05, rel=1e-6)


def test_nan_leaves_the_weight_as_it_was_and_the_next_measurement_counts():
    controller = AdaptiveKLController(0.1, target=1.0, horizon=100)
    controller.update(math.nan, 10)
    assert controller.coef == 0.1
    controller.update(2.0, 10)
    assert controller.coef == pytest.approx(0.1 * 1.02)


@settings(max_examples=examples(100))
@given(
    kl=st.floats(allow_nan=True, allow_infinity=True),
    samples=st.integers(0, 10**9),
    coef=st.floats(1e-6, 1e3),
    horizon=st.integers(1, 10**6),
)
def test_no_measurement_changes_the_weight_by_more_than_a_fifth(kl, samples, coef, horizon):
    controller = AdaptiveKLController(coef, target=0.1, horizon=horizon)
    controller.update(kl, samples)
    assert 0.8 * coef * (1 - 1e-12) <= controller.coef <= 1.2 * coef * (1 + 1e-12)


def test_a_restored_controller_goes_on_as_if_never_stopped():
    first = AdaptiveKLController(0.1, target=1.0, horizon=100)
    first.update(3.0, 20)
    second = AdaptiveKLController(0.1, target=1.0, horizon=100)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(0.5, 20)
    assert first.coef == second.coef != 0.1


def test_the_configuration_of_a_resumed_run_decides_a_fixed_weight():
    controller = KLController(0.2)
    controller.load_state_dict(KLController(0.7).state_dict())
    controller.load_state_dict(AdaptiveKLController(0.9, 1.0, 10).state_dict())
    assert controller.coef == 0.2 and controller.state_dict() == {}


@pytest.mark.parametrize("state", [{}, {"coef": math.nan}, {"coef": math.inf}, {"coef": 0.0}, {"coef": -1.0}])
def test_a_broken_state_is_refused_and_changes_nothing(state):
    controller = AdaptiveKLController(0.1, 1.0, 10)
    with pytest.raises(ValueError, match="coef"):
        controller.load_state_dict(state)
    assert controller.coef == 0.1


@pytest.mark.parametrize("wrong", [{"init_coef": 0.0}, {"target": 0.0}, {"horizon": 0}, {"init_coef": math.nan}])
def test_an_adaptive_controller_that_cannot_work_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdaptiveKLController(**{"init_coef": 0.1, "target": 1.0, "horizon": 10} | wrong)


@pytest.mark.parametrize("coef", [-0.1, math.nan, math.inf])
def test_a_fixed_weight_that_is_no_weight_is_refused(coef):
    with pytest.raises(ValueError, match="coefficient"):
        KLController(coef)


def test_a_weight_of_zero_may_be_fixed():
    assert KLController(0.0).coef == 0.0
