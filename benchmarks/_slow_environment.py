"""An environment whose steps wait a long-tailed time that is the same in every run, without computing."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Mapping
from typing import Any

import gymnasium

from roll.agentic.episode import Observation

TAIL = math.log(20) / 2.326
"""Standard deviation of the logarithm of a wait whose 99th percentile is 20 times its median."""


class SlowEnvironment(gymnasium.Env):
    """An environment that reports its process in the first observation, and after each step how long that waited."""

    def __init__(self, median_seconds: float) -> None:
        self._median_seconds = median_seconds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        self._waits = random.Random(seed)
        return str(os.getpid()), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        seconds = self._median_seconds * math.exp(TAIL * self._waits.gauss(0, 1))
        started = time.perf_counter()
        time.sleep(seconds)
        return f"{time.perf_counter() - started}", 0.0, False, False, {}


def make(env_type: str, env_config: Mapping[str, Any]) -> gymnasium.Env:
    return SlowEnvironment(**env_config)


def observe(text: str, info: Any, *, frame: Any = None, **results: Any) -> Observation:
    return Observation(({"role": "user", "content": text},), **results)
