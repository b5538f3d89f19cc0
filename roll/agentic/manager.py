"""Managers, which run one episode each between an environment and the policy, and make training samples of it.

The policy is trained on exactly what it sampled: its tokens are never encoded again, and the response mask is true at
them and nowhere else. Managers are pure asyncio and keep no state between episodes. The session is closed whatever
happens.

`trajectory`: the policy reads its whole episode as one growing context, which becomes one sample. `step`: each turn's
prompt is rendered from a window of the episode, and each turn becomes a sample. That suits episodes that are longer
than a context, and chat templates that rewrite earlier turns. Any other manager is a user's class, by its import path.
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
from roll.data.records import Sample

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
    """A manager that runs episodes; it may run many at once."""

    async def run_episode(self, session: EnvSession, policy: Policy, *, tag: str, seed: int) -> Episode:
        """Run one episode with the session, and close the session."""


EnvManagerFactory = Callable[[ManagerSettings, TurnTemplate, "PreTrainedTokenizerBase"], EnvManager]
"""The class or function behind a name."""


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

    @property
    def score(self) -> float:
        """Sum of the environment's rewards."""
        return float(sum(turn.answer.reward for turn in self.turns))

    @cached_property
    def credited_rewards(self) -> dict[int, float]:
        """Reward by turn number.

        A turn without a token adds its reward to the last turn before it that has one. Rewards before the first token
        are credited to no turn.
        """
        rewards: dict[int, float] = {}
        for turn in self.turns:
            if len(turn.sampled.token_ids):
                rewards[turn.number] = turn.reward
            elif rewards:
                rewards[next(reversed(rewards))] += turn.reward
        return rewards


class Prompter(Protocol):
    """Source of the prompts of one episode."""

    def first(self, observation: Observation) -> np.ndarray:
        """Return the first prompt, int32, however long it is."""

    def following(self, turns: Sequence[PlayedTurn]) -> np.ndarray | None:
        """Return the prompt after these turns, int32; None if none fits that leaves room for a token."""


@dataclass(frozen=True)
class BuiltInManager:
    """The course of an episode. The managers differ in its prompts and in its samples."""

    settings: ManagerSettings
    template: TurnTemplate
    decoder: PreTrainedTokenizerBase

    async def run_episode(self, session: EnvSession, policy: Policy, *, tag: str, seed: int) -> Episode:
        """Run one episode and close the session, whatever happens.

        Raises `EpisodeRefused`, `PolicyAborted`, `EnvironmentFailed`, `TemplateRefused`, and what the policy raises.
        """
        try:
            played = await self._play(session, policy, tag, seed)
        finally:
            await session.close()
        episode = episode_of(played, self.samples(played))
        if self.template.refuse_control_tokens:
            episode.metrics["control_tokens"] = float(played.end == "control_token")
        return episode

    def prompter(self) -> Prompter:
        """Return the source of the prompts of one episode."""
        raise NotImplementedError

    def samples(self, played: PlayedEpisode) -> list[Sample]:
        """Return an episode's training samples."""
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
            prompt.flags.writeable = False  # it is part of the record and of later prompts
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
    """A manager for episodes whose context only grows. Needs an append-only template."""

    def prompter(self) -> Prompter:
        """Return a growing context."""
        return GrowingContext(self.template, self.settings.sequence_length)

    def samples(self, played: PlayedEpisode) -> list[Sample]:
        """Return the whole episode as one sample. Its text is everything after the first prompt, special tokens too."""
        last = played.turns[-1]
        after_prompt = np.concatenate([last.prompt, last.sampled.token_ids])[len(played.turns[0].prompt) :]
        text = self.decoder.decode(after_prompt.tolist(), skip_special_tokens=False)
        return [_sample_of(played, played.turns, text)]


class GrowingContext:
    """The prompts of one episode. Each one is the beginning of the next.

    They are views of one buffer, so an episode costs the memory of its longest prompt, not of all prompts.
    """

    def __init__(self, template: TurnTemplate, sequence_length: int) -> None:
        self._template = template
        self._sequence_length = sequence_length
        self._conversation: Conversation
        self._tokens = np.zeros(0, dtype=np.int32)

    def first(self, observation: Observation) -> np.ndarray:
        """Return the observation as the template renders it."""
        self._conversation = self._template.begin(observation.messages, observation.tools)
        return self._conversation.prompt_token_ids

    def following(self, turns: Sequence[PlayedTurn]) -> np.ndarray | None:
        """Return the last prompt, the sampled tokens and the glue before the policy's next turn; None if too long."""
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
    """A manager for episodes whose turns are read and trained on separately.

    A prompt has the system messages, the first observation, the last turns and the current observation.
    """

    def prompter(self) -> Prompter:
        """Return this manager, since its prompts depend on nothing but the turns."""
        return self

    def samples(self, played: PlayedEpisode) -> list[Sample]:
        """Return one sample per turn in which the policy wrote anything; the first turn's if it never did."""
        written = [turn for turn in played.turns if len(turn.sampled.token_ids)] or played.turns[:1]
        return [_sample_of(played, [turn], turn.text) for turn in written]

    def first(self, observation: Observation) -> np.ndarray:
        """Return the observation as the template renders it."""
        return self.template.prompt(observation.messages, observation.tools)

    def following(self, turns: Sequence[PlayedTurn]) -> np.ndarray | None:
        """Return the prompt of the longest window that fits; None if none does."""
        tools = turns[0].observation.tools
        for messages in self._windows(turns):
            prompt = self.template.prompt(messages, tools)
            if len(prompt) <= self.settings.prompt_limit:
                return prompt
        return None

    def _windows(self, turns: Sequence[PlayedTurn]) -> Iterator[list[Message]]:
        """Yield the messages of each window, from the longest one to the current observation alone."""
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
    """Return the leading system messages, and the others."""
    count = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return list(messages[:count]), list(messages[count:])


def _joined(first: list[Message], rest: list[Message]) -> list[Message]:
    """Return both lists in order, merging a user message with a user message that follows it.

    Many chat templates require that user and assistant alternate.
    """
    if not first or not (_is_user_text(first[-1]) and _is_user_text(rest[0])):
        return [*first, *rest]
    meeting = {**rest[0], "content": f"{first[-1]['content']}\n\n{rest[0]['content']}"}
    return [*first[:-1], meeting, *rest[1:]]


def _is_user_text(message: Message) -> bool:
    return message["role"] == "user" and isinstance(message["content"], str)


def _sample_of(played: PlayedEpisode, turns: Sequence[PlayedTurn], text: str) -> Sample:
    """Return one row for some turns of an episode. Each turn's prompt must begin with the row up to it."""
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
        # A turn cut at its own limit does not count: only an episode that ran out of room has its length as its end.
        finish_reason="length" if played.end == "sequence_length" else "stop",
        response_text=text,
        score=played.score,
        reward=float(sum(turn.reward for turn in played.turns)),
        turns=numbers,
        turn_rewards=credited,
        turn_states=states,
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
    """Return the episode with these samples. Its success is the last value that the environment reported."""
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
    """Return the environment's last values. Our own metrics replace those of the same name."""
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
    """Return a signed 64-bit number for a state, equal on every machine. None, and only None, gives -1."""
    if state is None:
        return -1
    digest = hashlib.blake2b(state.encode(errors="surrogatepass"), digest_size=8).digest()
    number = int.from_bytes(digest, "big", signed=True)
    return number if number != -1 else -2
