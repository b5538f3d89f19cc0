"""With a lambda as reward, a local function as loss and a local class as environment, runs learn, in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
from tiny import make_task

import roll
from roll.agentic.base import AnyText
from tests.pipeline.test_agentic_runs import agentic_config

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)


@pytest.mark.tier("soak")  # tests/api/test_training.py has a run of the same kind that is short
def test_the_quick_start_is_learned_by_a_lambda_and_a_local_loss(tmp_path, warm_commands):
    script = ROOT / "examples" / "quickstart" / "make_model.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True, capture_output=True)

    def loss(inputs, clip: float = 0.2):
        ratio, advantages = inputs.ratio(), inputs.advantages
        clipped = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        return -clipped, {"clip_fraction": ((ratio - 1).abs() > clip).to(ratio.dtype)}

    overrides = [
        f"pretrain={tmp_path}/model",
        f"actor_train.data_args.file_name={tmp_path}/data/train.jsonl",
        f"validation.data_args.file_name={tmp_path}/data/val.jsonl",
        f"output_dir={tmp_path}/out",
    ]
    run = roll.train(
        str(ROOT / "examples" / "quickstart" / "rlvr.yaml"),
        reward=lambda response, ground_truth: float(response == ground_truth),
        loss=loss,
        overrides=overrides,
    )
    first, last = run.summary["val/first"]["addition"], run.summary["val/last"]["addition"]
    assert run.status == "success" and last > first + 0.2


@pytest.mark.tier("soak")
@pytest.mark.needs("vllm", "peft")
def test_the_quick_start_is_learned_by_adapters_that_travel_alone_to_vllm(tmp_path, warm_commands):
    script = ROOT / "examples" / "quickstart" / "make_model.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True, capture_output=True)
    overrides = [
        f"pretrain={tmp_path}/model",
        f"actor_train.data_args.file_name={tmp_path}/data/train.jsonl",
        f"validation.data_args.file_name={tmp_path}/data/val.jsonl",
        f"output_dir={tmp_path}/out",
        "max_steps=40",
        "actor_infer.strategy_args.strategy_name=vllm",
        "actor_infer.strategy_args.strategy_config.max_num_seqs=128",
        "actor_train.model_args.lora_target=all-linear",
        "actor_train.model_args.lora_rank=16",
        "actor_train.training_args.learning_rate=3.0e-3",
        "weight_update.content=adapter",
        "weight_update.canary_interval=1",
    ]
    run = roll.train(str(ROOT / "examples" / "quickstart" / "rlvr.yaml"), overrides=overrides)
    first, last = run.summary["val/first"]["addition"], run.summary["val/last"]["addition"]
    assert run.status == "success" and last > max(0.9, first + 0.2)
    rows = run.metrics if isinstance(run.metrics, list) else run.metrics.to_dict("records")
    assert len(rows) == 41 and all(row["mismatch/canary_abs_mean"] < 1e-5 for row in rows)
    assert {row["weights/bytes"] for row in rows[1:]} == {rows[1]["weights/bytes"]} and rows[1]["weights/bytes"] < 1e6


@pytest.mark.parametrize("steps", [pytest.param(2, marks=pytest.mark.tier("all"), id="reached"), 30])
@pytest.mark.tier("soak")
def test_a_local_environment_is_reached_and_learned(tmp_path, warm_commands, steps):
    make_task(tmp_path)

    class Copy(gymnasium.Env):
        """The observation is a digit, and so is the right answer."""

        observation_space = action_space = AnyText()

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.digit = str(int(self.np_random.integers(3)))
            return self.digit, {}

        def step(self, action):
            return "", float(action == self.digit), True, False, {"success": action == self.digit}

    config = agentic_config(
        tmp_path,
        {"copy": {"max_steps": 1, "max_tokens_per_step": 1}},
        max_steps=steps,
        adv_estimator="grpo",
        output_dir=str(tmp_path / "out"),
        actor_train__training_args__learning_rate=5e-3,
    )
    run = roll.train(config, env=Copy)
    rows = run.metrics if isinstance(run.metrics, list) else run.metrics.to_dict("records")
    rewards = [row["reward/mean"] for row in rows[1:]]
    assert run.config.custom_envs["copy"].env_type == "given from Python: Copy"
    assert any(rewards), "an untrained policy is right at times"
    if steps > 2:
        assert sum(rewards[-8:]) / 8 > sum(rewards[:4]) / 4 + 0.2
