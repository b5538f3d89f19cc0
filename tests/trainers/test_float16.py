"""Training in float16: the loss is scaled, so that small gradients survive and large ones cost one update at most."""

from __future__ import annotations

import math

import numpy as np
import pytest

from roll.algorithms.objective import PolicyObjective
from roll.configs.roles import ModelArguments
from roll.trainers.base import build_trainer
from roll.trainers.fsdp2 import GROWTH_INTERVAL, LARGEST_SCALE, SMALLEST_SCALE, LossScale
from roll.trainers.state import SavedState, write_state
from tests.trainers.tiny_models import make_batch, weights_of, write_model
from tests.trainers.trainers import ALMOST_SGD, trainer_setup

OBJECTIVE = PolicyObjective(8, "vanilla", loss_agg_mode="token-mean")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(leave_process_group, model_path):
    def build_one(dtype):
        leave_process_group()
        setup = trainer_setup(model_path, training_args=ALMOST_SGD, model_args=ModelArguments(dtype=dtype))
        trainer = build_trainer("fsdp2_train", setup)
        trainer.initialize()
        return trainer

    return build_one


def test_a_step_in_float16_is_that_of_float32_but_for_rounding(start):
    weights, norms = {}, {}
    for dtype in ("float32", "float16"):
        trainer = start(dtype)
        metrics = trainer.train_step(make_batch(), OBJECTIVE, 1.0)
        assert metrics["skipped_updates"] == 0
        weights[dtype], norms[dtype] = weights_of(trainer), metrics["grad_norm"]
    assert norms["float16"] == pytest.approx(norms["float32"], rel=0.02)
    for name, expected in weights["float32"].items():
        assert weights["float16"][name].dtype == np.float32
        np.testing.assert_allclose(weights["float16"][name], expected, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("first", [[0, 5, 6], [6]])
def test_a_batch_in_parts_is_a_step_like_the_whole_one_and_does_not_overflow(start, first):
    whole, batch = start("float16"), make_batch()
    expected = whole.train_step(batch, OBJECTIVE, 1.0)
    weights = weights_of(whole)
    trainer = start("float16")
    trainer.train_part(batch.select(first), OBJECTIVE, 1.0, completes=False)
    rest = [number for number in range(len(batch)) if number not in first]
    metrics, _ = trainer.train_part(batch.select(rest), OBJECTIVE, 1.0, completes=True)
    assert metrics["skipped_updates"] == 0
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.01)
    for name, weight in weights_of(trainer).items():
        np.testing.assert_allclose(weight, weights[name], atol=2e-3, err_msg=name)


def test_gradients_too_small_for_float16_learn_all_the_same(start):
    def moved(scaled):
        trainer = start("float16")
        if not scaled:
            trainer.loss_scale = LossScale(dynamic=False)
        batch = make_batch()
        batch.tokens["advantages"] = batch.tokens["advantages"] * np.float32(1e-6)
        before = weights_of(trainer)
        trainer.train_step(batch, OBJECTIVE, 1.0)
        after = weights_of(trainer)
        return sum(float((after[name] != before[name]).mean()) for name in before) / len(before)

    assert moved(scaled=True) > 2 * moved(scaled=False)


def test_an_overflow_skips_one_update_and_halves_the_scale(start):
    trainer = start("float16")
    trainer.loss_scale.value = LARGEST_SCALE
    before = weights_of(trainer)
    metrics = trainer.train_step(make_batch(), OBJECTIVE, 1.0)
    assert metrics["skipped_updates"] == 1 and not math.isfinite(metrics["grad_norm"])
    assert trainer.loss_scale.value == LARGEST_SCALE / 2
    after = weights_of(trainer)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    while trainer.train_step(make_batch(), OBJECTIVE, 1.0)["skipped_updates"]:
        assert trainer.loss_scale.value > 1
    assert any(not np.array_equal(before[name], weight) for name, weight in weights_of(trainer).items())


def test_the_scale_is_part_of_the_saved_state(start, tmp_path):
    trainer = start("float16")
    trainer.train_step(make_batch(), OBJECTIVE, 1.0)
    trainer.loss_scale.value, trainer.loss_scale.good_updates = 512.0, 7
    write_state(tmp_path, 0, trainer.snapshot())
    again = start("float16")
    again.restore(SavedState(tmp_path))
    assert again.loss_scale == LossScale(dynamic=True, value=512.0, good_updates=7)
    plain = start("float32")
    plain.restore(SavedState(tmp_path))
    assert plain.loss_scale == LossScale(dynamic=False)


def test_the_scale_grows_after_many_good_updates_and_stays_within_its_limits():
    scale = LossScale.of("float16")
    first = scale.value
    for _ in range(GROWTH_INTERVAL):
        assert scale.value == first
        scale.update(finite=True)
    assert scale.value == 2 * first
    for _ in range(100):
        scale.update(finite=False)
    assert scale.value == SMALLEST_SCALE
    for _ in range(100 * GROWTH_INTERVAL):
        scale.update(finite=True)
    assert scale.value == LARGEST_SCALE
    plain = LossScale.of("bfloat16")
    plain.update(finite=False)
    assert plain.value == 1
