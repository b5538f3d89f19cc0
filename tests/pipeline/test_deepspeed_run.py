"""Whole runs with `deepspeed_train` on two ranks: what leaves the trainer reaches the engine, and the run is the same
as with the default trainer."""

from __future__ import annotations

import pytest
from runs import run_pipeline
from tiny import make_task, tiny_config

STEPS = 4


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


def metrics_of_a_run(task, ray_cluster, strategy):
    """Sampled tokens depend on the weights of every step, so equal metrics say that the weights arrived."""
    config = tiny_config(
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
    )
    run = run_pipeline(task, ray_cluster, config)
    assert run.summary["status"] == "success" and len(run.metrics) == STEPS
    assert all(step["mismatch/canary_abs_mean"] < 1e-5 for step in run.metrics)
    assert all(step["actor/skipped_updates"] == 0.0 for step in run.metrics)
    return run.metrics


@pytest.fixture(scope="module")
def expected(task, ray_cluster):
    return metrics_of_a_run(task, ray_cluster, {"strategy_name": "fsdp2_train"})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_on_two_ranks_is_the_same_as_with_the_default_trainer(task, ray_cluster, expected, stage):
    options = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    strategy = {"strategy_name": "deepspeed_train", "strategy_config": options}
    for step, default in zip(metrics_of_a_run(task, ray_cluster, strategy), expected, strict=True):
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/reference_kl"):
            assert step[name] == pytest.approx(default[name], rel=1e-3, abs=1e-6), (step["step"], name)
