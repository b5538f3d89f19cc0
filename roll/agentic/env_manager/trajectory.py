"""The manager `trajectory`: the policy reads its whole episode as one growing context, which becomes one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll.agentic.env_manager.bookkeeping import episode_of, trajectory_sample
from roll.agentic.env_manager.play import Decoder, PlayedTurn, play
from roll.agentic.env_manager.settings import ManagerSettings
from roll.agentic.episode import EnvSession, Episode, Observation, Policy
from roll.data.chat_turns import Conversation, TurnTemplate


@dataclass(frozen=True)
class TrajectoryManager:
    """A manager for episodes whose context only grows. Needs an append-only template."""

    settings: ManagerSettings
    template: TurnTemplate
    decoder: Decoder

    async def run_episode(self, session: EnvSession, policy: Policy, *, tag: str, seed: int) -> Episode:
        """Run one episode and close the session, whatever happens.

        Raises `EpisodeRefused`, `PolicyAborted`, `EnvironmentFailed`, `TemplateRefused`, and what the policy raises.
        """
        prompter = GrowingContext(self.template, self.settings.sequence_length)
        played = await play(session, policy, prompter, self.decoder, self.settings, tag=tag, seed=seed)
        return episode_of(played, [trajectory_sample(played, self.decoder)])


class GrowingContext:
    """The prompts of one episode. Each one is the beginning of the next.

    They are views of one buffer, so an episode costs the memory of its longest prompt, not of all prompts.
    """

    def __init__(self, template: TurnTemplate, sequence_length: int) -> None:
        self._template = template
        self._sequence_length = sequence_length
        self._conversation: Conversation | None = None
        self._tokens = np.zeros(0, dtype=np.int32)

    def first(self, observation: Observation) -> np.ndarray:
        """Return the observation as the template renders it."""
        conversation = self._conversation = self._template.begin(observation.messages, observation.tools)
        return conversation.prompt_token_ids

    def following(self, turns: Sequence[PlayedTurn]) -> np.ndarray | None:
        """Return the last prompt, the sampled tokens and the glue before the policy's next turn; None if too long."""
        if self._conversation is None:
            raise RuntimeError("a prompt follows the first one: call `first` before `following`")
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
