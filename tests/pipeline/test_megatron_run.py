"""A run whose trainer shares the model out over two ranks is the run of one rank, and goes on from its checkpoints."""

from __future__ import annotations

import pytest
from runs import go_on_from, run_pipeline
from tiny import make_task, tiny_config

from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.pipeline.preflight import prepare
from tests.tiers import need

need("megatron.core")

STEPS = 3


@pytest.mark.parametrize(
    ("devices", "options", "reason"),
    [
        ([0, 1, 2], {"tensor_model_parallel_size": 2}, "the number of ranks (3) must be a multiple"),
        ([0, 1, 2], {"pipeline_model_parallel_size": 3}, "layers (2) must be a multiple"),
        ([0, 1], {"expert_model_parallel_size": 2}, "no experts"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_anything_loads(tmp_path, devices, options, reason):
    make_task(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    strategy = {"strategy_name": "megatron_train", "strategy_config": options}
    tree = tiny_config(
        tmp_path,
        cluster__num_devices_per_node=4,
        actor_train__device_mapping=devices,
        actor_infer__device_mapping=[3],
        actor_train__strategy_args=strategy,
    )
    with pytest.raises(ConfigError) as refusal:
        prepare(config_from_tree(tree))
    (problem,) = refusal.value.problems
    assert problem.path == "actor_train.strategy_args.strategy_config" and reason in problem.message


@pytest.mark.tier("all")
@pytest.mark.timeout(600)
def test_two_pipeline_stages_make_the_run_of_one_fsdp2_rank(tmp_path, ray_cluster):
    """Generation follows the published weights, so equal losses at each step mean that they arrived, too."""
    make_task(tmp_path)
    shared_out = tiny_config(
        tmp_path,
        max_steps=STEPS,
        save_steps=2,
        cluster__num_devices_per_node=3,
        actor_infer__device_mapping=[2],
        actor_train__device_mapping=[0, 1],
        actor_train__strategy_args={
            "strategy_name": "megatron_train",
            "strategy_config": {"pipeline_model_parallel_size": 2},
        },
        actor_train__worker_cls="tests.trainers.megatron_worker:CpuTrainWorker",
    )
    run = run_pipeline(tmp_path, ray_cluster, shared_out)
    found = run.metrics
    expected = run_pipeline(tmp_path, ray_cluster, tiny_config(tmp_path, max_steps=STEPS)).metrics
    assert len(found) == len(expected) == STEPS
    for step, wanted in zip(found, expected, strict=True):
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy"):
            assert step[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), (step["step"], name)
    again = go_on_from(2, run, tmp_path, ray_cluster, shared_out).metrics
    assert [step["step"] for step in again] == [1, 2, 3]
    for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy"):
        assert again[-1][name] == found[-1][name], name
