"""The loop of an episode: read, write, act, until it ends. All managers share it.

Prompts, sampled tokens and answers are kept unchanged. Samples and scores are made from them afterwards (see
`bookkeeping`). The session is closed whatever happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll.agentic.env_manager.errors import EpisodeRefused, PolicyAborted
from roll.agentic.env_manager.settings import ManagerSettings
from roll.agentic.episode import EnvironmentFailed, EnvSession, EpisodeEnd, Observation, Policy, SampledTurn


class Decoder(Protocol):
    """The part of a tokenizer that turns a response into text."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; without special tokens if ``skip_special_tokens``."""


@dataclass(frozen=True)
class PlayedTurn:
    """One turn as it happened."""

    number: int
    """Number of the turn, from 0."""
    observation: Observation
    """The observation that the turn acted on."""
    prompt: np.ndarray
    """int32: the tokens that the policy read."""
    sampled: SampledTurn
    text: str
    """The text sent to the environment."""
    answer: Observation
    """The environment's answer."""
    penalty: float

    @property
    def reward(self) -> float:
        """The environment's reward plus the penalty."""
        return self.answer.reward + self.penalty


@dataclass(frozen=True)
class PlayedEpisode:
    """All turns of an episode, at least one, and the reason for its end."""

    tag: str
    seed: int
    turns: tuple[PlayedTurn, ...]
    end: EpisodeEnd


class Prompter(Protocol):
    """Source of the prompts of one episode."""

    def first(self, observation: Observation) -> np.ndarray:
        """Return the first prompt, int32, however long it is."""

    def following(self, turns: Sequence[PlayedTurn]) -> np.ndarray | None:
        """Return the prompt after these turns, int32; None if none fits that leaves room for a token."""


async def play(
    session: EnvSession,
    policy: Policy,
    prompter: Prompter,
    decoder: Decoder,
    settings: ManagerSettings,
    *,
    tag: str,
    seed: int,
) -> PlayedEpisode:
    """Play one episode. Raises `EpisodeRefused`, `PolicyAborted`, `EnvironmentFailed`, and what the policy raises."""
    try:
        return await _play(session, policy, prompter, decoder, settings, tag, seed)
    finally:
        await session.close()


async def _play(
    session: EnvSession,
    policy: Policy,
    prompter: Prompter,
    decoder: Decoder,
    settings: ManagerSettings,
    tag: str,
    seed: int,
) -> PlayedEpisode:
    observation = await session.reset(seed)
    if observation.done:
        raise EnvironmentFailed(f"environment {tag!r}, seed {seed}: the reset answered that the episode is over")
    prompt = prompter.first(observation)
    if len(prompt) > settings.prompt_limit:
        raise EpisodeRefused(_too_long(tag, seed, len(prompt), settings))
    turns: list[PlayedTurn] = []
    while True:
        where = f"environment {tag!r}, seed {seed}, turn {len(turns)}"
        prompt.flags.writeable = False  # it is part of the record and of later prompts
        sampled = await _sample(policy, prompt, len(turns), settings.response_limit(len(prompt)), where)
        text = decoder.decode(sampled.token_ids.tolist(), skip_special_tokens=True)
        answer = await session.step(text)
        penalty = 0.0 if answer.action_is_valid else settings.format_penalty
        turns.append(PlayedTurn(len(turns), observation, prompt, sampled, text, answer, penalty))
        end = _end(answer, len(turns), settings.max_steps)
        if end is not None:
            return PlayedEpisode(tag, seed, tuple(turns), end)
        following = prompter.following(turns)
        if following is None:
            return PlayedEpisode(tag, seed, tuple(turns), "sequence_length")
        prompt, observation = following, answer


async def _sample(policy: Policy, prompt: np.ndarray, turn: int, max_new_tokens: int, where: str) -> SampledTurn:
    sampled = await policy(prompt, turn=turn, max_new_tokens=max_new_tokens)
    if sampled.finish_reason == "abort":
        raise PolicyAborted(f"{where}: the policy's response was aborted after {len(sampled.token_ids)} tokens")
    lengths = len(sampled.token_ids), len(sampled.logprobs), len(sampled.versions)
    if lengths[0] > max_new_tokens or len(set(lengths)) > 1:
        raise ValueError(
            f"{where}: the policy answered {lengths[0]} tokens with {lengths[1]} log-probabilities and {lengths[2]} "
            f"versions; it was asked for at most {max_new_tokens} of each"
        )
    return sampled


def _end(answer: Observation, turns: int, max_steps: int) -> EpisodeEnd | None:
    if answer.terminated:
        return "terminated"
    if answer.truncated:
        return "truncated"
    return "max_steps" if turns == max_steps else None


def _too_long(tag: str, seed: int, tokens: int, settings: ManagerSettings) -> str:
    by_prompt = settings.prompt_length <= settings.sequence_length - 1
    key, needed = ("prompt_length", tokens) if by_prompt else ("sequence_length", tokens + 1)
    return (
        f"environment {tag!r}, seed {seed}: the first prompt has {tokens} tokens, and `{key}: {getattr(settings, key)}`"
        f" allows {settings.prompt_limit}; raise `{key}` to at least {needed}, or have the environment say less"
    )
