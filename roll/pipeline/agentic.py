"""The rollout side of the agentic pipeline: groups of episodes, and validation in environments.

A group consists of concurrent episodes with the same environment seed. Each episode is a sequence of generation
requests. All randomness derives from (run seed, group id, episode index, turn), so a group can be generated again. If
an episode fails because of its environment, a spare episode replaces it. When the spares are used up, the group fails
with all causes. An episode whose worker process died, perhaps because of another episode, restarts. Slow episodes are
never dropped.

Validation uses a fixed set of seeds. A group whose environments keep failing is left out, counted and reported. If no
group remains, the validation fails.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import ray

from roll.agentic.agents import AgentManager, agent_endpoint
from roll.agentic.endpoint.server import Endpoint
from roll.agentic.episode import EnvironmentFailed, Episode, EpisodeRefused, ManagerSettings, SampledTurn
from roll.agentic.manager import EnvManager
from roll.agentic.pool import EnvPool, PoolSettings
from roll.agentic.worker import EnvPoolClosed, SessionFailed
from roll.configs import derived
from roll.configs.roles import GeneratingArguments
from roll.configs.run import AgenticConfig, EnvManagerConfig
from roll.data.chat import TemplateRefused
from roll.data.records import Group, Prompt, derive_seed
from roll.engines.base import GenerateRequest, SamplingParams
from roll.pipeline.agentic_plan import AgenticPlan
from roll.pipeline.preflight import Prepared
from roll.pipeline.rollouts import (
    Generator,
    RolloutSide,
    ValidationResult,
    Validator,
    WorkerProcesses,
    sampling_params,
)
from roll.rollout.scheduler import FatalRolloutError, GroupRequest

logger = logging.getLogger(__name__)

CANARY_PROMPTS = 64
CANARY_TOKENS = 32
TRAINING, VALIDATION = 0, 1
"""Lowest bit of environment seeds: even seeds for training, odd ones for validation, so the two sets are disjoint."""
LOST_RETRIES = 5
"""Maximum restarts of an episode that was lost, possibly through no fault of its own."""


class AgenticSide(RolloutSide):
    """The rollout side of the agentic pipeline."""

    sample_metrics = "env/{domain}"
    workers: EpisodeProcesses

    def __init__(self, prepared: Prepared, plan: AgenticPlan, log_dir: str, on_event: Callable[[str], None]) -> None:
        self._prepared = prepared
        self._config = config = plan.config
        self._plan = plan
        self._on_event = on_event
        settings = PoolSettings(
            config.env_workers,
            start_timeout_seconds=config.cluster.worker_start_timeout_seconds,
            log_dir=log_dir,
        )
        # Environment workers may be on any node.
        host = "127.0.0.1" if config.cluster.address is None else ray.util.get_node_ip_address()
        endpoint = agent_endpoint(prepared.tokenizer, host) if plan.agents else None
        self.workers = EpisodeProcesses(EnvPool(config.custom_envs, settings), endpoint)
        self._tokens = Counter(dict.fromkeys(("sampled", "untrained", "discarded"), 0))
        """Token totals of the training rollouts; see `EpisodeRollout.tokens`."""

    def canary_prompts(self) -> list[np.ndarray]:
        """Return sequences of random tokens, because real observations are unknown until the environments run."""
        rng = np.random.default_rng(derive_seed(self._config.seed, "canary prompts"))
        tokenizer = self._prepared.tokenizer
        vocabulary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        return list(rng.choice(vocabulary, (CANARY_PROMPTS, CANARY_TOKENS)).astype(np.int32))

    def source(self) -> Iterator[EpisodeTask]:
        return episode_tasks(self._config, self._config.train_env_manager, TRAINING)

    def rollout(self, generator: Generator) -> Callable[[GroupRequest[EpisodeTask]], Awaitable[Group]]:
        manager, arguments = self._config.train_env_manager, self._config.actor_infer.generating_args
        at_once = None if manager.num_env_groups is None else asyncio.Semaphore(manager.num_env_groups)
        rollout = replace(self._rollout(generator, manager, arguments, "train"), at_once=at_once, tokens=self._tokens)
        return lambda request: rollout.group(request.group_id, request.item, request.start_version)

    def validator(self, generator: Generator) -> EpisodeValidator | None:
        manager, settings = self._config.val_env_manager, self._config.validation
        if manager is None:
            return None
        rollout = self._rollout(generator, manager, settings.generating_args, "validation")
        return EpisodeValidator(
            list(itertools.islice(episode_tasks(self._config, manager, VALIDATION), manager.num_env_groups)),
            replace(rollout, frames=True),
            attempts=1 + self._config.max_group_retries,
            timeout_seconds=settings.timeout_seconds,
            on_event=self._on_event,
        )

    def metrics(self) -> dict[str, float]:
        counts = {f"env_workers/{name}": count for name, count in self.workers.pool.counts().items()}
        counts |= {f"env_tokens/{name}": count for name, count in self._tokens.items()}
        return {name: float(count) for name, count in counts.items()}

    def _rollout(
        self, generator: Generator, manager: EnvManagerConfig, arguments: GeneratingArguments, purpose: str
    ) -> EpisodeRollout:
        longest = derived.sequence_length(self._config)
        return EpisodeRollout(
            generator=generator,
            environments=self.workers.pool,
            managers={tag: self._manager(tag, manager, arguments) for tag in derived.used_tags(self._config, manager)},
            sampling=sampling_params(arguments, longest),
            group_size=manager.group_size,
            spare=manager.group_size_redundancy,
            run_seed=self._config.seed,
            purpose=purpose,
            counts_control_tokens=self._config.on_control_tokens == "refuse",
            with_routing=purpose == "train" and self._config.actor_train.router_replay,
        )

    def _manager(self, tag: str, manager: EnvManagerConfig, arguments: GeneratingArguments) -> EnvManager:
        settings = manager_settings(self._config, tag, manager, arguments)
        template, tokenizer = self._plan.template, self._prepared.tokenizer
        endpoint, sessions = self.workers.endpoint, self._plan.agents.get(tag)
        if endpoint is not None and sessions is not None:
            silence = self._config.custom_envs[tag].step_timeout_seconds
            return AgentManager(sessions(settings), template, tokenizer, endpoint, silence)
        return self._plan.managers[tag](settings, template, tokenizer)


@dataclass(frozen=True)
class EpisodeProcesses(WorkerProcesses):
    """The environment workers, and the endpoint through which agents in them call the policy, if there are agents."""

    pool: EnvPool
    endpoint: Endpoint | None

    async def start(self) -> None:
        if self.endpoint is not None:
            await asyncio.to_thread(self.endpoint.start)
        await self.pool.start()

    async def shutdown(self) -> None:
        try:
            await self.pool.shutdown()
        finally:
            if self.endpoint is not None:
                await asyncio.to_thread(self.endpoint.stop)

    def busy_spans(self) -> dict[str, list[tuple[float, float]]]:
        return self.pool.busy_spans()

    def cpu_seconds(self) -> dict[str, dict[Hashable, float]]:
        return self.pool.cpu_seconds()


def manager_settings(
    config: AgenticConfig, tag: str, manager: EnvManagerConfig, arguments: GeneratingArguments
) -> ManagerSettings:
    """Return the settings of the environment manager for a tag: limits of episodes and turns, penalty, history."""
    env = config.custom_envs[tag]
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


@dataclass(frozen=True)
class EpisodeTask:
    """The environment tag and seed that the episodes of a group share."""

    tag: str
    seed: int


def episode_tasks(config: AgenticConfig, manager: EnvManagerConfig, split: int) -> Iterator[EpisodeTask]:
    """Yield the task of each group, endlessly.

    The tags' shares add up to one cycle of groups. Each cycle contains every tag as often as its share says, in an
    order drawn from the run seed. Seeds are below 2^31, as some environments require.
    """
    shares = derived.used_tags(config, manager)
    turn = [tag for tag, share in shares.items() for _ in range(share)]
    for cycle in itertools.count():
        rng = np.random.default_rng(derive_seed(config.seed, "tags", split, cycle))
        for position, index in enumerate(rng.permutation(len(turn))):
            number = cycle * len(turn) + position
            yield EpisodeTask(turn[index], environment_seed(config, split, number))


def environment_seed(config: AgenticConfig, split: int, number: int) -> int:
    """Return the environment seed of group ``number``. ``split``: `TRAINING` or `VALIDATION`."""
    return derive_seed(config.seed, "environments", split, number) % 2**30 * 2 + split


class EpisodesFailed(RuntimeError):
    """More episodes of a group failed than there are spares. The message has the tag, the seed and every cause."""


@dataclass(frozen=True)
class EpisodeRollout:
    """Generates groups of episodes. Training and validation have one object each."""

    generator: Generator
    environments: EnvPool
    managers: Mapping[str, EnvManager]
    """Environment managers by tag."""
    sampling: SamplingParams
    group_size: int
    spare: int
    """Maximum number of failed episodes per group."""
    run_seed: int
    purpose: str
    """``train`` or ``validation``; part of each request's id and seed."""
    at_once: asyncio.Semaphore | None = None
    """Limit on the number of groups that run concurrently; None: no limit."""
    frames: bool = False
    """True to record a rendered frame at each turn."""
    counts_control_tokens: bool = False
    """True to give each episode the metric ``control_tokens``: 1 if one that was spelled ended it, else 0."""
    with_routing: bool = False
    """True to record the experts of each token."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Totals of sampled tokens: ``sampled`` counts all completed turns, ``untrained`` the tokens that finished episodes
    left out of their samples, ``discarded`` those of episodes that ended up in no group. All other tokens are in
    groups."""

    async def group(self, group_id: int, task: EpisodeTask, min_version: int | None = None) -> Group:
        """Generate a group with weights of version ``min_version`` or newer."""
        return as_group(group_id, task, await self.play(group_id, task, min_version))

    async def play(self, group_id: int, task: EpisodeTask, min_version: int | None = None) -> list[Episode]:
        """Generate the episodes of a group.

        Raises `EpisodesFailed`, the engine's errors, and `FatalRolloutError` for failures that a retry cannot cure.
        """
        async with self.at_once or nullcontext():
            episodes: dict[int, Episode] = {}
            try:
                await self._play(group_id, task, min_version, episodes)
            except BaseException:
                self.tokens["discarded"] += sum(map(_trained_tokens, episodes.values()))
                raise
        return [episodes[index] for index in sorted(episodes)]

    async def _play(
        self, group_id: int, task: EpisodeTask, min_version: int | None, episodes: dict[int, Episode]
    ) -> None:
        """Generate the episodes of a group and add them to ``episodes`` by index."""
        causes: list[str] = []
        running: dict[asyncio.Task[Episode], int] = {}

        def begin(index: int) -> None:
            running[asyncio.ensure_future(self._episode(group_id, index, task, min_version))] = index

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
                            failed = f"{len(causes)} episodes failed; " + "; ".join(causes)
                            raise EpisodesFailed(f"environment `{task.tag}`, seed {task.seed}: {failed}") from error
                        begin(self.group_size + len(causes) - 1)
        finally:
            for left in running:
                left.cancel()
            if running:
                await asyncio.wait(running)  # until they have released their environments and requests
            for left, index in running.items():
                if not left.cancelled() and left.exception() is None:  # the first failure is being raised
                    episodes[index] = left.result()

    async def _episode(self, group_id: int, index: int, task: EpisodeTask, min_version: int | None) -> Episode:
        """Generate one episode. If it is lost, possibly through no fault of its own, restart it with the same random
        numbers."""
        name = f"{self.purpose}-{group_id}-{index}"
        sampled, generating, loop = 0, 0.0, asyncio.get_running_loop()

        async def policy(
            prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
        ) -> SampledTurn:
            nonlocal sampled, generating
            seed = derive_seed(self.run_seed, self.purpose, group_id, index, turn)
            stops = self.sampling.stop_strings + stop_strings
            sampling = replace(self.sampling, max_new_tokens=max_new_tokens, seed=seed, stop_strings=stops)
            request = GenerateRequest(f"{name}-{turn}", prompt_token_ids, sampling, with_routing=self.with_routing)
            # All turns on one replica, for its prefix cache.
            began = loop.time()
            done = await self.generator.generate(request, sticky_key=name, min_version=min_version)
            generating += loop.time() - began
            sampled += len(done.token_ids)
            # Copies, because the arrays share memory with the results of other requests.
            token_ids, logprobs, versions = map(np.array, (done.token_ids, done.logprobs, done.versions))
            routed = None if done.routed_experts is None else np.array(done.routed_experts)
            return SampledTurn(token_ids, logprobs, versions, done.finish_reason, routed)

        losses = 0
        try:
            while True:
                session, sampled = self.environments.session(task.tag, frames=self.frames), 0
                began, generating = loop.time(), 0.0
                trained: int | None = None
                try:
                    episode = await self.managers[task.tag].run_episode(session, policy, tag=task.tag, seed=task.seed)
                    trained = _trained_tokens(episode)
                    # An agent generates within its environment's steps, and may have several requests at once.
                    episode.worked = max(0.0, min(session.worked, loop.time() - began - generating))
                    if self.counts_control_tokens:
                        episode.metrics["control_tokens"] = float(episode.end == "control_token")
                    return episode
                except SessionFailed as error:
                    losses += 1
                    if losses > LOST_RETRIES or not error.may_be_innocent:
                        raise
                    logger.info("begun again: %s", error)
                finally:
                    self.tokens["sampled"] += sampled
                    self.tokens["discarded" if trained is None else "untrained"] += sampled - (trained or 0)
        except EnvPoolClosed as error:
            raise FatalRolloutError(str(error)) from error
        finally:
            self.generator.forget(name)


def _trained_tokens(episode: Episode) -> int:
    return sum(sample.response_tokens for sample in episode.samples)


def as_group(group_id: int, task: EpisodeTask, episodes: list[Episode]) -> Group:
    """Combine episodes into a `Group`. Each sample records the index of its episode.

    An episode that reported no success had none, if another one of the group reported its own.
    """
    is_reported = any(episode.success is not None for episode in episodes)
    for index, episode in enumerate(episodes):
        for sample in episode.samples:
            sample.episode = index
        success = {"success": float(bool(episode.success))} if is_reported else {}
        episode.samples[0].metrics = episode.metrics | success
    first = episodes[0]
    prompt = Prompt(
        prompt_id=f"{task.tag}:{task.seed}",
        domain=task.tag,
        token_ids=first.samples[0].token_ids[:0],
        text=first.turns[0].observation,
        metadata={"seed": task.seed},
    )
    samples = [sample for episode in episodes for sample in episode.samples]
    return Group(group_id, prompt, samples, waits=[episode.worked for episode in episodes])


@dataclass(frozen=True)
class EpisodeValidator(Validator):
    """Validator that runs the validation episodes."""

    tasks: Sequence[EpisodeTask]
    rollout: EpisodeRollout

    async def measure(self, version: int) -> ValidationResult:
        played = await self.made(len(self.tasks), lambda index: self.rollout.play(index, self.tasks[index]))
        groups = [as_group(index, self.tasks[index], episodes) for index, episodes in played.items()]
        episodes = [episode for group in played.values() for episode in group]
        return ValidationResult(version, self._metrics(played), groups, episodes)

    def _metrics(self, played: Mapping[int, list[Episode]]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for tag, requested in sorted(Counter(task.tag for task in self.tasks).items()):
            groups = [episodes for index, episodes in played.items() if self.tasks[index].tag == tag]
            measured = validation_metrics(groups) if groups else {}
            measured["failed_groups"] = float(requested - len(groups))
            metrics |= {f"val/{tag}/{name}": value for name, value in measured.items()}
        return metrics


def validation_metrics(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    """Return the mean score, and the mean of every metric over the episodes that report it.

    If an episode reports its success, also return ``accuracy``, the share of successful episodes, and
    ``best_of_group``, the share of groups with at least one success. Episodes without a report had none: a limit
    stopped them.
    """
    episodes = [episode for group in groups for episode in group]
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.metrics.items():
            values[name].append(value)
    values["score"] = [episode.score for episode in episodes]
    if any(episode.success is not None for episode in episodes):
        values["accuracy"] = [bool(episode.success) for episode in episodes]
        values["best_of_group"] = [any(episode.success for episode in group) for group in groups]
    return {name: float(np.mean(values[name])) for name in sorted(values)}
