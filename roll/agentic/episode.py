"""One episode: its limits (in tokens), its records, and the errors that leave no data.

The records cross process boundaries, and are all that environments, their managers and the pipeline share. An
environment never sees tokens, and a policy never sees rewards; the manager between them keeps both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from roll.data.records import Sample


class EpisodeRefused(ValueError):
    """The first prompt leaves the policy no room, so the episode cannot begin.

    The message names tag, seed, lengths and key.
    """


class PolicyAborted(RuntimeError):
    """The policy was stopped inside a turn, so the episode has no end. The message names tag, seed and turn."""


@dataclass(frozen=True)
class ManagerSettings:
    """Settings of a manager; the configuration has checked their ranges."""

    max_steps: int
    """Largest number of turns of an episode."""
    prompt_length: int
    """Longest first prompt; for the step-wise manager, longest prompt of any turn."""
    sequence_length: int
    """Longest prompt together with everything after it."""
    max_tokens_per_step: int | None = None
    """Longest response of one turn; None: as long as there is room."""
    format_penalty: float = 0.0
    """Added to the reward of a turn with an invalid action; at most 0."""
    history_length: int = 10
    """Number of earlier turns that a prompt repeats. Step-wise only."""
    keep_first_observation: bool = True
    """True if a prompt keeps the first observation after the history window has passed it. Step-wise only."""

    @property
    def prompt_limit(self) -> int:
        """Longest prompt that leaves room for a token."""
        return min(self.prompt_length, self.sequence_length - 1)

    def response_limit(self, prompt_tokens: int) -> int:
        """Return the length of the longest response to a prompt of this many tokens."""
        room = self.sequence_length - prompt_tokens
        return room if self.max_tokens_per_step is None else min(room, self.max_tokens_per_step)


Message = dict[str, Any]
"""One entry of a chat: ``role`` and ``content``, and other keys that a chat template understands."""


@dataclass(frozen=True)
class Observation:
    """An environment's answer to a reset or to an action."""

    messages: tuple[Message, ...]
    """Messages that the policy reads next; after a reset they include the system message, if there is one."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    """True if the environment itself ended the episode early."""
    action_is_valid: bool = True
    """False if the environment found no valid action in the policy's text."""
    success: bool | None = None
    """True if the episode's goal is reached; None: the environment does not say."""
    state: str | None = None
    """Key of the state that the *next* turn acts in, equal for equal states; None: unknown."""
    metrics: dict[str, float] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the available tools, for the chat template; at a reset only."""
    frame: str | None = None
    """The environment as text, for people to look at."""

    @property
    def done(self) -> bool:
        """True if the episode is over, however it ended."""
        return self.terminated or self.truncated


class EnvironmentFailed(Exception):
    """An environment raised, hung, died or gave an invalid answer. The message names tag, seed, turn and cause."""


class EnvSession(Protocol):
    """One environment used by one episode, wherever it runs. Each call has its own deadline.

    Only a step of an environment that ends its calls when it is closed (`roll.agentic.worker`) has none; its caller
    gives it up.
    """

    async def reset(self, seed: int) -> Observation:
        """Begin an episode. Raises `EnvironmentFailed`."""

    async def step(self, text: str) -> Observation:
        """Act with the policy's text. Raises `EnvironmentFailed`."""

    def give_up(self, cause: str) -> None:
        """Let the running call, if there is one, raise `EnvironmentFailed` with this cause."""

    async def close(self) -> None:
        """Give back the environment, whatever its state. Never raises; calling it twice is harmless."""


@dataclass(frozen=True)
class SampledTurn:
    """The policy's response in one turn: int32, float32 and int32 arrays with an entry for each sampled token."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: Literal["stop", "length", "abort"]


class Policy(Protocol):
    """Sampler of the turns of one episode."""

    async def __call__(
        self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
    ) -> SampledTurn:
        """Continue ``prompt_token_ids`` (int32) as turn number ``turn`` of the episode.

        ``stop_strings`` end the turn, besides those that the run configures; the tokens of the one found are sampled
        ones.
        """


EpisodeEnd = Literal["terminated", "truncated", "max_steps", "sequence_length", "control_token"]
"""``control_token``: an observation spells one, and such texts are refused."""


@dataclass
class TurnRecord:
    """One turn in readable form."""

    observation: str
    """Text that the policy read, without what it had read before."""
    response: str
    reward: float
    """The environment's reward, without penalties."""
    action_is_valid: bool
    frame: str | None
    """The environment's frame before the action."""


@dataclass
class Episode:
    """One episode, for training and for readers."""

    tag: str
    seed: int
    samples: list[Sample]
    """One sample for the whole trajectory, or one per turn. `Sample` has optional fields for turns and rewards."""
    end: EpisodeEnd
    success: bool | None
    """True if the goal was reached; None: the environment does not say."""
    score: float
    """Sum of the environment's rewards, without penalties."""
    turns: list[TurnRecord]
    last_frame: str | None
    metrics: dict[str, float]
    """``turns``, ``invalid_actions`` and ``capped_turns`` (shares), ``tokens``, and the environment's last values."""
