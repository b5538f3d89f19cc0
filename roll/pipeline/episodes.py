"""Rollout of an agentic group: episodes of one environment seed, all at once, each a chain of requests.

Everything random derives from (run seed, group id, episode index, turn), so a group can be generated again. If an
episode fails through the fault of its environment, a spare episode replaces it. When the spare episodes are used up,
the group fails with all causes. An episode that was lost with its process, perhaps through another episode's fault,
restarts. No episode is left out for being slow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from roll.agentic.env_manager.errors import EpisodeRefused
from roll.agentic.env_manager.registry import EnvManager
from roll.agentic.env_worker.records import EnvPoolClosed, SessionFailed
from roll.agentic.episode import EnvironmentFailed, EnvSession, Episode, SampledTurn
from roll.data.chat_turns import TemplateRefused
from roll.data.records import Group, Prompt
from roll.data.seeds import derive_seed
from roll.pipeline.rollout_side import Generator
from roll.rollout.schedule import FatalRolloutError
from roll.strategies.infer.base import GenerateRequest, SamplingParams

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
