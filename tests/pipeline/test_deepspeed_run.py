"""Whole runs with `deepspeed_train` on two ranks: what leaves the trainer reaches the engine, and the run is the same
as with the default trainer, and goes on from its checkpoints."""

from __future__ import annotations

from functools import cache

import pytest
from runs import go_on_from, run_pipeline
from tiny import tiny_config

from tests.tiers import need

need("deepspeed")
pytestmark = pytest.mark.tier("all")

STEPS = 3


def configuration(task, strategy, **changes):
    return tiny_config(
        task,
        max_steps=STEPS,
        cluster__num_devices_per_node=3,
        actor_train__device_mapping="0-1",
        actor_train__strategy_args=strategy,
        actor_train__training_args__per_device_train_batch_size=4,
        actor_train__training_args__gradient_accumulation_steps=2,
        actor_infer__device_mapping=[2],
        reference={"device_mapping": [0, 1], "strategy_args": strategy},
        use_kl_loss=True,
        kl_loss_coef=0.1,
        weight_update__canary_interval=1,
        mismatch_alarm=1e-4,
        mismatch_action="stop",
        **changes,
    )


def whole_run(task, ray_cluster, config):
    """Sampled tokens depend on the weights of every step, so equal metrics say that the weights arrived."""
    run = run_pipeline(task, ray_cluster, config)
    assert run.summary["status"] == "success" and len(run.metrics) == STEPS
    assert all(step["mismatch/canary_abs_mean"] < 1e-5 for step in run.metrics)
    assert all(step["actor/skipped_updates"] == 0.0 for step in run.metrics)
    return run


@pytest.fixture(scope="module")
def expected(task, ray_cluster):
    return whole_run(task, ray_cluster, configuration(task, {"strategy_name": "fsdp2_train"})).metrics


def deepspeed(stage):
    options = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    return {"strategy_name": "deepspeed_train", "strategy_config": options}


@pytest.fixture(scope="module")
def run_of(task, ray_cluster):
    """A run at a stage of ZeRO, made once, and its configuration."""

    @cache
    def make(stage):
        config = configuration(task, deepspeed(stage), save_steps=2)
        return whole_run(task, ray_cluster, config), config

    return make


METRICS = ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/reference_kl")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.tier("soak")), 3])
def test_a_run_on_two_ranks_is_the_same_as_with_the_default_trainer(expected, run_of, stage):
    run, _ = run_of(stage)
    for step, default in zip(run.metrics, expected, strict=True):
        for name in METRICS:
            assert step[name] == pytest.approx(default[name], rel=1e-3, abs=1e-6), (step["step"], name)


@pytest.mark.timeout(600)
def test_a_run_that_goes_on_is_the_undisturbed_one_to_the_bit(task, ray_cluster, run_of):
    run, config = run_of(3)
    undisturbed = run.metrics
    again = go_on_from(2, run, task, ray_cluster, config).metrics
    assert [[step[name] for name in METRICS] for step in again] == [[s[name] for name in METRICS] for s in undisturbed]
