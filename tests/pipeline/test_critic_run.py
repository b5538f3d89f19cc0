"""PPO with a critic, as a whole run."""

from __future__ import annotations

import numpy as np
import pytest
from runs import FinishedRun, run_pipeline
from safetensors.torch import load_file
from tiny import tiny_config, write_config

from roll.cli.main import main

pytestmark = pytest.mark.timeout(300)


def critic_config(task, **changes):
    return tiny_config(
        task,
        **{
            "rollout_batch_size": 16,
            "adv_estimator": "gae",
            "whiten_advantages": True,
            "actor_train__training_args__learning_rate": 5e-3,
            "critic": {"device_mapping": [0], "training_args": {"learning_rate": 3e-3}},
        }
        | changes,
    )


@pytest.mark.tier("soak")
def test_a_policy_learns_with_a_critic_that_learns_first(task, ray_cluster):
    run = run_pipeline(task, ray_cluster, critic_config(task, max_steps=30, async_generation_ratio=1, critic_warmup=3))
    rewards = [step["reward/mean"] for step in run.metrics]
    assert np.mean(rewards[-6:]) - np.mean(rewards[:3]) > 0.25
    # Its mean comes near that of the returns, which move away meanwhile. (Single tokens: test_critic.py.)
    first, last = run.metrics[0], run.metrics[-1]
    assert abs(last["critic/value"] - last["critic/return"]) < 0.3 * first["critic/return"]
    assert run.summary["lag/max"] == 1


@pytest.mark.tier("all")
def test_a_critic_learns_first_and_its_run_goes_on_to_the_bit(task, ray_cluster):
    """From a checkpoint of its middle, once more: the critic, its optimizer and the policy's are what they were."""
    run = run_pipeline(task, ray_cluster, critic_config(task, max_steps=6, save_steps=3, critic_warmup=2))

    def told(run: FinishedRun):
        names = ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "critic/value")
        steps = [{name: step.get(name) for name in names} for step in run.metrics]
        return steps, load_file(run.folder / "checkpoints" / "step-6" / "model.safetensors")

    steps, weights = told(run)
    assert steps[0]["critic/value"] == 0 != steps[5]["critic/value"]
    assert ["actor/loss" in step for step in run.metrics] == [False] * 2 + [True] * 4
    assert {"idle/critic", "tokens_per_second/critic", "time/value", "time/critic"} <= run.metrics[-1].keys()
    middle = run.folder / "checkpoints" / "step-3"
    assert (middle / "state" / "critic").is_dir()
    again = critic_config(task, max_steps=6, save_steps=3, critic_warmup=2, resume_from_checkpoint=str(middle))
    again["cluster"]["address"] = ray_cluster
    assert main(["--config", str(write_config(task, again, "again.yaml"))]) == 0
    assert (run.folder / "checkpoints" / "abandoned-step-6").is_dir(), "nothing was done again"
    steps_again, weights_again = told(run)
    assert steps_again == steps
    assert all((weights_again[name] == weights[name]).all() for name in weights)
