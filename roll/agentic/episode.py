"""Records of an episode: its token limits, observations, turns and result, and the errors that leave no data.

The records cross process boundaries, and are all that environments, environment managers and the pipeline share.
Environments never see tokens, and policies never see rewards; the manager between them handles both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from roll.data.records import Sample


class EpisodeRefused(ValueError):
    """The first prompt leaves no room for a response, so the episode cannot begin.

    The message names tag, seed, lengths and configuration key.
    """


class PolicyAborted(RuntimeError):
    """Generation was aborted within a turn, so the episode is incomplete. The message names tag, seed and turn."""


@dataclass(frozen=True)
class ManagerSettings:
    """Settings of an environment manager; their ranges are already checked."""

    max_steps: int
    """Maximum number of turns per episode."""
    prompt_length: int
    """Maximum tokens of the first prompt; for the manager `step`, of every prompt."""
    sequence_length: int
    """Maximum tokens of a prompt together with everything that follows it."""
    max_tokens_per_step: int | None = None
    """Maximum tokens of one turn's response; None: only `sequence_length` limits it."""
    format_penalty: float = 0.0
    """Added to the reward of a turn with an invalid action; at most 0."""
    history_length: int = 10
    """Number of earlier turns in a prompt. Only for the manager `step`."""
    keep_first_observation: bool = True
    """True to keep the first observation even after it has left the history. Only for the manager `step`."""

    @property
    def prompt_limit(self) -> int:
        """Maximum prompt length that leaves room for one sampled token."""
        return min(self.prompt_length, self.sequence_length - 1)

    def response_limit(self, prompt_tokens: int) -> int:
        """Return the maximum response length for a prompt of ``prompt_tokens`` tokens."""
        room = self.sequence_length - prompt_tokens
        return room if self.max_tokens_per_step is None else min(room, self.max_tokens_per_step)


Message = dict[str, Any]
"""A chat message: ``role``, ``content``, and other keys that chat templates support."""


@dataclass(frozen=True)
class Observation:
    """Result of an environment's reset or step."""

    messages: tuple[Message, ...]
    """New messages for the policy. After a reset they may begin with a system message."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    """True if the environment itself cut the episode short."""
    action_is_valid: bool = True
    """False if the policy's text contained no valid action."""
    success: bool | None = None
    """True if the goal of the episode is reached; None: not reported."""
    state: str | None = None
    """Key of the state in which the *next* turn acts; equal states have equal keys. None: unknown."""
    metrics: dict[str, float] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the available tools, for the chat template. Only set at a reset."""
    frame: str | None = None
    """Rendered text of the environment, for people."""
    seconds: float = 0.0
    """Time that the environment took for it, without waits for a place or a process."""

    @property
    def done(self) -> bool:
        """True if the episode has ended for any reason."""
        return self.terminated or self.truncated


class EnvironmentFailed(Exception):
    """An environment raised, hung, died or returned an invalid value. The message names tag, seed, turn and cause."""


class EnvSession(Protocol):
    """One episode's use of an environment, local or remote.

    Each call has its own deadline, with one exception: `step` has none if the environment ends its calls when closed
    (`roll.agentic.worker.ends_calls_when_closed`). The caller ends such a step with `give_up`.
    """

    async def reset(self, seed: int) -> Observation:
        """Start an episode. Raises `EnvironmentFailed`."""

    async def step(self, text: str) -> Observation:
        """Execute the policy's text as an action. Raises `EnvironmentFailed`."""

    def give_up(self, cause: str) -> None:
        """Abort the running call, if any: it raises `EnvironmentFailed` with this cause."""

    async def close(self) -> None:
        """Release the environment in any state. Never raises, and may be called twice."""


@dataclass(frozen=True)
class SampledTurn:
    """The policy's response in one turn. The arrays (int32, float32, int32) have one entry per sampled token."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: Literal["stop", "length", "abort"]
    routed_experts: np.ndarray | None = None
    """Experts of prompt and response but for the last token, ``[tokens, layers, top_k]``; None: not recorded."""


class Policy(Protocol):
    """Samples the turns of one episode."""

    async def __call__(
        self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
    ) -> SampledTurn:
        """Sample a response to ``prompt_token_ids`` (int32) as turn number ``turn`` of the episode.

        ``stop_strings`` end the turn, in addition to the configured ones. The tokens of a matched stop string are part
        of the response.
        """


EpisodeEnd = Literal["terminated", "truncated", "max_steps", "sequence_length", "control_token"]
"""``control_token``: an observation spells one, and such texts are refused."""


@dataclass
class TurnRecord:
    """One turn in readable form."""

    observation: str
    """Text that was new to the policy in this turn."""
    response: str
    reward: float
    """The environment's reward, without penalties."""
    action_is_valid: bool
    frame: str | None
    """Rendered frame before the action."""


@dataclass
class Episode:
    """A completed episode, for training and for reports."""

    tag: str
    seed: int
    samples: list[Sample]
    """One sample for the whole trajectory, or one per turn. See `Sample` for its fields on turns and rewards."""
    end: EpisodeEnd
    success: bool | None
    """True if the goal was reached; None: not reported."""
    score: float
    """Sum of the environment's rewards, without penalties."""
    turns: list[TurnRecord]
    last_frame: str | None
    metrics: dict[str, float]
    """``turns``, ``tokens``, shares of ``invalid_actions`` and ``capped_turns``, and the environment's last metrics."""
    worked: float = 0.0
    """Seconds in which its environment worked and nothing was generated for it."""
