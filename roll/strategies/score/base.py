"""The interface of reward models, which give each conversation a number.

The score of a conversation does not depend on the others in its batch, except for rounding. A problem with one
conversation is returned as data to its sender. An exception means that the whole call failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from roll.configs.schema import ModelArguments, RewardModelConfig

Conversation = list[dict[str, str]]
"""Messages with `role` and `content`, the response last."""


@dataclass(frozen=True)
class ScorerSetup:
    """A reward model and how it runs."""

    model_path: str
    model_args: ModelArguments
    config: RewardModelConfig
    batch_size: int
    """Number of conversations in one forward pass."""
    device: str
    """``cpu`` or ``cuda``."""


@dataclass(frozen=True)
class Scored:
    """The result for one conversation."""

    score: float = 0.0
    tokens: int = 0
    """Number of tokens of the conversation as scored."""
    cut_tokens: int = 0
    """Number of tokens left out at its beginning."""
    problem: str = ""
    """Reason why there is no score; empty if there is one."""


class ScoreStrategy(Protocol):
    """A loaded reward model."""

    def score(self, conversations: Sequence[Conversation]) -> list[Scored]:
        """Score any number of conversations; results are in their order."""

    def offload_states(self) -> None:
        """Move the weights off the device."""

    def load_states(self) -> None:
        """Undo `offload_states`."""
