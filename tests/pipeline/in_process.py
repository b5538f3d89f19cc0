"""A configuration trained in this process: no Ray, no stages, one trainer and one engine, always one step off policy.

What a whole run adds to it is tested by whole runs; this is for the many settings of the mathematics, each of which
would cost a start of three processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny import write_config

from roll.check.config import check_config
from roll.configs.loader import load_config
from roll.data.prompts import PromptStream
from roll.engines.hf.strategy import HFInferStrategy
from roll.pipeline.algorithm import TrainingBatch, add_advantages, add_correction, select_tokens
from roll.pipeline.preflight import Prepared, prepare
from roll.pipeline.rlvr import RolloutFunction
from roll.pipeline.rollouts import sampling_params
from roll.rewards.base import RewardInput, RewardOutput
from roll.rewards.registry import checked_output
from roll.trainers.fsdp2 import Fsdp2TrainStrategy
from roll.trainers.worker import TrainPlan, optimizer_batches
from roll.weights.buckets import pack_buckets
from tests.trainers.trainers import trainer_setup


class Engine:
    """`hf_infer` as the generator of a rollout function."""

    def __init__(self, prepared: Prepared) -> None:
        config = prepared.config
        self.strategy = HFInferStrategy(
            config.pretrain,
            device="cpu",
            dtype="float32",
            attn_implementation="sdpa",
            max_length=config.prompt_length + config.response_length,
            strategy_config={},
        )

    async def generate(self, request, sticky_key=None, min_version=None):
        return await self.strategy.generate(request)

    def forget(self, sticky_key) -> None:
        """There is one replica."""

    async def load(self, weights: Sequence[tuple[str, torch.Tensor]], version: int) -> None:
        await self.strategy.prepare_weights(pack_buckets(iter(weights), 1 << 20), version)
        await self.strategy.pause("keep")
        await self.strategy.load_weights(version)
        await self.strategy.resume()


class Judge:
    """Scores by a function of response and truth, and the weights of the run's one reward."""

    def __init__(self, reward, weights) -> None:
        self.reward, self.weights = reward, weights

    async def score(self, domain: str, records: Sequence[RewardInput]) -> list[RewardOutput]:
        values = [self.reward(record.response_text, record.ground_truth) for record in records]
        return [checked_output("the reward", value, self.weights) for value in values]


def train_in_process(folder: Path, tree: dict[str, Any], reward) -> list[dict[str, float]]:
    """The metrics of each step, and ``moved``: whether any weight is another one after it. ``tree``: a whole
    configuration, checked as by the command line."""
    prepared = prepare(check_config(load_config(str(write_config(folder, tree)), [])))
    return asyncio.run(_train(prepared, reward))


async def _train(prepared: Prepared, reward) -> list[dict[str, float]]:
    config = prepared.config
    engine = Engine(prepared)
    trainer = Fsdp2TrainStrategy(
        trainer_setup(
            config.pretrain,
            training_args=config.actor_train.training_args,
            total_optimizer_steps=config.max_steps,
            seed=config.seed,
        )
    )
    rollouts = RolloutFunction(
        generator=engine,
        judge=Judge(reward, *(section.weights for section in config.rewards.values())),
        decoder=prepared.tokenizer,
        sampling=sampling_params(config.actor_infer.generating_args, config.response_length),
        samples_per_group=config.num_return_sequences_in_group,
        run_seed=config.seed,
        purpose="train",
        greedy_baseline=prepared.advantages.estimator.requirements.needs_greedy_baseline,
    )
    stream = PromptStream(prepared.rollouts.prompts, seed=config.seed)
    trainer.initialize()
    await engine.strategy.start()
    try:
        metrics = []
        for step in range(config.max_steps):
            first = step * config.rollout_batch_size
            before = [(name, weight.clone()) for name, weight in trainer.published_weights()]
            groups = await asyncio.gather(
                *(rollouts(first + index, next(stream)) for index in range(config.rollout_batch_size))
            )
            batch = TrainingBatch.from_groups(step, list(groups))
            batch.describe_rollouts()
            batch.metrics.update(add_advantages(batch, prepared.advantages))
            if prepared.correction is not None or "proximal_logprobs" in prepared.objective.token_fields:
                batch.data.tokens["proximal_logprobs"] = trainer.log_probs(batch.data, 1.0)
            if prepared.correction is not None:
                corrected = add_correction(batch, prepared.correction, prepared.objective)
                batch.metrics.update({f"correction/{name}": value for name, value in corrected.items()})
            select_tokens(batch, prepared.objective, config.seed)
            plan = TrainPlan(step, config.ppo_epochs, len(batch.data), 1.0)
            for rows in optimizer_batches(len(batch.data), plan, config.seed):
                batch.metrics.update(trainer.train_step(batch.data.select(rows), prepared.objective, plan.temperature))
            after = dict(trainer.published_weights())
            batch.metrics["moved"] = float(any(not torch.equal(weight, after[name]) for name, weight in before))
            # What it trained on in this step is what the engine samples the next step from: a lag of one.
            await engine.load(before, step)
            metrics.append(batch.metrics)
        return metrics
    finally:
        await engine.strategy.shutdown()
        trainer.shutdown()
