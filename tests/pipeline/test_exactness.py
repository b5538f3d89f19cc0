"""Promise 2: with ratio 0 a run is bit-identical to a plain generate-then-train loop.

The plain loop below is written with the strategies alone: no scheduler, no stages, no workers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_cluster import IN_THIS_PROCESS
from reward_functions import digit_reward
from runs import run_pipeline
from safetensors.torch import load_file
from tiny import make_tokenizer, tiny_config

from roll.algorithms.advantages.base import estimate_advantages, make_advantage_estimator
from roll.algorithms.objective import PolicyObjective
from roll.configs.loader import config_from_tree
from roll.data.prompts import load_prompts
from roll.data.records import SampleBatch, derive_seed
from roll.data.stream import PromptStream
from roll.engines.base import GenerateRequest, SamplingParams
from roll.engines.hf.strategy import HFInferStrategy
from roll.pipeline.rollout_function import sample_from_completion
from roll.trainers.fsdp2 import Fsdp2TrainStrategy
from roll.trainers.model import save
from roll.weights.buckets import pack_buckets
from tests.trainers.trainers import trainer_setup

STEPS = 5


@dataclass
class Plain:
    """What the plain loop came to."""

    model: Path
    steps: list[list[float]]
    """Mean reward, loss and norm of the gradient of each."""


@pytest.fixture(scope="module")
def plain(task, tmp_path_factory) -> Plain:
    """Generate, judge, train, load the weights; five times."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("plain")
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
    steps = asyncio.run(_loop(config, stream, tokenizer, engine, trainer, objective, estimator, digit_reward))
    save(trainer, str(out))
    trainer.shutdown()
    return Plain(out, steps)


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


def different(first: Path, second: Path) -> list[str]:
    """Tensors of two models of which any bit differs."""
    one, other = final_weights(first), final_weights(second)
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def assert_is_the_plain_loop(run, plain: Plain) -> None:
    assert different(run.folder / "checkpoints" / f"step-{STEPS}", plain.model) == []
    assert [[step["reward/mean"], step["actor/loss"], step["actor/grad_norm"]] for step in run.metrics] == plain.steps


COLOCATED = {"cluster__num_devices_per_node": 1, "actor_infer__device_mapping": [0]}
IN_PIECES = {
    "weight_update__param_update_gather_bucket_size_mb": 0.01,
    "weight_update__param_update_load_bucket_size_mb": 0.005,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rewards__addition__verifier": "reward_functions:late_reward"},
        COLOCATED,
        {**IN_PIECES, "weight_update__transport": "object_store"},
        {**IN_PIECES, **COLOCATED, "weight_update__transport": "checkpoint"},
        {**IN_PIECES, "weight_update__transport": "shared_memory", "weight_update__dual_buffer": False},
        {**IN_PIECES, **COLOCATED, "weight_update__dual_buffer": False},
    ],
    ids=["split", "late rewards", "colocated", "object store", "files", "one half", "colocated with one half"],
)
def test_ratio_zero_is_the_plain_loop_bit_for_bit_however_rewards_and_weights_travel(task, plain, changes):
    run = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, max_steps=STEPS, **changes))
    assert_is_the_plain_loop(run, plain)
    parts = {f"weights/{part}_seconds" for part in ("gather", "send", "fetch", "load", "stall")}
    assert all(parts <= step.keys() for step in run.metrics)
    assert not (run.folder / "weights").exists()


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "changes", [{}, {**IN_PIECES, **COLOCATED, "weight_update__transport": "object_store"}], ids=["split", "colocated"]
)
def test_across_processes_it_is_so_too(task, plain, ray_cluster, changes):
    assert_is_the_plain_loop(run_pipeline(task, ray_cluster, tiny_config(task, max_steps=STEPS, **changes)), plain)


def test_the_plain_loop_learns_something_and_another_seed_gives_another_run(task, plain):
    assert "model.embed_tokens.weight" in different(plain.model, task / "model")
    other = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, max_steps=1, seed=8))
    assert other.metrics[0]["actor/loss"] != plain.steps[0][1]
