"""Verifiers of the benchmarks, named in configurations as `_rewards:name`; this folder must be importable.

Each is a function of the response alone, so two programs that judge the same response agree.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter

MEDIAN_SECONDS = 0.05
SIGMA = math.log(20) / 2.326
"""Standard deviation of the logarithm: it makes the 99th percentile 20 times the median."""

_judged: Counter[str] = Counter()


def digit_share(response: str) -> float:
    """Return the share of digits among the characters: a score that differs between long random responses."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def waiting_seconds(prompt_id: str, visit: int) -> float:
    """Return a log-normal wait, median 50 ms, 99th percentile 1 s, for the ``visit``-th judgement of a prompt."""
    return random.Random(f"{prompt_id}/{visit}").lognormvariate(math.log(MEDIAN_SECONDS), SIGMA)


async def waiting_digit_share(response: str, prompt_id: str) -> float:
    """Return `digit_share` after a wait without computing.

    The wait depends on the prompt and on how many of its responses were judged before. So the same samples wait equally
    long in every run, whatever the policy wrote. One process has to judge all responses of a run.
    """
    visit = _judged[prompt_id]
    _judged[prompt_id] += 1
    await asyncio.sleep(waiting_seconds(prompt_id, visit))
    return digit_share(response)
