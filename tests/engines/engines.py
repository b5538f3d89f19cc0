"""Engines on trial: a running one, and what its kind's tests have to know of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from roll.engines.base import Completion, GenerateRequest, InferStrategy
from roll.weights.buckets import HeldWeights
from tests.engines.vllm_helpers import RunningEngine, TooLate, requests_of

PROMPT = (5, 6, 7)
"""That of `request`, unless it is given another one."""
Result = TypeVar("Result")


@dataclass
class EngineOnTrial:
    """A running engine and its kind."""

    engine: RunningEngine
    model: torch.nn.Module
    """The weights that it started with."""
    make_model: Callable[[int], torch.nn.Module]
    """Another model of the same sizes, by its seed."""
    places: int
    """Requests that run at once; one place more is kept for scores."""
    tolerance: tuple[float, float]
    """Of log-probabilities: in the mean, and at most."""
    refused: tuple[GenerateRequest, ...]
    """Requests that it cannot run, beside those that no engine can."""
    scored_lengths: tuple[int, ...]
    settling_looks: int
    """Looks at the progress of a paused engine until what was on its way has arrived."""

    @property
    def strategy(self) -> InferStrategy:
        return self.engine.strategy

    @property
    def version(self) -> int:
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.version = version

    def run(self, function: Callable[..., Awaitable[Result]], *args: object) -> Result:
        """Call a coroutine function on the engine's loop and wait."""
        return self.engine.run(function, *args)

    def publish(self, model: torch.nn.Module) -> None:
        """Load a model's weights as the next version."""
        self.engine.publish(model)

    async def load(self, model: torch.nn.Module, version: int, mode: str = "keep", *, requests: int = 0) -> HeldWeights:
        """Load a model's weights; to be called on the engine's loop. Raises `TooLate`, with the old weights, if fewer
        than ``requests`` are there when it has paused."""
        return await self.engine.load(model, version, mode, lambda: still_there(self.strategy, requests))

    async def settle(self) -> None:
        """Wait until a paused engine has told all that it had computed."""
        for _ in range(self.settling_looks):
            await self.strategy.progress({})

    def assert_close(self, recorded: np.ndarray, expected: np.ndarray) -> None:
        """Within the rounding of its kernels."""
        difference = np.abs(recorded - expected)
        mean, most = self.tolerance
        assert difference.mean() < mean and difference.max() < most


async def begun(
    strategy: InferStrategy, requests: Sequence[asyncio.Task[Completion]], tokens: int, count: int | None = None
) -> None:
    """Wait until ``count`` of these requests, or all, have that many tokens. Raises `TooLate` if too many have ended
    meanwhile, and the error of one that was refused."""
    count = len(requests) if count is None else count
    while True:
        chunks = await strategy.progress({})
        if sum(len(chunk.token_ids) >= tokens for chunk in chunks.values()) >= count:
            return
        ended = [request.result() for request in requests if request.done()]
        if len(requests) - len(ended) < count:
            raise TooLate(f"{len(ended)} of {len(requests)} requests have ended")
        await asyncio.sleep(0.005)


def still_there(strategy: InferStrategy, count: int) -> None:
    """Raise `TooLate` if fewer requests than this run or wait."""
    if requests_of(strategy) < count:
        raise TooLate(f"{count} requests were to be there; now there are {requests_of(strategy)}")
