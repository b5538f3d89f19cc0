"""The rollout side of the agentic pipeline: groups of episodes, and validation in environments.

A group is the episodes of one environment seed, all at once, each a chain of requests. Everything random derives from
(run seed, group id, episode index, turn), so a group can be generated again. If an episode fails through the fault of
its environment, a spare episode replaces it. When the spare episodes are used up, the group fails with all causes. An
episode that was lost with its process, perhaps through another episode's fault, restarts. No episode is left out for
being slow.

Validation is a fixed set of seeds at one pinned policy version. It runs inside the stage that publishes weights, so no
newer version can arrive before it ends. A group whose environments keep failing is left out, counted and reported. If
no group is left, the validation fails.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from roll.agentic.episode import EnvironmentFailed, EnvSession, Episode, EpisodeRefused, ManagerSettings, SampledTurn
from roll.agentic.manager import EnvManager
from roll.agentic.pool import EnvPool, PoolSettings
from roll.agentic.worker import EnvPoolClosed, HostSettings, SessionFailed
from roll.configs import derived
from roll.configs.roles import GeneratingArguments
from roll.configs.run import AgenticConfig, CustomEnvConfig, EnvManagerConfig
from roll.data.chat import TemplateRefused
from roll.data.records import Group, Prompt, derive_seed
from roll.engines.base import GenerateRequest, SamplingParams
from roll.pipeline.preflight import AgenticPlan
from roll.pipeline.rollout_function import sampling_params
from roll.pipeline.rollout_side import Generator
from roll.pipeline.validation import ValidationResult, check_versions
from roll.rollout.scheduler import FatalRolloutError, GroupRequest

if TYPE_CHECKING:
    from roll.pipeline.preflight import Prepared
    from roll.runtime.actors import WorkerHandle

CANARY_PROMPTS = 64
CANARY_TOKENS = 32
TRAINING, VALIDATION = 0, 1
"""Low bit of environment seeds: even in training and odd in validation, so no seed is in both."""


class AgenticSide:
    """The `RolloutSide` of the agentic pipeline."""

    sample_metrics = "env/{domain}"

    def __init__(self, prepared: Prepared, plan: AgenticPlan, log_dir: str, on_event: Callable[[str], None]) -> None:
        if not isinstance(prepared.config, AgenticConfig):
            raise TypeError(f"this is the rollout side of agentic, not of {prepared.config.pipeline}")
        self._prepared = prepared
        self._config = prepared.config
        self._plan = plan
        self._on_event = on_event
        self.workers = EnvPool(self._config.custom_envs, pool_settings(self._config, log_dir))

    def canary_prompts(self) -> list[np.ndarray]:
        """Return random tokens, since observations are not known before the environments run."""
        rng = np.random.default_rng(derive_seed(self._config.seed, "canary prompts"))
        tokenizer = self._prepared.tokenizer
        vocabulary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        return list(rng.choice(vocabulary, (CANARY_PROMPTS, CANARY_TOKENS)).astype(np.int32))

    def source(self) -> Iterator[EpisodeTask]:
        """Yield the tag and seed of each training group."""
        return episode_tasks(self._config, self._config.train_env_manager, TRAINING)

    def rollout(self, generator: Generator) -> Callable[[GroupRequest[EpisodeTask]], Awaitable[Group]]:
        """Return the function that plays the episodes of a group."""
        config, manager = self._config, self._config.train_env_manager
        at_once = None if manager.num_env_groups is None else asyncio.Semaphore(manager.num_env_groups)
        rollout = self._rollout(generator, manager, config.actor_infer.generating_args, "train", at_once=at_once)

        def run_group(request: GroupRequest[EpisodeTask]) -> Awaitable[Group]:
            return rollout.group(request.group_id, request.item, request.start_version)

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


def pool_settings(config: AgenticConfig, log_dir: str) -> PoolSettings:
    """Return the settings of the processes that run the environments."""
    return PoolSettings(
        config.env_workers,
        HostSettings(max_memory_growth_bytes=int(config.env_workers.max_memory_growth_gib * 2**30)),
        start_timeout_seconds=config.cluster.worker_start_timeout_seconds,
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


class EpisodeValidator:
    """Plays the validation set."""

    def __init__(
        self,
        tasks: Sequence[EpisodeTask],
        rollout: EpisodeRollout,
        *,
        attempts: int,
        timeout_seconds: float,
        on_event: Callable[[str], None],
    ) -> None:
        """Create the validator; ``attempts``: tries per group whose episodes fail."""
        self._tasks = tasks
        self._rollout = rollout
        self._attempts = attempts
        self._timeout_seconds = timeout_seconds
        self._on_event = on_event

    async def run(self, version: int) -> ValidationResult:
        """Play every group and measure the version.

        Raises `TimeoutError` at the deadline, `MixedVersions` if the weights changed meanwhile, and `EpisodesFailed` if
        no group could be played.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                played = await self._play_all()
        except TimeoutError:
            raise TimeoutError(
                f"validation of version {version} did not end within {self._timeout_seconds:g} s "
                "(validation.timeout_seconds)"
            ) from None
        groups = [as_group(index, self._tasks[index], episodes) for index, episodes in played.items()]
        check_versions(groups, version)
        episodes = [episode for group in played.values() for episode in group]
        return ValidationResult(version, self._metrics(played), groups, episodes)

    async def _play_all(self) -> dict[int, list[Episode]]:
        """Return the episodes of each group that could be played, by the group's position."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._play(index, task)) for index, task in enumerate(self._tasks)]
        outcomes = {index: task.result() for index, task in enumerate(running)}
        played = {index: outcome for index, outcome in outcomes.items() if isinstance(outcome, list)}
        failures = [outcome for outcome in outcomes.values() if isinstance(outcome, EpisodesFailed)]
        if failures:
            self._on_event(f"validation: {len(failures)} of {len(outcomes)} groups failed; the first: {failures[0]}")
        if not played:
            raise failures[0]
        return played

    async def _play(self, index: int, task: EpisodeTask) -> list[Episode] | EpisodesFailed:
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._rollout.play(index, task)
            except EpisodesFailed as failed:
                if attempt == self._attempts:
                    return failed
        raise AssertionError("a validation needs at least one attempt")

    def _metrics(self, played: Mapping[int, list[Episode]]) -> dict[str, float]:
        by_tag: dict[str, list[list[Episode]]] = defaultdict(list)
        for index, episodes in played.items():
            by_tag[self._tasks[index].tag].append(episodes)
        metrics: dict[str, float] = {}
        for tag, groups in sorted(by_tag.items()):
            episodes = [episode for group in groups for episode in group]
            asked = sum(task.tag == tag for task in self._tasks)
            metrics |= {f"val/{tag}/{name}": value for name, value in mean_metrics(episodes).items()}
            metrics |= {
                f"val/{tag}/score": float(np.mean([episode.score for episode in episodes])),
                f"val/{tag}/failed_groups": float(asked - len(groups)),
            }
            metrics |= {f"val/{tag}/{name}": value for name, value in success_metrics(groups).items()}
        return metrics


def success_metrics(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    """Return the share of successes and of groups with at least one; empty if the environments report no success."""
    said = [[each.success for each in group if each.success is not None] for group in groups]
    said = [group for group in said if group]
    if not said:
        return {}
    return {
        "accuracy": float(np.mean([success for group in said for success in group])),
        "best_of_group": float(np.mean([max(group) for group in said])),
    }


def mean_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean of each metric over the episodes that have it."""
    names = sorted({name for episode in episodes for name in episode.metrics})
    return {
        name: float(np.mean([episode.metrics[name] for episode in episodes if name in episode.metrics]))
        for name in names
    }


logger = logging.getLogger(__name__)

LOST_RETRIES = 5
"""Number of times that an episode restarts after a loss that may not have been its fault."""


@dataclass(frozen=True)
class EpisodeTask:
    """The environment tag and seed that the episodes of a group share."""

    tag: str
    seed: int

    @property
    def name(self) -> str:
        """Prompt id of the group."""
        return f"{self.tag}:{self.seed}"


class EpisodesFailed(RuntimeError):
    """More episodes of a group failed than it has spare ones. The message has the tag, the seed and every cause."""


class Environments(Protocol):
    """Source of the environments of episodes."""

    def session(self, tag: str, *, frames: bool = False) -> EnvSession:
        """Return a session for one episode of an environment; ``frames``: keep pictures of it."""


@dataclass(frozen=True)
class EnginePolicy:
    """The engine as the `Policy` of one episode: a request per turn, all on one replica for its prefix cache."""

    generator: Generator
    sampling: SamplingParams
    name: str
    """Name of the episode, unique among those that run."""
    seed_parts: tuple[int, *tuple[int | str, ...]]
    min_version: int | None

    async def __call__(self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int) -> SampledTurn:
        """Sample a turn; see `Policy`."""
        request = GenerateRequest(
            request_id=f"{self.name}-{turn}",
            prompt_token_ids=prompt_token_ids,
            sampling=replace(self.sampling, max_new_tokens=max_new_tokens, seed=derive_seed(*self.seed_parts, turn)),
        )
        done = await self.generator.generate(request, sticky_key=self.name, min_version=self.min_version)
        return SampledTurn(done.token_ids, done.logprobs, done.versions, done.finish_reason)


@dataclass(frozen=True)
class EpisodeRollout:
    """Rollout of agentic groups; one object serves training, another one validation."""

    generator: Generator
    environments: Environments
    managers: Mapping[str, EnvManager]
    """Managers by environment tag."""
    sampling: SamplingParams
    group_size: int
    spare: int
    """Number of episodes of a group that may fail."""
    run_seed: int
    purpose: str
    """Part of each request's name and seed: ``train`` or ``validation``."""
    at_once: asyncio.Semaphore | None = None
    """Limit of the groups that run at once; None: no limit."""
    frames: bool = False
    """True if pictures of the episodes are kept."""

    async def group(self, group_id: int, task: EpisodeTask, min_version: int | None = None) -> Group:
        """Play a group with weights of ``min_version`` or newer and return it as a `Group`."""
        return as_group(group_id, task, await self.play(group_id, task, min_version))

    async def play(self, group_id: int, task: EpisodeTask, min_version: int | None = None) -> list[Episode]:
        """Return the episodes of a group.

        Raises `EpisodesFailed`, the engine's own errors, and `FatalRolloutError` for what a retry cannot cure.
        """
        if self.at_once is None:
            return await self._play(group_id, task, min_version)
        async with self.at_once:
            return await self._play(group_id, task, min_version)

    async def _play(self, group_id: int, task: EpisodeTask, min_version: int | None) -> list[Episode]:
        places = [f"{self.purpose}-{group_id}-{index}" for index in range(self.group_size + self.spare)]
        causes: list[str] = []
        running: dict[asyncio.Task[Episode], int] = {}
        episodes: dict[int, Episode] = {}

        def begin(index: int) -> None:
            running[asyncio.ensure_future(self._episode(places[index], group_id, index, task, min_version))] = index

        try:
            for index in range(self.group_size):
                begin(index)
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for ended in sorted(done, key=running.__getitem__):
                    index = running.pop(ended)
                    try:
                        episodes[index] = ended.result()
                    except (EnvironmentFailed, EpisodeRefused, TemplateRefused) as error:
                        logger.info("episode %d of group %d failed: %s", index, group_id, error)
                        causes.append(str(error))
                        if len(causes) > self.spare:
                            raise EpisodesFailed(_described(task, causes)) from error
                        begin(self.group_size + len(causes) - 1)
        finally:
            await _end(running)
        return [episodes[index] for index in sorted(episodes)]

    async def _episode(
        self, name: str, group_id: int, index: int, task: EpisodeTask, min_version: int | None
    ) -> Episode:
        seed_parts = (self.run_seed, self.purpose, group_id, index)
        policy = EnginePolicy(self.generator, self.sampling, name, seed_parts, min_version)
        try:
            return await self._again_when_innocent(policy, task)
        except EnvPoolClosed as error:
            raise FatalRolloutError(str(error)) from error
        finally:
            self.generator.forget(name)

    async def _again_when_innocent(self, policy: EnginePolicy, task: EpisodeTask) -> Episode:
        """Return the episode. Restart it with the same random numbers after a loss that may not be its fault."""
        for _ in range(LOST_RETRIES):
            try:
                return await self._once(policy, task)
            except SessionFailed as error:
                if not error.failure.may_be_innocent:
                    raise
                logger.info("begun again: %s", error)
        return await self._once(policy, task)

    async def _once(self, policy: EnginePolicy, task: EpisodeTask) -> Episode:
        session = self.environments.session(task.tag, frames=self.frames)
        return await self.managers[task.tag].run_episode(session, policy, tag=task.tag, seed=task.seed)


def as_group(group_id: int, task: EpisodeTask, episodes: list[Episode]) -> Group:
    """Return the episodes as one `Group`; each sample gets the index of its episode."""
    for index, episode in enumerate(episodes):
        for sample in episode.samples:
            sample.episode = index
        success = {} if episode.success is None else {"success": float(episode.success)}
        episode.samples[0].metrics = episode.metrics | success
    first = episodes[0]
    prompt = Prompt(
        prompt_id=task.name,
        domain=task.tag,
        token_ids=first.samples[0].token_ids[:0],
        text=first.turns[0].observation,
        metadata={"seed": task.seed},
    )
    return Group(group_id, prompt, [sample for episode in episodes for sample in episode.samples])


def _described(task: EpisodeTask, causes: list[str]) -> str:
    return f"environment `{task.tag}`, seed {task.seed}: {len(causes)} episodes failed; " + "; ".join(causes)


async def _end(tasks: Mapping[asyncio.Task[Episode], int]) -> None:
    """Cancel the tasks that still run, and wait until they have released what they hold."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(list(tasks))
    for task in tasks:
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the first failure is being raised
