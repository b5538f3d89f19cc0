"""Pools on the Ray of the process, and what they judge."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roll.configs.rewards import RewardConfig
from roll.rewards.base import RewardInput
from roll.rewards.pool import RewardPool


@pytest.fixture
def make_pool(local_ray: None) -> Callable[..., RewardPool]:
    def make(verifier: str, **settings) -> RewardPool:
        return RewardPool("test", RewardConfig(verifier=verifier, **settings))

    return make


@pytest.fixture
def judged() -> Callable[..., RewardInput]:
    def make(response: str, ground_truth: object = None, **settings) -> RewardInput:
        return RewardInput("train.jsonl:1", "prompt", response, ground_truth, "test", **settings)

    return make
