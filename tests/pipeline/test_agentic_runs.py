"""Whole agentic runs: they learn, at every ratio and with every way of cutting episodes, whatever environments do."""

from __future__ import annotations

import json

import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import run_pipeline
from tiny import changed, tiny_config

STEPS = 40

tier = pytest.mark.tier


def agentic_config(folder, envs=None, **changes):
    config = tiny_config(folder)
    for key in ("rewards", "num_return_sequences_in_group"):
        del config[key]
    del config["actor_train"]["data_args"]
    base = {
        "pipeline": "agentic",
        "template": "raw",
        "raw_turns": {"prompt_end": "=", "response_end": "+"},
        "response_length": 12,
        "custom_envs": envs or {"copy": {"env_type": "copy_games:Copy", "max_steps": 4, "max_tokens_per_step": 1}},
        "train_env_manager": {"group_size": 8},
        "eval_steps": 0,
    }
    return changed(config | base, changes)


def gain(run) -> float:
    """Mean reward of the last steps beyond that of the first."""
    rewards = [step["reward/mean"] for step in run.metrics]
    return sum(rewards[-8:]) / 8 - sum(rewards[:4]) / 4


STEP_WISE = {"custom_envs__copy__env_manager_cls": "step", "adv_estimator": "step_reinforce"}
TRAJECTORIES = {"adv_estimator": "gigpo", "weight_update__in_flight": "resume"}


def run_of_episodes(task, ray_cluster, steps, ratio, changes):
    """A run with what must be true of it, whether it is long enough to learn or not."""
    config = agentic_config(
        task,
        max_steps=steps,
        eval_steps=steps // 2,
        async_generation_ratio=ratio,
        actor_train__training_args__learning_rate=5e-3,
        train_env_manager__format_penalty=-0.1,
        val_env_manager={"num_env_groups": 16},
        track_with=["tensorboard"],
        **changes,
    )
    run = run_pipeline(task, ray_cluster, config)
    ledger = run.summary["ledger"]
    assert ledger["issued"] == ledger["consumed"] == steps * 8
    assert run.summary["lag/max"] == ratio
    last = run.metrics[-1]
    assert last["env/copy/turns"] == 2 and last["env/copy/tokens"] == 2 and last["val/copy/failed_groups"] == 0
    assert ratio > 0 or (last["mismatch/tokens"] > 0 and last["mismatch/abs_mean"] < 1e-4)
    shown = {path.name for path in (run.folder / "episodes" / f"version-{steps:06d}").iterdir()}
    assert shown == {f"copy-{which}.{kind}" for which in ("best", "worst", "random") for kind in ("txt", "gif", "png")}
    assert run.summary["val/first"].keys() == run.summary["val/last"].keys() == {"copy"}
    return run


@tier("all")
def test_a_run_plays_an_environment_of_another_package(task, ray_cluster):
    """The run of `make test`."""
    run_of_episodes(task, ray_cluster, 4, 1, TRAJECTORIES)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ratio", "changes"),
    [
        pytest.param(0, STEP_WISE, marks=tier("all"), id="step-wise on policy"),
        pytest.param(1, TRAJECTORIES, marks=tier("soak"), id="trajectories one step off"),
    ],
)
def test_a_run_learns_in_an_environment_of_another_package(task, ray_cluster, ratio, changes):
    run = run_of_episodes(task, ray_cluster, STEPS, ratio, changes)
    assert gain(run) > 0.25
    assert run.summary["val/last"]["copy"] > run.summary["val/first"]["copy"]


@pytest.mark.timeout(300)
@tier("all")
def test_environments_that_raise_hang_lie_or_die_cost_their_group_and_nothing_else(task, ray_cluster):
    """An environment that ends its process takes others along, whose groups are tried again."""
    steps, troubles = 3, {"raise": 2, "hang": 4, "nonsense": 2, "die": 3}
    envs = {
        trouble: {
            "env_type": "copy_games:Copy",
            "env_config": {"trouble": trouble, "turns": 4, "at_step": 3, "period": period},
            "max_steps": 4,
            "max_tokens_per_step": 1,
            "step_timeout_seconds": 1.0,
        }
        for trouble, period in troubles.items()
    }
    config = agentic_config(
        task,
        envs,
        max_steps=steps,
        response_length=24,
        async_generation_ratio=1,
        train_env_manager__group_size=4,
        env_workers__num_workers=2,
    )
    run = run_pipeline(task, ray_cluster, config)
    ledger = run.summary["ledger"]
    assert ledger["consumed"] == steps * 8 and ledger["dropped/failed"] > 0
    assert ledger["issued"] == sum(count for name, count in ledger.items() if name != "issued")
    last = run.metrics[-1]
    for trouble, kind in (("raise", "raised"), ("hang", "hung"), ("nonsense", "nonsense"), ("die", "lost")):
        assert last[f"env_workers/failures/{trouble}/{kind}"] > 0
    log = (run.folder / "logs" / "driver.log").read_text()
    assert "the copier is on fire" in log
    for trouble in troubles:
        assert f"environment `{trouble}`, seed " in log
    assert last["env_workers/restarts"] > 0
    assert sum(step.get("cpu_seconds/environments", 0.0) for step in run.metrics) > 0


@pytest.mark.timeout(120)
@tier("all")
def test_spare_episodes_keep_groups_whole(task):
    """Every third episode fails; with as many spare ones as a group has, no group is lost."""
    envs = {"copy": {"env_type": "copy_games:FirstFails", "max_steps": 4, "max_tokens_per_step": 1}}
    config = agentic_config(task, envs, max_steps=2, train_env_manager__group_size_redundancy=8)
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    ledger = run.summary["ledger"]
    assert ledger["issued"] == ledger["consumed"] == 16
    assert run.metrics[-1]["env_workers/failures/copy/raised"] > 0


@pytest.mark.timeout(120)
@tier("all")
def test_a_run_whose_environments_never_work_ends_with_the_cause(task):
    envs = {
        "copy": {
            "env_type": "copy_games:Copy",
            "env_config": {"trouble": "raise", "period": 1},
            "max_steps": 4,
            "max_tokens_per_step": 1,
        }
    }
    config = agentic_config(task, envs, max_group_retries=0, max_consecutive_refunds=3)
    run = run_pipeline(task, IN_THIS_PROCESS, config, expect=1)
    assert "the copier is on fire" in json.dumps(run.summary)


@pytest.mark.timeout(120)
@tier("all")
def test_a_first_observation_that_is_too_long_is_said_with_the_key_to_raise(task):
    config = agentic_config(task, prompt_length=1, max_consecutive_refunds=3)
    run = run_pipeline(task, IN_THIS_PROCESS, config, expect=1)
    assert "prompt_length" in run.summary["error"] and "copy" in run.summary["error"]
