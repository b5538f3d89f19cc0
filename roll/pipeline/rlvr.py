"""The rollout side of RLVR: prompts are sampled, responses are judged by verifiers, judges and reward models.

Verifiers and judges run in processes without devices, reward models on the run's devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from roll.configs import derived
from roll.configs.devices import parse_device_mapping
from roll.configs.rewards import RewardConfig
from roll.configs.roles import GeneratingArguments
from roll.configs.run import RLVRConfig
from roll.data.records import Group, Prompt
from roll.data.stream import PromptStream
from roll.pipeline.rollout_function import RolloutFunction, sampling_params
from roll.pipeline.rollout_side import Generator, RunDevices
from roll.pipeline.validation import PromptValidator
from roll.rewards.base import RewardInput, RewardOutput
from roll.rewards.model import ScorerSetup
from roll.rewards.model_pool import ScorePool, ScoreSettings, ScoreWorker
from roll.rewards.pool import RewardPool
from roll.rewards.registry import route_domains
from roll.rollout.scheduler import GroupRequest
from roll.runtime.actors import WorkerHandle, start_worker
from roll.tracking.run_directory import RunDirectory
from roll.tracking.waits import REWARD_MODEL, part, waiting

if TYPE_CHECKING:
    from roll.pipeline.preflight import Prepared


class Rewards:
    """All rewards of a run, by the domains they judge."""

    def __init__(self, routes: Mapping[str, str], pools: Mapping[str, RewardPool | ScorePool]) -> None:
        """Keep the pools. ``routes``: domain tag -> reward's name; ``pools``: reward's name -> its processes."""
        self._routes = routes
        self._pools = pools

    async def start(self) -> None:
        """Start all processes. If one fails, `shutdown` ends those that have started."""
        async with asyncio.TaskGroup() as tasks:
            for name, pool in self._pools.items():
                tasks.create_task(_start(name, pool))

    async def score(self, domain: str, records: Sequence[RewardInput]) -> list[RewardOutput]:
        """Judge responses to prompts of one domain, usually those of one group; return the outputs in the same order.

        Raises `RewardFailed` if one of them cannot be judged.
        """
        name = self._routes[domain]
        pool = self._pools[name]
        is_model = isinstance(pool, ScorePool)
        with waiting(f"{REWARD_MODEL}{name}", "scores") if is_model else waiting(f"rewards/{name}", "a verdict"):
            return await pool.score(records)

    def handles(self) -> list[WorkerHandle]:
        """Return the current processes of reward models. The pools of verifiers look after their own."""
        return [handle for pool in self._pools.values() if isinstance(pool, ScorePool) for handle in pool.handles()]

    def metrics(self) -> dict[str, float]:
        """Return totals as ``rewards/<name>/<count>``: those of `ScoreCounts` (models) or `RewardCounts` (others)."""
        return {
            f"rewards/{reward}/{name}": float(value)
            for reward, pool in self._pools.items()
            for name, value in asdict(pool.counts).items()
        }

    def busy_spans(self) -> dict[str, list[tuple[float, float]]]:
        """Return, by reward, the spans in which at least one of its processes worked; see `BusySpans`."""
        return {f"rewards.{name}": pool.busy.recent() for name, pool in self._pools.items()}

    async def shutdown(self) -> None:
        """End all processes."""
        await asyncio.gather(*(pool.shutdown() for pool in self._pools.values()))


async def _start(name: str, pool: RewardPool | ScorePool) -> None:
    with part(f"{REWARD_MODEL}{name}") if isinstance(pool, ScorePool) else nullcontext():
        await pool.start()


def build_rewards(
    prepared: Prepared, run: RunDirectory, on_event: Callable[[str], None], devices: RunDevices
) -> Rewards:
    """Build the rewards that the configuration names. Starts nothing."""
    config = derived.rlvr(prepared.config)
    models = derived.reward_models(config)
    log_dir = str(run.logs.absolute())
    pools: dict[str, RewardPool | ScorePool] = {}
    for name, reward in config.rewards.items():
        role = f"{REWARD_MODEL}{name}"
        if role in models:
            pools[name] = _score_pool(prepared, role, reward, log_dir, on_event, devices)
        else:
            pools[name] = RewardPool(name, reward)
    return Rewards(route_domains(config.rewards), pools)


def _score_pool(
    prepared: Prepared,
    role: str,
    reward: RewardConfig,
    log_dir: str,
    on_event: Callable[[str], None],
    devices: RunDevices,
) -> ScorePool:
    numbers = parse_device_mapping(reward.device_mapping)
    worker_class = prepared.worker_classes.get(role, ScoreWorker)

    def start(index: int) -> WorkerHandle:
        return start_worker(
            worker_class,
            devices.placement,
            role=role,
            rank=index,
            world_size=len(numbers),
            devices=[numbers[index]],
            log_dir=log_dir,
        )

    config = prepared.config
    setup = ScorerSetup(
        model_path=derived.reward_model_path(config, reward),
        model_args=reward.model_args,
        config=reward.reward_model,
        batch_size=reward.infer_batch_size,
        device=config.cluster.device,
    )
    settings = ScoreSettings(
        reward, setup, derived.batch_wait_seconds(config, reward), config.cluster.worker_start_timeout_seconds
    )
    return ScorePool(role, start, len(numbers), settings, devices.locks[role], on_event)


class RLVRSide:
    """The `RolloutSide` of RLVR."""

    sample_metrics = "reward"

    def __init__(
        self,
        prepared: Prepared,
        prompts: Sequence[Prompt],
        validation_prompts: Sequence[Prompt],
        rewards: Rewards,
    ) -> None:
        if not isinstance(prepared.config, RLVRConfig):
            raise TypeError(f"this is the rollout side of rlvr, not of {prepared.config.pipeline}")
        self._prepared = prepared
        self._config = prepared.config
        self._prompts = prompts
        self._validation_prompts = validation_prompts
        self.workers = rewards

    def canary_prompts(self) -> list[np.ndarray]:
        """Return the training prompts."""
        return [prompt.token_ids for prompt in self._prompts]

    def source(self) -> Iterator[Prompt]:
        """Return the training prompts, interleaved by domain and shuffled at each epoch."""
        data_args = self._config.actor_train.data_args
        return iter(
            PromptStream(
                self._prompts,
                seed=self._config.seed,
                shuffle=data_args.shuffle,
                domain_interleave_probs=data_args.domain_interleave_probs,
            )
        )

    def rollout(self, generator: Generator) -> Callable[[GroupRequest[Prompt]], Awaitable[Group]]:
        """Return the function that samples a prompt and judges the responses."""
        function = self._function(generator, self._config.actor_infer.generating_args, "train")

        def run_group(request: GroupRequest[Prompt]) -> Awaitable[Group]:
            return function(request.group_id, request.item, request.start_version)

        return run_group

    def validator(self, generator: Generator) -> PromptValidator | None:
        """Return the validator over the validation prompts; None without `validation`."""
        validation = self._config.validation
        if validation is None:
            return None
        return PromptValidator(
            self._validation_prompts,
            self._function(generator, validation.generating_args, "validation"),
            batch_size=self._config.val_batch_size,
            timeout_seconds=validation.timeout_seconds,
        )

    def handles(self) -> list[WorkerHandle]:
        """Return the processes of the reward models."""
        return self.workers.handles()

    def metrics(self) -> dict[str, float]:
        """Return the totals of the rewards. The verifiers' own metrics are in the metrics of samples."""
        return self.workers.metrics()

    def _function(self, generator: Generator, arguments: GeneratingArguments, purpose: str) -> RolloutFunction:
        """Return the function that makes a group, in training or in validation."""
        config, training = self._config, purpose == "train"
        return RolloutFunction(
            generator=generator,
            judge=self.workers,
            decoder=self._prepared.tokenizer,
            sampling=sampling_params(arguments, config.response_length),
            samples_per_group=config.num_return_sequences_in_group if training else arguments.num_return_sequences,
            run_seed=config.seed,
            purpose=purpose,
            separate_requests=config.is_num_return_sequences_expand,
            greedy_baseline=training and self._prepared.advantages.estimator.requirements.needs_greedy_baseline,
        )
