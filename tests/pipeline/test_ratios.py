"""Promises 1, 3 and 5 on real runs: one loop for every ratio, a hard bound on lag, every group accounted for."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import run_pipeline
from tiny import tiny_config

from roll.configs.loader import config_from_tree
from roll.data.prompts import PromptStream
from roll.pipeline.preflight import prepare

tier = pytest.mark.tier


def assert_every_group_is_accounted_for(run, steps, groups_per_step):
    for step in run.metrics:
        dropped = sum(value for name, value in step.items() if name.startswith("ledger/dropped/"))
        accounted = step["ledger/consumed"] + step["ledger/buffered"] + step["ledger/in_flight"] + dropped
        assert step["ledger/issued"] == accounted
    ledger = run.summary["ledger"]
    assert ledger["consumed"] == steps * groups_per_step
    assert ledger["buffered"] == ledger["in_flight"] == 0


def off_policy_config(task, ratio, **changes):
    return tiny_config(
        task,
        **{
            "rollout_batch_size": 16,
            "async_generation_ratio": ratio,
            "actor_train__training_args__learning_rate": 5e-3,
            "rewards__addition__verifier": "reward_functions:late_reward",
            "rewards__addition__num_workers": 1,
        }
        | changes,
    )


def assert_within_the_staleness_bound(run, ratio):
    assert run.summary["lag/max"] == max(step["lag/max"] for step in run.metrics) <= math.ceil(ratio)
    if ratio >= 1:
        assert run.summary["lag/max"] >= 1


@pytest.mark.parametrize(
    "ratio", [pytest.param(ratio, marks=tier("all" if ratio == 1 else "soak")) for ratio in (0, 0.5, 1, 2)]
)
def test_the_model_learns_at_every_ratio_within_the_staleness_bound(task, ray_cluster, ratio):
    run = run_pipeline(task, ray_cluster, off_policy_config(task, ratio, max_steps=70))
    rewards = [step["reward/mean"] for step in run.metrics]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:5]) + 0.25, rewards
    assert_within_the_staleness_bound(run, ratio)
    assert_every_group_is_accounted_for(run, 70, 16)


@tier("all")
@pytest.mark.parametrize("ratio", [0.5, 2])
def test_other_ratios_keep_to_their_bounds_and_lose_no_group(task, ratio):
    run = run_pipeline(task, IN_THIS_PROCESS, off_policy_config(task, ratio, max_steps=8))
    assert_within_the_staleness_bound(run, ratio)
    assert_every_group_is_accounted_for(run, 8, 16)


@tier("all")
def test_fifo_at_ratio_one_takes_the_groups_in_the_order_of_their_prompts_whatever_the_latencies(task):
    config = tiny_config(
        task,
        max_steps=4,
        async_generation_ratio=1,
        consumption="fifo",
        num_logged_samples=8,
        rewards__addition__verifier="reward_functions:late_reward",
    )
    samples = run_pipeline(task, IN_THIS_PROCESS, config).samples
    prepared = prepare(config_from_tree(config))
    prompts = itertools.islice(PromptStream(prepared.rollouts.prompts, seed=config["seed"]), 32)
    assert [(sample["step"], sample["group_id"], sample["prompt"]) for sample in samples] == [
        (index // 8 + 1, index, prompt.text) for index, prompt in enumerate(prompts)
    ]


def test_every_step_has_the_metrics_that_were_promised(task, ray_cluster):
    """One step off policy, with a reference on a device of its own: the run of `make test`."""
    config = tiny_config(
        task,
        max_steps=4,
        async_generation_ratio=1,
        cluster__num_devices_per_node=3,
        reference={"device_mapping": [2]},
        use_kl_loss=True,
        kl_loss_coef=0.1,
        add_token_level_kl=True,
        init_kl_coef=0.1,
    )
    run = run_pipeline(task, ray_cluster, config)
    promised = {
        "reward/mean",
        *(f"lag/{name}" for name in ("mean", "max")),
        *(f"ledger/{name}" for name in ("issued", "consumed", "buffered", "in_flight", "dropped/failed")),
        *(f"actor/{name}" for name in ("loss", "entropy", "clip_fraction", "kl", "ess", "grad_norm")),
        *(f"time/{name}" for name in ("rollout", "reference", "advantage", "train", "param_update", "step")),
        *(f"idle/{name}" for name in ("actor_train", "actor_infer", "reference")),
        *(f"tokens_per_second/{name}" for name in ("actor_train", "actor_infer", "reference")),
        *(f"weights/{name}_seconds" for name in ("gather", "send", "load", "stall")),
        "mismatch/tokens",
        *(f"engine/{name}" for name in ("restarts", "reissued", "resumed_tokens")),
    }
    assert [sorted(promised - step.keys()) for step in run.metrics] == [[]] * 4
    of_equal_weights = {f"mismatch/{name}" for name in ("mean", "abs_mean", "std", "max", "p50", "p99")}
    assert of_equal_weights <= run.metrics[0].keys()
    assert_within_the_staleness_bound(run, 1)
    assert_every_group_is_accounted_for(run, 4, 8)
    kl = [step["actor/reference_kl"] for step in run.metrics]
    assert kl[0] < 1e-6 < kl[-1]


@tier("all")
def test_filtered_groups_give_their_slot_back_and_two_ranks_take_several_optimizer_steps(task, ray_cluster):
    config = tiny_config(
        task,
        group_filter="zero_variance",
        num_return_sequences_in_group=2,
        rewards__addition__verifier="reward_functions:first_digit_reward",
        cluster__num_devices_per_node=3,
        actor_train__device_mapping="0-1",
        actor_infer__device_mapping=[2],
        actor_train__training_args__per_device_train_batch_size=2,
        actor_train__training_args__gradient_accumulation_steps=2,
        ppo_epochs=2,
    )
    run = run_pipeline(task, ray_cluster, config)
    assert run.summary["ledger"]["dropped/filtered"] > 0
    assert all(step["reward/zero_variance_groups"] == 0 for step in run.metrics)
    assert_every_group_is_accounted_for(run, 3, 8)
    assert all(step["actor/ratio_max"] > 1 for step in run.metrics)


@tier("all")
def test_a_reference_of_whole_models_on_two_devices_gives_the_run_of_the_default_one(task, ray_cluster):
    def run(**reference):
        config = tiny_config(
            task,
            max_steps=2,
            cluster__num_devices_per_node=3,
            reference={"device_mapping": [0, 2], **reference},
            use_kl_loss=True,
            kl_loss_coef=0.1,
        )
        return run_pipeline(task, ray_cluster, config).metrics

    replicas = run(strategy_args={"strategy_name": "hf_infer"}, use_sequence_packing=True)
    for step, default in zip(replicas, run(), strict=True):
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/reference_kl"):
            assert step[name] == pytest.approx(default[name], rel=1e-3, abs=1e-6), (step["step"], name)


@tier("all")
def test_colocated_roles_at_ratio_one_interrupt_generation_and_go_on(task):
    config = tiny_config(
        task,
        max_steps=6,
        cluster__num_devices_per_node=1,
        actor_infer__device_mapping=[0],
        async_generation_ratio=1,
        weight_update__in_flight="resume",
        rewards__addition__verifier="reward_functions:late_reward",
        reference={"device_mapping": [0]},
        use_kl_loss=True,
        kl_loss_coef=0.1,
    )
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    kl = [step["actor/reference_kl"] for step in run.metrics]
    assert kl[0] < 1e-6 < kl[-1]
    assert run.summary["lag/max"] <= 1
    assert_every_group_is_accounted_for(run, 6, 8)


@tier("all")
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_two_replicas_validation_and_publication_every_other_step(task, mode):
    config = tiny_config(
        task,
        max_steps=4,
        eval_steps=2,
        cluster__num_devices_per_node=3,
        actor_infer__device_mapping=[1, 2],
        async_generation_ratio=1,
        weight_update__interval_steps=2,
        weight_update__mode=mode,
        is_num_return_sequences_expand=False,
        validation={
            "data_args": {"file_name": str(task / "val.jsonl")},
            "generating_args": {"num_return_sequences": 2, "temperature": 1.0},
            "mode": "overlap",
        },
    )
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    assert set(run.summary["val/first"]) == {"addition"}
    assert run.summary["lag/max"] <= 2
    assert [step["step"] for step in run.metrics if "val/addition/accuracy" in step] == [2, 4]
