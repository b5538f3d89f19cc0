"""Promise 2: with ratio 0 a run is bit-identical to a plain generate-then-train loop.

The plain loop below is written with the strategies alone: no scheduler, no stages, no Ray.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import run_pipeline
from safetensors.torch import load_file
from tiny import make_tokenizer, tiny_config

from roll.algorithms.advantages import estimate_advantages, make_advantage_estimator
from roll.algorithms.objective import PolicyObjective
from roll.configs.loader import config_from_tree
from roll.data.dataset import load_prompts
from roll.data.interleave import PromptStream
from roll.data.records import SampleBatch
from roll.data.seeds import derive_seed
from roll.pipeline.rollout_function import sample_from_completion
from roll.strategies.infer.base import GenerateRequest, SamplingParams
from roll.strategies.infer.hf_infer import HFInferStrategy
from roll.strategies.train.export import save
from roll.strategies.train.fsdp2 import Fsdp2TrainStrategy
from roll.strategies.weights import pack_buckets
from tests.strategies.train.trainers import trainer_setup

STEPS = 5


@pytest.fixture(scope="module")
def ratio_zero_run(task, ray_cluster):
    return run_pipeline(task, ray_cluster, tiny_config(task, max_steps=STEPS))


def plain_loop(task: Path, out: Path) -> None:
    """Generate, judge, train, load the weights; five times. Runs in a process of its own."""
    from reward_functions import digit_reward

    torch.set_num_threads(1)
    config = config_from_tree(tiny_config(task, max_steps=STEPS))
    tokenizer = make_tokenizer()
    prompts = load_prompts(
        config.actor_train.data_args, tokenizer, prompt_length=config.prompt_length, path="", seed=config.seed
    )
    stream = PromptStream(prompts, seed=config.seed)
    trainer = Fsdp2TrainStrategy(
        trainer_setup(
            config.pretrain,
            model_args=config.actor_train.model_args,
            training_args=config.actor_train.training_args,
            total_optimizer_steps=STEPS,
            max_tokens=config.actor_train.max_tokens_per_microbatch_in_train,
            seed=config.seed,
        )
    )
    trainer.initialize()
    engine = HFInferStrategy(
        config.pretrain, device="cpu", dtype="float32", attn_implementation="sdpa", max_length=8, strategy_config={}
    )
    objective = PolicyObjective(max_response_length=config.response_length, pg_variant="ppo")
    estimator = make_advantage_estimator("grpo", {})
    rewards = asyncio.run(_loop(config, stream, tokenizer, engine, trainer, objective, estimator, digit_reward))
    save(trainer, str(out / "model"))
    (out / "rewards.json").write_text(json.dumps(rewards))
    trainer.shutdown()


async def _loop(config, stream, tokenizer, engine, trainer, objective, estimator, reward):
    await engine.start()
    rewards = []
    group_id = 0
    for step in range(STEPS):
        samples, groups = [], []
        for _ in range(config.rollout_batch_size):
            prompt = next(stream)
            for index in range(config.num_return_sequences_in_group):
                seed = derive_seed(config.seed, "train", group_id, index, 0)
                sampling = SamplingParams(max_new_tokens=config.response_length, seed=seed)
                request = GenerateRequest(f"{group_id}-{index}", prompt.token_ids, sampling)
                completion = await engine.generate(request)  # One at a time: as plain as it gets.
                text = tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
                sample = sample_from_completion(prompt, completion, text)
                sample.score = sample.reward = reward(text, prompt.ground_truth)
                samples.append(sample)
                groups.append(group_id)
            group_id += 1
        batch = SampleBatch.from_samples(samples)
        mask = batch.padded("response_mask", fill=False)
        advantages = estimate_advantages(
            estimator, torch.from_numpy(batch.per_sample["rewards"]), torch.from_numpy(mask), np.array(groups)
        ).numpy()
        inside = np.arange(mask.shape[1])[None, :] < batch.lengths[:, None]
        batch.tokens["advantages"] = advantages[inside]
        metrics = trainer.train_step(batch, objective, 1.0)
        rewards.append([float(batch.per_sample["scores"].mean()), metrics["loss"], metrics["grad_norm"]])
        await engine.prepare_weights(pack_buckets(trainer.named_weights(), 1 << 20), step + 1)
        await engine.pause("keep")
        await engine.load_weights(step + 1)
        await engine.resume()
    await engine.shutdown()
    return rewards


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    one, other = final_weights(first), final_weights(second)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"tensors differ: {different}"


def test_ratio_zero_is_the_plain_loop_bit_for_bit(task, ratio_zero_run, tmp_path):
    command = [sys.executable, __file__, str(task), str(tmp_path)]
    subprocess.run(command, check=True, timeout=200, cwd=Path(__file__).parent)
    assert_same_weights(tmp_path / "model", ratio_zero_run.folder / "checkpoints" / f"step-{STEPS}")
    plain = json.loads((tmp_path / "rewards.json").read_text())
    run = [[step["reward/mean"], step["actor/loss"], step["actor/grad_norm"]] for step in ratio_zero_run.metrics]
    assert run == plain
    assert not torch.equal(
        final_weights(tmp_path / "model")["model.embed_tokens.weight"],
        final_weights(task / "model")["model.embed_tokens.weight"],
    )


def test_a_second_run_with_the_same_seed_is_identical_although_its_rewards_come_late(task, ratio_zero_run, ray_cluster):
    config = tiny_config(task, max_steps=STEPS, rewards__addition__verifier="reward_functions:late_reward")
    again = run_pipeline(task, ray_cluster, config)
    assert_same_weights(
        again.folder / "checkpoints" / f"step-{STEPS}", ratio_zero_run.folder / "checkpoints" / f"step-{STEPS}"
    )
    assert [step["actor/loss"] for step in again.metrics] == [step["actor/loss"] for step in ratio_zero_run.metrics]


def test_another_seed_gives_another_run(task, ratio_zero_run, ray_cluster):
    other = run_pipeline(task, ray_cluster, tiny_config(task, max_steps=1, seed=8))
    assert other.metrics[0]["actor/loss"] != ratio_zero_run.metrics[0]["actor/loss"]


def test_roles_on_the_same_devices_give_the_same_run_as_roles_apart(task, ratio_zero_run, ray_cluster):
    config = tiny_config(
        task,
        max_steps=STEPS,
        cluster__num_devices_per_node=1,
        actor_infer__device_mapping=[0],
    )
    colocated = run_pipeline(task, ray_cluster, config)
    assert_same_weights(
        colocated.folder / "checkpoints" / f"step-{STEPS}", ratio_zero_run.folder / "checkpoints" / f"step-{STEPS}"
    )


@pytest.mark.parametrize(
    ("transport", "dual_buffer", "colocated"),
    [("object_store", True, False), ("checkpoint", True, True), ("shared_memory", False, False), ("auto", False, True)],
)
def test_however_the_weights_travel_the_run_is_the_same(
    task, ratio_zero_run, ray_cluster, transport, dual_buffer, colocated
):
    devices = {"cluster__num_devices_per_node": 1, "actor_infer__device_mapping": [0]} if colocated else {}
    config = tiny_config(
        task,
        max_steps=STEPS,
        weight_update__transport=transport,
        weight_update__dual_buffer=dual_buffer,
        weight_update__param_update_gather_bucket_size_mb=0.01,
        weight_update__param_update_load_bucket_size_mb=0.005,
        **devices,
    )
    run = run_pipeline(task, ray_cluster, config)
    last = f"step-{STEPS}"
    assert_same_weights(run.folder / "checkpoints" / last, ratio_zero_run.folder / "checkpoints" / last)
    assert [step["reward/mean"] for step in run.metrics] == [step["reward/mean"] for step in ratio_zero_run.metrics]
    parts = {f"weights/{part}_seconds" for part in ("gather", "send", "fetch", "load", "stall")}
    assert all(parts <= step.keys() for step in run.metrics)
    assert not (run.folder / "weights").exists()


if __name__ == "__main__":
    plain_loop(Path(sys.argv[1]), Path(sys.argv[2]))
