"""Weight updates over all replicas: their results, the replicas that keep a version, and those that pull.

A replica pulls when it chooses to: between two requests, or some time after newer weights were published. Nobody waits
for it but a trainer that needs the memory that the replica computes with. So the time is bounded, and counts from the
first version that the replica lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from roll.rollout.router import Router
from roll.tracking.waits import apart
from roll.weights.publisher import Publication, PushTarget
from roll.weights.verify import CanaryScores


@dataclass(frozen=True)
class Pinned:
    """The replicas that keep a version, and what their successors load."""

    names: frozenset[str]
    publication: Publication
    canaries: CanaryScores | None


@dataclass
class Loaded:
    """Result of a weight update over all replicas."""

    seconds: dict[str, float] = field(default_factory=lambda: {"fetch": 0.0, "load": 0.0, "stall": 0.0})
    """``fetch`` and ``load`` are sums over the replicas, ``stall`` the longest pause of one."""
    canaries: list[np.ndarray] = field(default_factory=list)
    """Differences that `compare_canaries` found in each compared replica."""

    def add(self, other: Loaded) -> None:
        """Add the result of other loads."""
        for name in ("fetch", "load"):
            self.seconds[name] += other.seconds[name]
        self.seconds["stall"] = max(self.seconds["stall"], other.seconds["stall"])
        self.canaries += other.canaries


class WeightSource(Protocol):
    """The trainer's side of pushed weights."""

    async def push(self, version: int, target: PushTarget) -> None:
        """Push a version into one paused engine."""

    def disconnect(self, name: str) -> None:
        """Drop the connection to a dead engine, so that no push waits for it."""


class Pulls:
    """The loops that bring the newest version to each replica, a share of them at a time."""

    def __init__(
        self,
        router: Router,
        is_behind: Callable[[str], bool],
        catch_up: Callable[[str], Awaitable[None]],
        *,
        after_seconds: float,
        at_once: int,
    ) -> None:
        """Keep the functions that tell if a replica is behind, and bring it to the newest version.

        ``after_seconds``: longest time for which a replica with requests stays behind; ``at_once``: number of replicas
        that may change at the same time.
        """
        self._router = router
        self._is_behind = is_behind
        self._catch_up = catch_up
        self._after_seconds = after_seconds
        self._turns = asyncio.Semaphore(at_once)
        self._published = asyncio.Event()

    def published(self) -> None:
        """Let all replicas look if they are behind."""
        published, self._published = self._published, asyncio.Event()
        published.set()

    async def run(self, name: str) -> None:
        """Bring one replica to each version that is the newest when it looks. Runs until cancelled."""
        with apart(f"pull/{name}"):
            while True:
                while not self._is_behind(name):
                    await self._published.wait()
                try:
                    async with asyncio.timeout(self._after_seconds):
                        await self._router.idle(name)
                except TimeoutError:
                    pass
                async with self._turns:
                    await self._catch_up(name)
