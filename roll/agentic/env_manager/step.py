"""The manager `step`: each turn's prompt is rendered from a window of the episode, and each turn becomes a sample.

It suits episodes that are longer than a context, and chat templates that rewrite earlier turns. Earlier responses are
part of a prompt as text, and are never trained on there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from roll.agentic.env_manager.bookkeeping import episode_of, turn_samples
from roll.agentic.env_manager.play import Decoder, PlayedTurn, play
from roll.agentic.env_manager.settings import ManagerSettings
from roll.agentic.episode import EnvSession, Episode, Message, Observation, Policy
from roll.data.chat_turns import TurnTemplate


@dataclass(frozen=True)
class StepManager:
    """A manager for episodes whose turns are read and trained on separately."""

    settings: ManagerSettings
    template: TurnTemplate
    decoder: Decoder

    async def run_episode(self, session: EnvSession, policy: Policy, *, tag: str, seed: int) -> Episode:
        """Run one episode and close the session, whatever happens.

        Raises `EpisodeRefused`, `PolicyAborted`, `EnvironmentFailed`, `TemplateRefused`, and what the policy raises.
        """
        prompter = HistoryWindow(self.template, self.settings)
        played = await play(session, policy, prompter, self.decoder, self.settings, tag=tag, seed=seed)
        return episode_of(played, turn_samples(played))


@dataclass(frozen=True)
class HistoryWindow:
    """The prompts of one episode: system messages, first observation, last turns, current observation."""

    template: TurnTemplate
    settings: ManagerSettings

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
