"""PPO with a critic, as a whole run."""

from __future__ import annotations

import numpy as np
import pytest
from runs import run_pipeline
from tiny import make_task, tiny_config

from roll.pipeline.checkpoints import saved_steps


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


def critic_config(task, **changes):
    return tiny_config(
        task,
        **{
            "max_steps": 40,
            "rollout_batch_size": 16,
            "adv_estimator": "gae",
            "whiten_advantages": True,
            "actor_train__training_args__learning_rate": 5e-3,
            "critic": {"device_mapping": [0], "training_args": {"learning_rate": 1e-2}},
        }
        | changes,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ratio", [0, 1])
def test_ppo_with_a_critic_learns_and_so_does_the_critic(task, ray_cluster, ratio):
    config = critic_config(task, async_generation_ratio=ratio, critic_warmup=3, save_steps=20)
    run = run_pipeline(task, ray_cluster, config)
    rewards = [step["reward/mean"] for step in run.metrics]
    assert np.mean(rewards[-8:]) - np.mean(rewards[:4]) > 0.25
    assert "actor/loss" not in run.metrics[2] and "actor/loss" in run.metrics[3]
    assert run.metrics[-1]["critic/loss"] < run.metrics[0]["critic/loss"]
    assert run.metrics[0]["critic/value"] == 0
    assert np.mean([step["critic/explained_variance"] for step in run.metrics[-8:]]) > 0
    assert {"idle/critic", "tokens_per_second/critic", "time/value", "time/critic"} <= run.metrics[-1].keys()
    assert saved_steps(run.folder / "checkpoints") == [20, 40]
    assert (run.folder / "checkpoints" / "step-40" / "state" / "critic").is_dir()
    assert run.summary["lag/max"] <= ratio
