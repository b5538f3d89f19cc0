"""Limits and penalties of an episode. Lengths are in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ManagerSettings:
    """Settings of a manager."""

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
        """Return the length of the longest response to a prompt of this many tokens."""
        room = self.sequence_length - prompt_tokens
        return room if self.max_tokens_per_step is None else min(room, self.max_tokens_per_step)
