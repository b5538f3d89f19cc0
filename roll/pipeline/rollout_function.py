"""Rollout of one RLVR group: sample the prompt n times and judge each response.

Everything random derives from (run seed, group id, sample index, turn), so a group can be generated again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from roll.configs.roles import GeneratingArguments
from roll.data.records import Group, Prompt, Sample, derive_seed
from roll.engines.base import Completion, GenerateRequest, SamplingParams
from roll.pipeline.rollout_side import Generator
from roll.rewards.base import RewardInput, RewardOutput


class Judge(Protocol):
    """An object that judges the responses to prompts of a domain."""

    async def score(self, domain: str, records: Sequence[RewardInput]) -> list[RewardOutput]:
        """Return the outputs of ``records``, prompts of one domain, in their order. Raises `RewardFailed`."""


class Decoder(Protocol):
    """The part of a tokenizer that turns a response into text."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, without special tokens if asked for."""


@dataclass(frozen=True)
class RolloutFunction:
    """Generation and reward of one group; one object serves training, another one validation."""

    generator: Generator
    judge: Judge
    decoder: Decoder
    sampling: SamplingParams
    samples_per_group: int
    run_seed: int
    purpose: str
    """Part of each request's name and seed: ``train`` or ``validation``."""
    separate_requests: bool = True
    """False keeps the samples of a group on one replica."""
    greedy_baseline: bool = False
    """True if each group also gets the score of one greedy response."""

    async def __call__(self, group_id: int, prompt: Prompt, min_version: int | None = None) -> Group:
        """Make the group with weights of ``min_version`` or newer. Raises the errors of the engine and the verifier."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._sample(group_id, index, prompt, min_version, self.sampling))
                    for index in range(self.samples_per_group)
                ]
                if self.greedy_baseline:
                    greedy = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0)
                    running.append(
                        tasks.create_task(self._sample(group_id, self.samples_per_group, prompt, min_version, greedy))
                    )
        finally:
            if not self.separate_requests:
                self.generator.forget(self._sticky_key(group_id))
        samples = [task.result() for task in running]
        await self._judge(prompt, samples)
        if not self.greedy_baseline:
            return Group(group_id, prompt, samples)
        baseline = samples.pop()
        newest = int(baseline.versions.max(initial=-1))
        return Group(group_id, prompt, samples, baseline_score=baseline.score, baseline_version=newest)

    async def _sample(
        self, group_id: int, index: int, prompt: Prompt, min_version: int | None, sampling: SamplingParams
    ) -> Sample:
        seed = derive_seed(self.run_seed, self.purpose, group_id, index, 0)
        request = GenerateRequest(
            request_id=f"{self.purpose}-{group_id}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=replace(sampling, seed=seed),
        )
        sticky_key = None if self.separate_requests else self._sticky_key(group_id)
        completion = await self.generator.generate(request, sticky_key=sticky_key, min_version=min_version)
        text = self.decoder.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        return sample_from_completion(prompt, completion, text)

    def _sticky_key(self, group_id: int) -> str:
        return f"{self.purpose}-{group_id}"

    async def _judge(self, prompt: Prompt, samples: Sequence[Sample]) -> None:
        inputs = [
            RewardInput(
                prompt_id=prompt.prompt_id,
                prompt_text=prompt.text,
                response_text=sample.response_text,
                ground_truth=prompt.ground_truth,
                domain=prompt.domain,
                metadata=prompt.metadata,
                finish_reason=sample.finish_reason,
                prompt_tokens=len(prompt.token_ids),
                response_tokens=sample.response_tokens,
                messages=prompt.messages,
            )
            for sample in samples
        ]
        outputs = await self.judge.score(prompt.domain, inputs)
        for sample, output in zip(samples, outputs, strict=True):
            sample.score = output.score
            sample.reward = output.score
            sample.metrics = dict(output.metrics)


def sample_from_completion(prompt: Prompt, completion: Completion, text: str) -> Sample:
    """Return prompt and completion as one record; only the completion's tokens are marked as chosen by the policy."""
    given, sampled = len(prompt.token_ids), len(completion.token_ids)
    return Sample(
        token_ids=np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int32),
        response_mask=np.concatenate([np.zeros(given, dtype=bool), np.ones(sampled, dtype=bool)]),
        behaviour_logprobs=np.concatenate([np.zeros(given), completion.logprobs]).astype(np.float32),
        versions=np.concatenate([np.full(given, -1), completion.versions]).astype(np.int32),
        finish_reason=completion.finish_reason,
        response_text=text,
    )


def has_score_variance(group: Group) -> bool:
    """Return True if the samples of a group differ in score. Otherwise a group baseline learns nothing from them."""
    return bool(np.ptp(group.scores) > 0)


def sampling_params(arguments: GeneratingArguments, response_length: int) -> SamplingParams:
    """Return the engine's parameters for the configured ones; the seed is set per request."""
    return SamplingParams(
        max_new_tokens=arguments.max_new_tokens or response_length,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        stop_strings=tuple(arguments.stop_strings),
        ignore_eos=arguments.ignore_eos,
    )
