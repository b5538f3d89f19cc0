"""How an agentic group comes about: episodes of one environment seed, all at once, each a chain of requests.

Everything random derives from (run seed, group id, episode index, turn), so a group can be made again. An episode that
fails for its environment's fault is replaced by a new one while the group's spare ones last, then the group fails with
the causes. One that was lost with its process, perhaps through another's fault, is begun again. No episode is left out
for being slow.
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
"""How often an episode is begun again after a loss that may not have been its fault."""

@dataclass(frozen=True)
class EpisodeTask:
    """What the episodes of a group share."""

    tag: str
    seed: int

    @property
    def name(self) -> str:
        """The first part of its episodes' names."""
        return f"{self.tag}:{self.seed}"


class EpisodesFailed(RuntimeError):
    """More episodes of a group failed than it has spare ones. The message has tag, seed and every cause."""


class Environments(Protocol):
    """Where episodes get their environments."""

    def session(self, tag: str, *, frames: bool = False) -> EnvSession:
        """A place for one episode of an environment; ``frames``: pictures of it are kept."""


@dataclass(frozen=True)
class EnginePolicy:
    """The engine as the `Policy` of one episode: a request per turn, all on one replica for its prefix cache."""

    generator: Generator
    sampling: SamplingParams
    name: str
    """Of the episode, unique among those that run."""
    seed_parts: tuple[int, *tuple[int | str, ...]]
    min_version: int | None

    async def __call__(self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int) -> SampledTurn:
        """See `Policy`."""
        request = GenerateRequest(
            request_id=f"{self.name}-{turn}",
            prompt_token_ids=prompt_token_ids,
            sampling=replace(self.sampling, max_new_tokens=max_new_tokens, seed=derive_seed(*self.seed_parts, turn)),
        )
        done = await self.generator.generate(request, sticky_key=self.name, min_version=self.min_version)
        return SampledTurn(done.token_ids, done.logprobs, done.versions, done.finish_reason)


@dataclass(frozen=True)
class EpisodeRollout:
    """Plays groups; one object serves training, another validation."""

    generator: Generator
    environments: Environments
    managers: Mapping[str, EnvManager]
    """By tag."""
    sampling: SamplingParams
    group_size: int
    spare: int
    """Episodes of a group that may fail."""
    run_seed: int
    purpose: str
    """Part of each request's name and seed: ``train`` or ``validation``."""
    at_once: asyncio.Semaphore | None = None
    """Groups that may run at once; None: all."""
    frames: bool = False
    """Whether episodes can be looked at afterwards."""

    async def group(self, group_id: int, task: EpisodeTask, min_version: int | None = None) -> Group:
        """Play a group with weights of ``min_version`` or newer, as what a trainer takes."""
        return as_group(group_id, task, await self.play(group_id, task, min_version))

    async def play(self, group_id: int, task: EpisodeTask, min_version: int | None = None) -> list[Episode]:
        """The episodes of a group. Raises `EpisodesFailed`, and what the engine raised; `FatalRolloutError` for what no
        retry cures."""
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
        """The episode; begun again with the same random numbers after a loss that may be another's fault."""
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
    """Episodes as the unit of account; each sample knows which episode it belongs to."""
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
    """Cancel what still runs, and wait until it has let go of what it holds."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(list(tasks))
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen: the first failure is being raised
