"""Limits and penalties of an episode. Lengths are in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ManagerSettings:
    """What a manager must keep to."""

    max_steps: int
    """Turns of an episode."""
    prompt_length: int
    """Longest first prompt; with the step-wise manager longest prompt of any turn."""
    sequence_length: int
    """Longest prompt with everything after it."""
    max_tokens_per_step: int | None = None
    """Longest response of one turn; None: whatever room is left."""
    format_penalty: float = 0.0
    """Added to the reward of a turn whose action is invalid; at most 0."""
    history_length: int = 10
    """Step-wise only: earlier turns that a prompt repeats."""
    keep_first_observation: bool = True
    """Step-wise only: whether a prompt begins with the first observation even where the history has moved on."""

    def __post_init__(self) -> None:
        for name, smallest in (("max_steps", 1), ("prompt_length", 1), ("sequence_length", 2), ("history_length", 0)):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {smallest}")
        if self.max_tokens_per_step is not None and self.max_tokens_per_step < 1:
            raise ValueError(f"max_tokens_per_step is {self.max_tokens_per_step}; it must be at least 1, or None")
        if not (self.format_penalty <= 0 and math.isfinite(self.format_penalty)):
            raise ValueError(f"format_penalty is {self.format_penalty}; it is added to rewards and must be at most 0")

    @property
    def prompt_limit(self) -> int:
        """Longest prompt that leaves room for a token."""
        return min(self.prompt_length, self.sequence_length - 1)

    def response_limit(self, prompt_tokens: int) -> int:
        """Longest response to a prompt of this many tokens."""
        room = self.sequence_length - prompt_tokens
        return room if self.max_tokens_per_step is None else min(room, self.max_tokens_per_step)
