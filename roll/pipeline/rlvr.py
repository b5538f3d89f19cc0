"""The rollout side of RLVR: the policy generates responses to prompts, and rewards score them.

Verifiers and LLM judges run in CPU processes, reward models on the run's devices. All randomness derives from (run
seed, group id, sample index, turn), so a group can be generated again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from roll.configs import derived
from roll.configs.devices import parse_device_mapping
from roll.configs.rewards import RewardConfig
from roll.configs.roles import GeneratingArguments
from roll.configs.run import PromptConfig
from roll.data.prompts import PromptStream
from roll.data.records import Group, Prompt, Sample, derive_seed, joined_routing
from roll.engines.base import Completion, GenerateRequest, SamplingParams
from roll.pipeline.preflight import Prepared, RLVRPlan
from roll.pipeline.rollouts import (
    Generator,
    RolloutSide,
    ValidationResult,
    Validator,
    WorkerProcesses,
    sampling_params,
)
from roll.rewards.base import RewardInput, RewardOutput
from roll.rewards.model import ScorerSetup
from roll.rewards.model_pool import ScorePool, ScoreSettings, ScoreWorker
from roll.rewards.pool import RewardPool
from roll.rewards.registry import route_domains
from roll.rollout.scheduler import GroupRequest
from roll.runtime.locks import DeviceLock
from roll.runtime.placement import Placement
from roll.runtime.workers import WorkerHandle, start_worker
from roll.tracking.run_directory import RunDirectory
from roll.tracking.waits import REWARD_MODEL, part, waiting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rewards(WorkerProcesses):
    """All rewards of a run, selected by the domain of the prompt."""

    routes: Mapping[str, str]
    """Domain -> name of its reward."""
    pools: Mapping[str, RewardPool | ScorePool]
    """Name of a reward -> its worker processes."""

    async def start(self) -> None:
        async def start(name: str, pool: RewardPool | ScorePool) -> None:
            with part(f"{REWARD_MODEL}{name}") if isinstance(pool, ScorePool) else nullcontext():
                await pool.start()

        async with asyncio.TaskGroup() as tasks:
            for name, pool in self.pools.items():
                tasks.create_task(start(name, pool))

    async def score(self, domain: str, records: Sequence[RewardInput]) -> list[RewardOutput]:
        """Score responses to prompts of one domain, usually those of one group. Returns the outputs in the same order.

        If the run has no rewards (distillation alone), each score is 0. Raises `RewardFailed` if a response cannot be
        scored.
        """
        if not self.routes:
            return [RewardOutput(0.0) for _ in records]
        name = self.routes[domain]
        pool = self.pools[name]
        is_model = isinstance(pool, ScorePool)
        with waiting(f"{REWARD_MODEL}{name}", "scores") if is_model else waiting(f"rewards/{name}", "a verdict"):
            return await pool.score(records)

    def handles(self) -> list[WorkerHandle]:
        """Return the current processes of reward models. Pools of verifiers replace dead processes themselves."""
        return [handle for pool in self.pools.values() if isinstance(pool, ScorePool) for handle in pool.handles()]

    def metrics(self) -> dict[str, float]:
        """Return totals as ``rewards/<name>/<count>``, from `ScoreCounts` (reward models) or `RewardCounts`
        (verifiers)."""
        return {
            f"rewards/{reward}/{name}": float(value)
            for reward, pool in self.pools.items()
            for name, value in asdict(pool.counts).items()
        }

    def busy_spans(self) -> dict[str, list[tuple[float, float]]]:
        return {f"rewards.{name}": pool.busy.recent() for name, pool in self.pools.items()}

    async def shutdown(self) -> None:
        await asyncio.gather(*(pool.shutdown() for pool in self.pools.values()))


def build_rewards(
    prepared: Prepared,
    config: PromptConfig,
    placement: Placement,
    locks: Mapping[str, DeviceLock],
    run: RunDirectory,
    on_event: Callable[[str], None],
) -> Rewards:
    """Build the pools of all configured rewards. Starts no process."""
    models = derived.reward_models(config)

    def score_pool(role: str, reward: RewardConfig) -> ScorePool:
        numbers = parse_device_mapping(reward.device_mapping)
        setup = ScorerSetup(
            model_path=derived.model_path(config, reward),
            model_args=reward.model_args,
            config=reward.reward_model,
            batch_size=reward.infer_batch_size,
            device=config.cluster.device,
        )
        start_seconds = config.cluster.worker_start_timeout_seconds
        settings = ScoreSettings(reward, setup, derived.batch_wait_seconds(config, reward), start_seconds)

        def start(index: int) -> WorkerHandle:
            return start_worker(
                prepared.worker_classes.get(role, ScoreWorker),
                placement,
                role=role,
                rank=index,
                world_size=len(numbers),
                devices=[numbers[index]],
                log_dir=str(run.logs.absolute()),
            )

        return ScorePool(role, start, len(numbers), settings, locks[role], on_event)

    pools: dict[str, RewardPool | ScorePool] = {}
    for name, reward in config.rewards.items():
        role = f"{REWARD_MODEL}{name}"
        pools[name] = score_pool(role, reward) if role in models else RewardPool(name, reward)
    return Rewards(route_domains(config.rewards), pools)


class RLVRSide(RolloutSide):
    """The rollout side of RLVR."""

    sample_metrics = "reward"
    workers: Rewards

    def __init__(self, prepared: Prepared, plan: RLVRPlan, rewards: Rewards, on_event: Callable[[str], None]) -> None:
        self._prepared, self._plan, self._config = prepared, plan, plan.config
        self.workers = rewards
        self._on_event = on_event

    def canary_prompts(self) -> list[np.ndarray]:
        return [prompt.token_ids for prompt in self._plan.prompts]

    def source(self) -> Iterator[Prompt]:
        """Return an endless iterator over the training prompts, interleaved by domain and shuffled each epoch."""
        data_args = self._config.actor_train.data_args
        return iter(
            PromptStream(
                self._plan.prompts,
                seed=self._config.seed,
                shuffle=data_args.shuffle,
                domain_interleave_probs=data_args.domain_interleave_probs,
            )
        )

    def rollout(self, generator: Generator) -> Callable[[GroupRequest[Prompt]], Awaitable[Group]]:
        function = self._function(generator, self._config.actor_infer.generating_args, "train")
        return lambda request: function(request.group_id, request.item, request.start_version)

    def validator(self, generator: Generator) -> PromptValidator | None:
        validation = self._config.validation
        if validation is None:
            return None
        return PromptValidator(
            self._plan.validation_prompts,
            self._function(generator, validation.generating_args, "validation"),
            batch_size=self._config.val_batch_size,
            attempts=1 + self._config.max_group_retries,
            timeout_seconds=validation.timeout_seconds,
            on_event=self._on_event,
        )

    def handles(self) -> list[WorkerHandle]:
        return self.workers.handles()

    def metrics(self) -> dict[str, float]:
        return self.workers.metrics()

    def _function(self, generator: Generator, arguments: GeneratingArguments, purpose: str) -> RolloutFunction:
        """Build the `RolloutFunction` of training or validation (``purpose``)."""
        config, training = self._config, purpose == "train"
        engine, trainer = config.actor_infer, config.actor_train
        same_tokenizer = (
            derived.model_path(config, engine) == derived.model_path(config, trainer)
            and engine.model_args.trust_remote_code == trainer.model_args.trust_remote_code
        )
        return RolloutFunction(
            generator=generator,
            judge=self.workers,
            decoder=self._prepared.tokenizer,
            sampling=sampling_params(arguments, config.response_length),
            samples_per_group=config.num_return_sequences_in_group if training else arguments.num_return_sequences,
            run_seed=config.seed,
            purpose=purpose,
            separate_requests=config.is_num_return_sequences_expand,
            decoded_there=same_tokenizer,
            with_routing=training and trainer.router_replay,
            sample_weight=config.sample_weight if training else None,
            greedy_baseline=training and self._prepared.advantages.estimator.requirements.needs_greedy_baseline,
        )


@dataclass(frozen=True)
class RolloutFunction:
    """Generates and scores one group per call. Training and validation have one object each."""

    generator: Generator
    judge: Rewards
    decoder: PreTrainedTokenizerBase
    sampling: SamplingParams
    samples_per_group: int
    run_seed: int
    purpose: str
    """``train`` or ``validation``; part of each request's id and seed."""
    separate_requests: bool = True
    """False to keep all samples of a group on one replica."""
    greedy_baseline: bool = False
    """True to add the score of a greedy response to each group."""
    sample_weight: str | None = None
    """Name of the sample weight, which may come from the metadata of the prompt."""
    with_routing: bool = False
    """True to record the experts of each token."""
    decoded_there: bool = False
    """True if the engines decode the responses, because they use the same tokenizer as the trainer."""

    async def __call__(self, group_id: int, prompt: Prompt, min_version: int | None = None) -> Group:
        """Make a group with weights of version ``min_version`` or newer. Raises the errors of engine and rewards."""
        sticky_key = None if self.separate_requests else self._name(group_id)
        requests = self._requests(group_id, prompt)
        samples, generated = await self._judged_samples(prompt, requests, sticky_key, min_version)
        times = {"generated": generated}
        if not self.greedy_baseline:
            return Group(group_id, prompt, samples, times=times)
        baseline = samples.pop()
        newest = int(baseline.versions.max(initial=-1))
        return Group(group_id, prompt, samples, baseline.score, newest, times)

    def _name(self, group_id: int) -> str:
        return f"{self.purpose}-{group_id}"

    def _requests(self, group_id: int, prompt: Prompt) -> list[GenerateRequest]:
        """Return the requests of a group; the last one is the greedy baseline, if any."""
        samplings = [self.sampling] * self.samples_per_group
        if self.greedy_baseline:
            samplings.append(replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0))
        return [
            GenerateRequest(
                f"{self._name(group_id)}-{index}",
                prompt.token_ids,
                replace(sampling, seed=derive_seed(self.run_seed, self.purpose, group_id, index, 0)),
                with_text=self.decoded_there,
                with_routing=self.with_routing and index < self.samples_per_group,
                prompt_pictures=tuple(prompt.pictures),
            )
            for index, sampling in enumerate(samplings)
        ]

    async def _judged_samples(
        self, prompt: Prompt, requests: Sequence[GenerateRequest], sticky_key: str | None, min_version: int | None
    ) -> tuple[list[Sample], float]:
        """Run the requests, and score the samples when all are finished.

        Returns the samples in the order of the requests, and the POSIX time at which the last one was generated.
        """
        running: list[asyncio.Task[Sample]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    running.append(tasks.create_task(self._sample(request, prompt, sticky_key, min_version)))
        except BaseException:
            running.clear()  # breaks the reference cycle of exception and frame; garbage collection is rare
            raise
        finally:
            self._forget(sticky_key)
        samples, generated = [task.result() for task in running], time.time()
        await self._judge(prompt, samples)
        return samples, generated

    def _forget(self, sticky_key: str | None) -> None:
        if sticky_key is not None:
            self.generator.forget(sticky_key)

    async def _sample(
        self, request: GenerateRequest, prompt: Prompt, sticky_key: str | None, min_version: int | None
    ) -> Sample:
        completion = await self.generator.generate(request, sticky_key=sticky_key, min_version=min_version)
        return self._from_completion(prompt, completion)

    def _from_completion(self, prompt: Prompt, completion: Completion) -> Sample:
        text = completion.text
        if text is None:
            text = self.decoder.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        return sample_from_completion(prompt, completion, text)

    def _input(self, prompt: Prompt, sample: Sample) -> RewardInput:
        """Return the input of the rewards for a sample."""
        return RewardInput(
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
            pictures=prompt.pictures,
        )

    async def _judge(self, prompt: Prompt, samples: Sequence[Sample]) -> None:
        inputs = [self._input(prompt, sample) for sample in samples]
        outputs = await self.judge.score(prompt.domain, inputs)
        weight = prompt.metadata.get(self.sample_weight) if self.sample_weight else None
        from_row = {} if weight is None else {str(self.sample_weight): float(weight)}
        for sample, output in zip(samples, outputs, strict=True):
            sample.score = sample.reward = output.score
            sample.metrics = from_row | output.metrics


def sample_from_completion(prompt: Prompt, completion: Completion, text: str) -> Sample:
    """Combine prompt and completion into one sample. The response mask covers the tokens of the completion."""
    given, length = len(prompt.token_ids), len(prompt.token_ids) + len(completion.token_ids)

    def filled(start: np.ndarray | int, values: np.ndarray | int, dtype: type) -> np.ndarray:
        whole: np.ndarray = np.empty(length, dtype)
        whole[:given], whole[given:] = start, values
        return whole

    return Sample(
        token_ids=filled(prompt.token_ids, completion.token_ids, np.int32),
        response_mask=filled(0, 1, np.bool_),
        behaviour_logprobs=filled(0, completion.logprobs, np.float32),
        versions=filled(-1, completion.versions, np.int32),
        finish_reason=completion.finish_reason,
        response_text=text,
        routed_experts=joined_routing([completion.routed_experts], length),
    )


@dataclass(frozen=True)
class PromptValidator(Validator):
    """Validator that runs the validation prompts."""

    prompts: Sequence[Prompt]
    rollout: RolloutFunction
    batch_size: int
    """Maximum number of responses that are generated concurrently."""

    async def measure(self, version: int) -> ValidationResult:
        slots = asyncio.Semaphore(max(1, self.batch_size // self.rollout.samples_per_group))

        async def make(index: int) -> Group:
            async with slots:
                return await self.rollout(index, self.prompts[index])

        groups = list((await self.made(len(self.prompts), make)).values())
        metrics: dict[str, float] = {}
        for domain, requested in sorted(Counter(prompt.domain for prompt in self.prompts).items()):
            members = [group for group in groups if group.prompt.domain == domain]
            metrics[f"val/{domain}/failed_groups"] = float(requested - len(members))
            if not members:
                continue
            samples = [sample for group in members for sample in group.samples]
            metrics[f"val/{domain}/accuracy"] = float(np.mean([sample.score for sample in samples]))
            metrics[f"val/{domain}/best_of_group"] = float(np.mean([group.scores.max() for group in members]))
            metrics[f"val/{domain}/response_length"] = float(np.mean([sample.response_tokens for sample in samples]))
        return ValidationResult(version, metrics, groups)
