"""The words of an episode: what an environment says, what a policy answers, and what remains of both.

These records cross process borders and are all that environments, their managers and the pipeline share. An
environment never sees tokens, a policy never sees rewards; the manager between them keeps both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from roll.data.records import Sample

Message = dict[str, Any]
"""One entry of a chat: ``role`` and ``content``, and what else a chat template understands."""


@dataclass(frozen=True)
class Observation:
    """What an environment answers to a reset or to an action."""

    messages: tuple[Message, ...]
    """What the policy reads next; after a reset with the system message, if there is one."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    """The environment itself ended the episode early."""
    action_is_valid: bool = True
    """False if the environment found no action it could carry out in the policy's text."""
    success: bool | None = None
    """Whether the episode's goal is reached; None: the environment does not say."""
    state: str | None = None
    """Key of the state that the *next* turn acts in, equal for equal states; None: unknown."""
    metrics: dict[str, float] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools that may be called, for the chat template; at a reset only."""
    frame: str | None = None
    """The environment as text, for people to look at."""

    @property
    def done(self) -> bool:
        """Whether the episode is over, however it ended."""
        return self.terminated or self.truncated


class EnvironmentFailed(Exception):
    """An environment raised, hung, died or answered nonsense. The message names tag, seed, turn and cause."""


class EnvSession(Protocol):
    """One environment in use by one episode, wherever it lives. Each call has a deadline of its own."""

    async def reset(self, seed: int) -> Observation:
        """Begin an episode. Raises `EnvironmentFailed`."""

    async def step(self, text: str) -> Observation:
        """Act with what the policy wrote. Raises `EnvironmentFailed`."""

    async def close(self) -> None:
        """Give the environment back, whatever state it is in. Never raises; harmless to repeat."""


@dataclass(frozen=True)
class SampledTurn:
    """What the policy wrote in one turn: equally long arrays, one entry per sampled token."""

    token_ids: np.ndarray
    """int32."""
    logprobs: np.ndarray
    """float32."""
    versions: np.ndarray
    """int32."""
    finish_reason: Literal["stop", "length", "abort"]


class Policy(Protocol):
    """Samples the turns of one episode."""

    async def __call__(self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int) -> SampledTurn:
        """Continue ``prompt_token_ids`` (int32) as turn number ``turn`` of the episode."""


EpisodeEnd = Literal["terminated", "truncated", "max_steps", "sequence_length"]


@dataclass
class TurnRecord:
    """One turn, readable."""

    observation: str
    """Text that the policy read, without what it had read before."""
    response: str
    reward: float
    """The environment's, without penalties."""
    action_is_valid: bool
    frame: str | None
    """The environment before the action."""


@dataclass
class Episode:
    """One episode as training and people see it."""

    tag: str
    seed: int
    samples: list[Sample]
    """One for the whole trajectory, or one per turn. See the optional fields of `Sample` for turns and rewards."""
    end: EpisodeEnd
    success: bool | None
    """None: the environment does not say."""
    score: float
    """Sum of the environment's rewards, without penalties."""
    turns: list[TurnRecord]
    last_frame: str | None
    metrics: dict[str, float]
    """``turns``, ``invalid_actions`` and ``capped_turns`` (shares), ``tokens``, and the last value of what the
    environment reported."""
