"""The rollout side of the agentic pipeline: environments in worker processes, and the managers of episodes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from roll.agentic.env_manager.registry import EnvManager
from roll.agentic.env_manager.settings import ManagerSettings
from roll.agentic.env_worker.pool import EnvPool, PoolSettings
from roll.agentic.env_worker.records import EnvSpec, HostSettings
from roll.configs import derived
from roll.configs.schema import AgenticConfig, CustomEnvConfig, EnvManagerConfig, GeneratingArguments
from roll.data.records import Group
from roll.data.seeds import derive_seed
from roll.pipeline.agentic_preflight import AgenticPlan
from roll.pipeline.episode_validation import EpisodeValidator
from roll.pipeline.episodes import EpisodeRollout, EpisodeTask
from roll.pipeline.rollout_side import Generator
from roll.pipeline.sampling import sampling_params
from roll.rollout.schedule import Ticket

if TYPE_CHECKING:
    from roll.distributed.group import WorkerHandle
    from roll.pipeline.preflight import Prepared

CANARY_PROMPTS = 64
CANARY_TOKENS = 32
TRAINING, VALIDATION = 0, 1
"""Low bit of environment seeds: even in training and odd in validation, so no seed is in both."""


class AgenticSide:
    """The `RolloutSide` of the agentic pipeline."""

    sample_metrics = "env/{domain}"

    def __init__(
        self, prepared: Prepared, plan: AgenticPlan, log_dir: str, on_event: Callable[[str], None]
    ) -> None:
        if not isinstance(prepared.config, AgenticConfig):
            raise TypeError(f"this is the rollout side of agentic, not of {prepared.config.pipeline}")
        self._prepared = prepared
        self._config = prepared.config
        self._plan = plan
        self._on_event = on_event
        self.workers = EnvPool(env_specs(self._config), pool_settings(self._config, log_dir))

    def canary_prompts(self) -> list[np.ndarray]:
        """Return random tokens, since observations are not known before the environments run."""
        rng = np.random.default_rng(derive_seed(self._config.seed, "canary prompts"))
        tokenizer = self._prepared.tokenizer
        vocabulary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        return list(rng.choice(vocabulary, (CANARY_PROMPTS, CANARY_TOKENS)).astype(np.int32))

    def source(self) -> Iterator[EpisodeTask]:
        """Yield the tag and seed of each training group."""
        return episode_tasks(self._config, self._config.train_env_manager, TRAINING)

    def rollout(self, generator: Generator) -> Callable[[Ticket[EpisodeTask]], Awaitable[Group]]:
        """Return the function that plays the episodes of a group."""
        config, manager = self._config, self._config.train_env_manager
        at_once = None if manager.num_env_groups is None else asyncio.Semaphore(manager.num_env_groups)
        rollout = self._rollout(generator, manager, config.actor_infer.generating_args, "train", at_once=at_once)

        def run_group(ticket: Ticket[EpisodeTask]) -> Awaitable[Group]:
            return rollout.group(ticket.group_id, ticket.item, ticket.start_version)

        return run_group

    def validator(self, generator: Generator) -> EpisodeValidator | None:
        """Return the validator over the validation seeds; None without `val_env_manager`."""
        manager, settings = self._config.val_env_manager, self._config.validation
        if manager is None:
            return None
        tasks = itertools.islice(episode_tasks(self._config, manager, VALIDATION), manager.num_env_groups)
        return EpisodeValidator(
            list(tasks),
            self._rollout(generator, manager, settings.generating_args, "validation", frames=True),
            attempts=1 + self._config.max_group_retries,
            timeout_seconds=settings.timeout_seconds,
            on_event=self._on_event,
        )

    def handles(self) -> list[WorkerHandle]:
        """Return no handles: environments need no devices."""
        return []

    def metrics(self) -> dict[str, float]:
        """Return the totals of the environment workers."""
        return {f"env_workers/{name}": float(count) for name, count in self.workers.counts().items()}

    def _rollout(
        self,
        generator: Generator,
        manager: EnvManagerConfig,
        arguments: GeneratingArguments,
        purpose: str,
        *,
        at_once: asyncio.Semaphore | None = None,
        frames: bool = False,
    ) -> EpisodeRollout:
        config = self._config
        return EpisodeRollout(
            generator=generator,
            environments=self.workers,
            managers=self._managers(manager, arguments),
            sampling=sampling_params(arguments, derived.sequence_length(config)),
            group_size=manager.group_size,
            spare=manager.group_size_redundancy,
            run_seed=config.seed,
            purpose=purpose,
            at_once=at_once,
            frames=frames,
        )

    def _managers(self, manager: EnvManagerConfig, arguments: GeneratingArguments) -> Mapping[str, EnvManager]:
        tokenizer = self._prepared.tokenizer
        return {
            tag: self._plan.managers[tag](
                manager_settings(self._config, env, manager, arguments), self._plan.template, tokenizer
            )
            for tag, env in self._config.custom_envs.items()
            if tag in derived.used_tags(self._config, manager)
        }


def env_specs(config: AgenticConfig) -> dict[str, EnvSpec]:
    """Return how the environments of each tag are made."""
    return {
        tag: EnvSpec(env.env_type, env.env_config, env.reset_timeout_seconds, env.step_timeout_seconds)
        for tag, env in config.custom_envs.items()
    }


def pool_settings(config: AgenticConfig, log_dir: str) -> PoolSettings:
    """Return the settings of the processes that run the environments."""
    workers = config.env_workers
    return PoolSettings(
        num_workers=workers.num_workers,
        max_sessions=workers.max_sessions,
        host=HostSettings(max_memory_growth_bytes=int(workers.max_memory_growth_gib * 2**30)),
        start_timeout_seconds=config.cluster.worker_start_timeout_seconds,
        silence_timeout_seconds=workers.silence_timeout_seconds,
        max_failed_starts=workers.max_failed_starts,
        place_timeout_seconds=workers.place_timeout_seconds,
        log_dir=log_dir,
    )


def manager_settings(
    config: AgenticConfig, env: CustomEnvConfig, manager: EnvManagerConfig, arguments: GeneratingArguments
) -> ManagerSettings:
    """Return the limits of the episodes of a tag."""
    limits = (env.max_tokens_per_step, arguments.max_new_tokens)
    return ManagerSettings(
        max_steps=env.max_steps,
        prompt_length=config.prompt_length,
        sequence_length=derived.sequence_length(config),
        max_tokens_per_step=min((limit for limit in limits if limit is not None), default=None),
        format_penalty=manager.format_penalty,
        history_length=env.history_length,
        keep_first_observation=env.keep_first_observation,
    )


def episode_tasks(config: AgenticConfig, manager: EnvManagerConfig, split: int) -> Iterator[EpisodeTask]:
    """Yield the tag and seed of group after group, without end.

    The shares of the tags add up to one cycle of groups. Each cycle holds every tag as often as its share says, in an
    order drawn from the run's seed. Seeds are below 2^31, as some environments require.
    """
    shares = derived.used_tags(config, manager)
    turn = [tag for tag, share in shares.items() for _ in range(share)]
    for cycle in itertools.count():
        rng = np.random.default_rng(derive_seed(config.seed, "tags", split, cycle))
        for place, index in enumerate(rng.permutation(len(turn))):
            number = cycle * len(turn) + place
            seed = derive_seed(config.seed, "environments", split, number) % 2**30 * 2 + split
            yield EpisodeTask(turn[index], seed)
