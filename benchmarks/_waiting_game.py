"""A game in which every step waits: log-normal, 99th percentile 20 times the median, the same in every run."""

from __future__ import annotations

import math
import time
from typing import Any

import gymnasium
import numpy as np

TAIL = math.log(20) / 2.326


class WaitingGame(gymnasium.Env):
    """A game that shows a sum, rewards the digits in the answer, and waits before it returns from each step."""

    episodes = 0

    def __init__(self, median_seconds: float = 0.05, turns: int = 4) -> None:
        self._median_seconds = median_seconds
        self._turns = turns

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        # Each episode of a seed has its own wait. It is the same in every run if the episodes begin in order.
        WaitingGame.episodes += 1
        self._waits = np.random.default_rng([seed or 0, WaitingGame.episodes])
        self._taken = 0
        return self._shown(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        time.sleep(self._median_seconds * math.exp(TAIL * self._waits.standard_normal()))
        self._taken += 1
        share = sum(character.isdigit() for character in action) / max(1, len(action))
        return self._shown(), share, self._taken == self._turns, False, {}

    def _shown(self) -> str:
        first, second = self.np_random.integers(10, 50, size=2)
        return f"{first}+{second}"
