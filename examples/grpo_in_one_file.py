"""GRPO in one file: one process, one thing after the other, made of the library's parts.

    python examples/quickstart/make_model.py        # once: the tiny model and its additions
    python examples/grpo_in_one_file.py [CONFIG.yaml] [key=value ...]

Read this first to see what a run does: take prompts, sample, judge, compare, learn, hand the weights over. A run of the
pipeline with the same settings and `async_generation_ratio: 0` has the same rewards, losses and weights, to the last
bit; `tests/pipeline/test_exactness.py` compares them. What the pipeline adds is everything that can go wrong: several
processes and devices, work ahead of time, restarts, checkpoints.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from roll.algorithms.advantages.base import AdvantageEstimator, estimate_advantages, make_advantage_estimator
from roll.algorithms.objective import PolicyObjective
from roll.configs import derived
from roll.configs.loader import load_config
from roll.data.prompts import PromptStream, load_prompts
from roll.data.records import Prompt, Sample, SampleBatch, derive_seed
from roll.data.tokenizer import load_tokenizer
from roll.engines.base import GenerateRequest, SamplingParams
from roll.engines.hf.strategy import HFInferStrategy
from roll.rewards.base import RewardInput
from roll.rewards.registry import Verifier, checked_output, resolve_verifier
from roll.runtime.placement import free_port
from roll.trainers.base import TrainerSetup
from roll.trainers.fsdp2 import Fsdp2TrainStrategy
from roll.trainers.model import save
from roll.weights.buckets import pack_buckets

QUICKSTART = Path(__file__).parent / "quickstart" / "rlvr.yaml"
BUCKET_BYTES = 64 * 2**20


@dataclass
class Step:
    """Result of one training step."""

    reward: float
    loss: float
    grad_norm: float


@dataclass
class Generator:
    """Samples responses of the current policy and judges them."""

    engine: HFInferStrategy
    tokenizer: PreTrainedTokenizerBase
    verifier: Verifier
    sampling: SamplingParams
    seed: int

    async def group(self, group_id: int, prompt: Prompt, size: int) -> list[Sample]:
        """Return the samples of one prompt. Each has a random stream of its own, so their order does not matter."""
        return await asyncio.gather(*(self._sample(group_id, index, prompt) for index in range(size)))

    async def _sample(self, group_id: int, index: int, prompt: Prompt) -> Sample:
        seed = derive_seed(self.seed, "train", group_id, index, 0)
        request = GenerateRequest(f"{group_id}-{index}", prompt.token_ids, replace(self.sampling, seed=seed))
        response = await self.engine.generate(request)
        text = self.tokenizer.decode(response.token_ids.tolist(), skip_special_tokens=True)
        judged = self.verifier(RewardInput(prompt.prompt_id, prompt.text, text, prompt.ground_truth, prompt.domain))
        score = checked_output(self.verifier.name, judged).score
        given, sampled = len(prompt.token_ids), len(response.token_ids)
        return Sample(
            token_ids=np.concatenate([prompt.token_ids, response.token_ids]),
            response_mask=np.repeat([False, True], [given, sampled]),
            behaviour_logprobs=np.concatenate([np.zeros(given, np.float32), response.logprobs]),
            versions=np.concatenate([np.full(given, -1, np.int32), response.versions]),
            finish_reason=response.finish_reason,
            response_text=text,
            score=score,
            reward=score,
        )


async def train(config_file: Path, overrides: Sequence[str] = (), export: Path | None = None) -> list[Step]:
    """Train, print each step, and return them all. ``export``: where the trained model is written."""
    config = derived.prompted(load_config(config_file, overrides))
    torch.set_num_threads(1)  # as each process of a run on a CPU has

    # The data: prompts as token ids, shuffled anew in each epoch.
    tokenizer = load_tokenizer(config.pretrain)
    data = config.actor_train.data_args
    prompts = load_prompts(data, tokenizer, prompt_length=config.prompt_length, path="data", seed=config.seed)
    stream = PromptStream(prompts, seed=config.seed, shuffle=data.shuffle)

    # The engine that samples, and the verifier that judges.
    engine = HFInferStrategy(
        config.pretrain,
        device="cpu",
        dtype="float32",
        attn_implementation="sdpa",
        max_length=config.prompt_length + config.response_length,
        strategy_config={},
    )
    await engine.start()
    (name, reward), *_ = config.rewards.items()
    sampling = SamplingParams(config.response_length, temperature=config.actor_infer.generating_args.temperature)
    generator = Generator(engine, tokenizer, resolve_verifier(reward, f"rewards.{name}"), sampling, config.seed)

    # The trainer: the model that learns and its optimizer.
    trainer = Fsdp2TrainStrategy(
        TrainerSetup(
            config.actor_train,
            model_path=config.pretrain,
            total_optimizer_steps=config.max_steps,
            seed=config.seed,
            master_port=free_port(),
        )
    )
    trainer.initialize()

    # The algorithm: from rewards to advantages, and from advantages to a loss.
    estimator = make_advantage_estimator(config.adv_estimator)
    objective = PolicyObjective(config.response_length, config.actor_train.pg_variant)

    steps: list[Step] = []
    numbered = enumerate(stream)
    for number in range(config.max_steps):
        started = time.monotonic()
        groups = await asyncio.gather(
            *(
                generator.group(*next(numbered), config.num_return_sequences_in_group)
                for _ in range(config.rollout_batch_size)
            )
        )
        batch = batch_of(groups, estimator)
        metrics = trainer.train_step(batch, objective, sampling.temperature)
        await hand_over(trainer, engine, number + 1)
        steps.append(Step(float(batch.per_sample["rewards"].mean()), metrics["loss"], metrics["grad_norm"]))
        print(f"step {number + 1:3d}  reward {steps[-1].reward:.3f}  {time.monotonic() - started:.1f} s", flush=True)

    if export is not None:
        save(trainer, str(export))
    await engine.shutdown()
    trainer.shutdown()
    return steps


def batch_of(groups: Sequence[Sequence[Sample]], estimator: AdvantageEstimator) -> SampleBatch:
    """Put the samples of all groups into one batch, with their advantages: each is compared with its group."""
    batch = SampleBatch.from_samples([sample for group in groups for sample in group])
    group_of_sample = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    mask = batch.padded("response_mask", fill=False)
    advantages = estimate_advantages(
        estimator, torch.from_numpy(batch.per_sample["rewards"]), torch.from_numpy(mask), group_of_sample
    )
    inside = np.arange(mask.shape[1])[None, :] < batch.lengths[:, None]
    batch.tokens["advantages"] = advantages.numpy()[inside]
    return batch


async def hand_over(trainer: Fsdp2TrainStrategy, engine: HFInferStrategy, version: int) -> None:
    """Load the trainer's weights into the engine, so that the next samples are of the policy that has just learned."""
    await engine.prepare_weights(pack_buckets(trainer.published_weights(), BUCKET_BYTES), version)
    await engine.pause("keep")
    await engine.load_weights(version)
    await engine.resume()


if __name__ == "__main__":
    files = [Path(each) for each in sys.argv[1:] if "=" not in each] or [QUICKSTART]
    asyncio.run(train(files[0], [each for each in sys.argv[1:] if "=" in each]))
