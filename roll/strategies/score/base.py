"""What scores conversations: a model with a number for each, whatever runs it.

The score of a conversation does not depend on the others in its batch, but for rounding. What is wrong with one of them
travels as data to whoever sent it; an exception means that the whole call failed.
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
    """Conversations of one forward pass."""
    device: str
    """``cpu`` or ``cuda``."""


@dataclass(frozen=True)
class Scored:
    """What became of one conversation."""

    score: float = 0.0
    tokens: int = 0
    """Of the conversation as scored."""
    cut_tokens: int = 0
    """Left out at its beginning."""
    problem: str = ""
    """Why there is no score; empty if there is one."""


class ScoreStrategy(Protocol):
    """A loaded reward model."""

    def score(self, conversations: Sequence[Conversation]) -> list[Scored]:
        """Any number of conversations; results in their order."""

    def offload_states(self) -> None:
        """Move the weights off the device."""

    def load_states(self) -> None:
        """Undo `offload_states`."""
