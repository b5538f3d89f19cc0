"""Trainer and vLLM on the same weights: what one records the other computes again, before and after real updates."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch.distributed as dist

from roll.algorithms.objective import PolicyObjective
from roll.configs.schema import TrainingArguments
from roll.data.records import SampleBatch
from roll.strategies.train import build_train_strategy
from roll.strategies.weights import pack_buckets
from tests.strategies.infer.vllm_helpers import assert_close, request
from tests.strategies.train.trainers import trainer_setup

PROMPT = (5, 6, 7)
SAMPLES = 24


@pytest.fixture
def trainer(vllm_path):
    arguments = TrainingArguments(learning_rate=3e-3)
    trainer = build_train_strategy("fsdp2_train", trainer_setup(vllm_path, training_args=arguments))
    trainer.initialize()
    yield trainer
    dist.destroy_process_group()


def sampled(engine, step: int) -> SampleBatch:
    """Responses of the engine as the trainer gets them."""

    async def scenario():
        requests = [request(f"{step}-{i}", 40, PROMPT, seed=1000 * step + i) for i in range(SAMPLES)]
        return await asyncio.gather(*(engine.strategy.generate(each) for each in requests))

    completions = engine.run(scenario)
    head = np.zeros(len(PROMPT), dtype=np.float32)
    rng = np.random.default_rng(step)
    return SampleBatch(
        np.array([len(PROMPT) + len(each.token_ids) for each in completions], dtype=np.int64),
        {
            "token_ids": np.concatenate([part for each in completions for part in (np.array(PROMPT), each.token_ids)]),
            "response_mask": np.concatenate([[False] * 3 + [True] * len(each.token_ids) for each in completions]),
            "behaviour_logprobs": np.concatenate([part for each in completions for part in (head, each.logprobs)]),
            "advantages": np.concatenate(
                [np.full(3 + len(each.token_ids), rng.normal(), dtype=np.float32) for each in completions]
            ),
            "versions": np.concatenate([np.full(3 + len(each.token_ids), step) for each in completions]),
        },
    )


def assert_agreement(trainer, batch):
    mask = batch.tokens["response_mask"]
    assert_close(batch.tokens["behaviour_logprobs"][mask], trainer.log_probs(batch, 1.0)[mask])


def test_logprobs_agree_before_and_after_twenty_updates(published, trainer):
    batch = first = sampled(published, 0)
    assert_agreement(trainer, batch)
    objective = PolicyObjective(SAMPLES, "ppo", {}, "token-mean")
    for step in range(1, 21):
        metrics = trainer.train_step(batch, objective, 1.0)
        assert metrics["skipped_updates"] == 0
        published.version += 1
        published.run(load, published, list(pack_buckets(trainer.named_weights(), 100_000)))
        batch = sampled(published, step)
        assert_agreement(trainer, batch)
    mask = first.tokens["response_mask"]
    moved = np.abs(trainer.log_probs(first, 1.0) - first.tokens["behaviour_logprobs"])[mask]
    assert moved.mean() > 0.1, "the updates changed nothing, so agreement after them proves nothing"


async def load(engine, buckets):
    await engine.strategy.prepare_weights(buckets, engine.version)
    await engine.strategy.pause("keep")
    await engine.strategy.load_weights(engine.version)
    await engine.strategy.resume()
