"""Environment managers: run an episode between an environment and the policy, and build training samples from it.

The policy is trained on exactly the tokens it sampled: they are never re-encoded, and the response mask is true at
these tokens only. Managers are pure asyncio and keep no state between episodes. They always close the session.

`trajectory`: the policy reads the whole episode as one growing context, which becomes one sample. `step`: the prompt of
each turn is rendered from a window of the episode, and each turn becomes a sample. This suits episodes that are longer
than the context, and chat templates that rewrite earlier turns. `agent`: see `roll.agentic.agents`. A user's own
manager is given by import path.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from roll.agentic.episode import (
    EnvironmentFailed,
    EnvSession,
    Episode,
    EpisodeEnd,
    EpisodeRefused,
    ManagerSettings,
    Message,
    Observation,
    Policy,
    PolicyAborted,
    SampledTurn,
    TurnRecord,
)
from roll.configs.plugins import Kind, PlugIn
from roll.data.chat import ControlTokenSpelled, Conversation, TurnTemplate
from roll.data.records import Sample, joined_routing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ENVIRONMENT_MANAGERS = Kind(
    "environment manager",
    "roll.environment_managers",
    {
        "trajectory": PlugIn("roll.agentic.manager:TrajectoryManager"),
        "step": PlugIn("roll.agentic.manager:StepManager"),
        "agent": PlugIn("roll.agentic.agents:AgentManager", ("aiohttp",), extra="agents"),
    },
    PlugIn,
    "package.module:Class",
)


class EnvManager(Protocol):
    """Runs episodes, many of them concurrently."""

    async def run_episode(self, session: EnvSession, policy: Policy, *, tag: str, seed: int) -> Episode:
        """Run one episode in the session, and close the session."""


EnvManagerFactory = Callable[[ManagerSettings, TurnTemplate, "PreTrainedTokenizerBase"], EnvManager]
"""Class or function that creates an environment manager."""


@dataclass(frozen=True)
class PlayedTurn:
    """One completed turn."""

    number: int
    """Index of the turn, from 0."""
    observation: Observation
    """The observation before the action."""
    prompt: np.ndarray
    """Prompt of this turn, int32 ``[prompt]``."""
    sampled: SampledTurn
    text: str
    """The decoded response, as sent to the environment."""
    answer: Observation
    """The observation after the action."""
    penalty: float

    @property
    def reward(self) -> float:
        """The environment's reward plus the penalty."""
        return self.answer.reward + self.penalty


@dataclass(frozen=True)
class PlayedEpisode:
    """The turns of an episode (at least one), and why it ended."""

    tag: str
    seed: int
    turns: tuple[PlayedTurn, ...]
    end: EpisodeEnd

    @property
    def score(self) -> float:
        """Sum of the environment's rewards."""
        return float(sum(turn.answer.reward for turn in self.turns))

    @cached_property
    def credited_rewards(self) -> dict[int, float]:
        """Turn number -> reward credited to the turn's tokens.

        The reward of a turn without tokens is added to the last turn before it that has some. Rewards before the first
        token are not credited.
        """
        rewards: dict[int, float] = {}
        for turn in self.turns:
            if len(turn.sampled.token_ids):
                rewards[turn.number] = turn.reward
            elif rewards:
                rewards[next(reversed(rewards))] += turn.reward
        return rewards


class Prompter(Protocol):
    """Builds the prompts of one episode."""

    def first(self, observation: Observation) -> np.ndarray:
        """Return the first prompt, int32, of any length."""

    def following(self, turns: Sequence[PlayedTurn]) -> np.ndarray | None:
        """Return the prompt after these turns, int32; None if no prompt leaves room for a response."""


@dataclass(frozen=True)
class BuiltInManager:
    """Base class of managers: the loop of an episode. Subclasses build prompts and samples."""

    settings: ManagerSettings
    template: TurnTemplate
    decoder: PreTrainedTokenizerBase

    async def run_episode(self, session: EnvSession, policy: Policy, *, tag: str, seed: int) -> Episode:
        """Run one episode. Always closes the session.

        Raises `EpisodeRefused`, `PolicyAborted`, `EnvironmentFailed`, `TemplateRefused`, and the errors of the policy.
        """
        try:
            played = await self._play(session, policy, tag, seed)
        finally:
            await session.close()
        return episode_of(played, self.samples(played))

    def prompter(self) -> Prompter:
        """Return the prompt builder of one episode."""
        raise NotImplementedError

    def samples(self, played: PlayedEpisode) -> list[Sample]:
        """Return the training samples of an episode."""
        raise NotImplementedError

    async def _play(self, session: EnvSession, policy: Policy, tag: str, seed: int) -> PlayedEpisode:
        settings, prompter = self.settings, self.prompter()
        observation = await session.reset(seed)
        if observation.done:
            raise EnvironmentFailed(f"environment {tag!r}, seed {seed}: the reset answered that the episode is over")
        prompt = prompter.first(observation)
        if len(prompt) > settings.prompt_limit:
            raise EpisodeRefused(_too_long(tag, seed, len(prompt), settings))
        turns: list[PlayedTurn] = []
        while True:
            where = f"environment {tag!r}, seed {seed}, turn {len(turns)}"
            prompt.flags.writeable = False  # recorded, and shared with later prompts
            sampled = await _sample(policy, prompt, len(turns), settings.response_limit(len(prompt)), where)
            text = self.decoder.decode(sampled.token_ids.tolist(), skip_special_tokens=True)
            answer = await session.step(text)
            penalty = 0.0 if answer.action_is_valid else settings.format_penalty
            turns.append(PlayedTurn(len(turns), observation, prompt, sampled, text, answer, penalty))
            end = _end(answer, len(turns), settings.max_steps)
            if end is not None:
                return PlayedEpisode(tag, seed, tuple(turns), end)
            try:
                following = prompter.following(turns)
            except ControlTokenSpelled as spelled:
                logger.info("%s: its answer ends the episode: %s", where, spelled)
                return PlayedEpisode(tag, seed, tuple(turns), "control_token")
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


class TrajectoryManager(BuiltInManager):
    """Manager for episodes with a growing context. Needs an append-only chat template."""

    def prompter(self) -> Prompter:
        """Return a `GrowingContext`."""
        return GrowingContext(self.template, self.settings.sequence_length)

    def samples(self, played: PlayedEpisode) -> list[Sample]:
        """Return the episode as one sample. Its text is everything after the first prompt, with special tokens."""
        last = played.turns[-1]
        after_prompt = np.concatenate([last.prompt, last.sampled.token_ids])[len(played.turns[0].prompt) :]
        text = self.decoder.decode(after_prompt.tolist(), skip_special_tokens=False)
        return [_sample_of(played, played.turns, text)]


class GrowingContext:
    """Builds the prompts of one episode, each of which is a prefix of the next.

    They are views of one buffer, so the memory of an episode is that of its longest prompt.
    """

    def __init__(self, template: TurnTemplate, sequence_length: int) -> None:
        self._template = template
        self._sequence_length = sequence_length
        self._conversation: Conversation
        self._tokens = np.zeros(0, dtype=np.int32)

    def first(self, observation: Observation) -> np.ndarray:
        """Return the rendered first observation."""
        self._conversation = self._template.begin(observation.messages, observation.tools)
        return self._conversation.prompt_token_ids

    def following(self, turns: Sequence[PlayedTurn]) -> np.ndarray | None:
        """Append the sampled tokens and the new messages to the last prompt; None if that is too long."""
        last = turns[-1]
        glue = self._conversation.glue(last.sampled.token_ids, last.answer.messages)
        pieces = (last.sampled.token_ids, glue)
        end = len(last.prompt)
        if end + sum(map(len, pieces)) >= self._sequence_length:
            return None
        if len(turns) == 1:
            self._tokens = np.empty(self._sequence_length, dtype=np.int32)
            self._tokens[:end] = last.prompt
        for piece in pieces:
            self._tokens[end : end + len(piece)] = piece
            end += len(piece)
        return self._tokens[:end]


class StepManager(BuiltInManager):
    """Manager for episodes in which each turn has a prompt and a sample of its own.

    A prompt contains the system messages, the first observation, the latest turns and the current observation.
    """

    def prompter(self) -> Prompter:
        """Return this manager, because its prompts depend on the turns only."""
        return self

    def samples(self, played: PlayedEpisode) -> list[Sample]:
        """Return one sample per turn with sampled tokens. If there is none, return that of the first turn."""
        written = [turn for turn in played.turns if len(turn.sampled.token_ids)] or played.turns[:1]
        return [_sample_of(played, [turn], turn.text) for turn in written]

    def first(self, observation: Observation) -> np.ndarray:
        """Return the rendered first observation."""
        return self.template.prompt(observation.messages, observation.tools)

    def following(self, turns: Sequence[PlayedTurn]) -> np.ndarray | None:
        """Return the prompt with the longest history that fits; None if none fits."""
        tools = turns[0].observation.tools
        for messages in self._windows(turns):
            prompt = self.template.prompt(messages, tools)
            if len(prompt) <= self.settings.prompt_limit:
                return prompt
        return None

    def _windows(self, turns: Sequence[PlayedTurn]) -> Iterator[list[Message]]:
        """Yield the messages for each history length, from the longest to the current observation alone."""
        system, first = _without_system(turns[0].observation.messages)
        present = turns[-1].answer.messages
        for length in range(min(self.settings.history_length, len(turns)), -1, -1):
            shown = turns[len(turns) - length :]
            keeps_first = self.settings.keep_first_observation and length < len(turns)
            rest = [*_history(shown), *present]
            yield [*system, *(_joined(first, rest) if keeps_first else rest)]
        if self.settings.keep_first_observation:
            yield [*system, *present]


def _history(turns: Sequence[PlayedTurn]) -> Iterator[Message]:
    for turn in turns:
        yield from _without_system(turn.observation.messages)[1] if turn.number == 0 else turn.observation.messages
        yield {"role": "assistant", "content": turn.text}


def _without_system(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Split messages into leading system messages and the rest."""
    count = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return list(messages[:count]), list(messages[count:])


def _joined(first: list[Message], rest: list[Message]) -> list[Message]:
    """Concatenate messages, merging a user message at the end of ``first`` with one at the beginning of ``rest``.

    Many chat templates require user and assistant messages to alternate.
    """
    if not first or not (_is_user_text(first[-1]) and _is_user_text(rest[0])):
        return [*first, *rest]
    meeting = {**rest[0], "content": f"{first[-1]['content']}\n\n{rest[0]['content']}"}
    return [*first[:-1], meeting, *rest[1:]]


def _is_user_text(message: Message) -> bool:
    return message["role"] == "user" and isinstance(message["content"], str)


def _sample_of(played: PlayedEpisode, turns: Sequence[PlayedTurn], text: str) -> Sample:
    """Build one sample from turns. The prompt of each turn must begin with all tokens of the turns before it."""
    token_ids = np.concatenate([turns[-1].prompt, turns[-1].sampled.token_ids]).astype(np.int32)
    length = len(token_ids)
    numbers = np.full(length, -1, dtype=np.int32)
    credited = np.zeros(length, dtype=np.float32)
    states = np.full(length, -1, dtype=np.int64)
    sample = Sample(
        token_ids=token_ids,
        response_mask=np.zeros(length, dtype=bool),
        behaviour_logprobs=np.zeros(length, dtype=np.float32),
        versions=np.full(length, -1, dtype=np.int32),
        # Not "length" for a turn that hit its own limit: the episode continued after it.
        finish_reason="length" if played.end == "sequence_length" else "stop",
        response_text=text,
        score=played.score,
        reward=float(sum(turn.reward for turn in played.turns)),
        turns=numbers,
        turn_rewards=credited,
        turn_states=states,
        routed_experts=joined_routing([turn.sampled.routed_experts for turn in turns], length),
    )
    for turn in turns:
        span = slice(len(turn.prompt), len(turn.prompt) + len(turn.sampled.token_ids))
        sample.response_mask[span] = True
        sample.behaviour_logprobs[span] = turn.sampled.logprobs
        sample.versions[span] = turn.sampled.versions
        numbers[span] = turn.number
        states[span] = state_id(turn.observation.state)
        if turn.number in played.credited_rewards:
            credited[span.stop - 1] = played.credited_rewards[turn.number]
    return sample


def episode_of(played: PlayedEpisode, samples: list[Sample]) -> Episode:
    """Build the `Episode` with these samples. Its success is the last one that the environment reported."""
    answers = [turn.answer for turn in played.turns]
    reported = [answer.success for answer in answers if answer.success is not None]
    return Episode(
        tag=played.tag,
        seed=played.seed,
        samples=samples,
        end=played.end,
        success=reported[-1] if reported else None,
        score=played.score,
        turns=[
            TurnRecord(
                observation="\n".join(str(message.get("content", "")) for message in turn.observation.messages),
                response=turn.text,
                reward=turn.answer.reward,
                action_is_valid=turn.answer.action_is_valid,
                frame=turn.observation.frame,
            )
            for turn in played.turns
        ],
        last_frame=answers[-1].frame,
        metrics=_metrics(played),
    )


def _metrics(played: PlayedEpisode) -> dict[str, float]:
    """Return the last value of each environment metric, and the manager's own metrics, which take precedence."""
    metrics = dict(played.turns[0].observation.metrics)
    for turn in played.turns:
        metrics |= turn.answer.metrics
    invalid = sum(not turn.answer.action_is_valid for turn in played.turns)
    return metrics | {
        "turns": float(len(played.turns)),
        "invalid_actions": invalid / len(played.turns),
        "capped_turns": sum(turn.sampled.finish_reason == "length" for turn in played.turns) / len(played.turns),
        "tokens": float(sum(len(turn.sampled.token_ids) for turn in played.turns)),
    }


def state_id(state: str | None) -> int:
    """Return a signed 64-bit hash of a state, equal on every machine. Only None gives -1."""
    if state is None:
        return -1
    digest = hashlib.blake2b(state.encode(errors="surrogatepass"), digest_size=8).digest()
    number = int.from_bytes(digest, "big", signed=True)
    return number if number != -1 else -2
