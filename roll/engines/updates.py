"""Weight updates over all replicas: results, replicas pinned to a version, and pull mode.

In pull mode, a replica loads the newest weights when it is idle, or at the latest some time after newer weights were
published. The delay is bounded, because the trainer may need the buffer that the replica's old weights are in. It
counts from the first version that the replica lacks.
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
    """Replicas that keep a version during a validation, and the weights that they load if they restart."""

    names: frozenset[str]
    publication: Publication
    canaries: CanaryScores | None


@dataclass
class Loaded:
    """Result of a weight update, over all replicas."""

    seconds: dict[str, float] = field(default_factory=lambda: {"fetch": 0.0, "load": 0.0, "stall": 0.0})
    """``fetch`` and ``load``: sums over the replicas; ``stall``: the longest pause of a replica."""
    canaries: list[np.ndarray] = field(default_factory=list)
    """Log-probability differences between trainer and engine (`compare_canaries`), one array per compared replica."""
    healed: int = 0
    """Number of times that a replica could not use a delta, and fetched whole tensors."""

    def add(self, other: Loaded) -> None:
        """Add the result of another update."""
        for name in ("fetch", "load"):
            self.seconds[name] += other.seconds[name]
        self.seconds["stall"] = max(self.seconds["stall"], other.seconds["stall"])
        self.canaries += other.canaries
        self.healed += other.healed


class WeightSource(Protocol):
    """The trainer's side of pushed weight updates."""

    async def push(self, version: int, target: PushTarget) -> None:
        """Push a version into one paused engine."""

    def disconnect(self, name: str) -> None:
        """Close the connection to a dead engine, so that no push waits for it."""


class Pulls:
    """Pull mode: one loop per replica that loads the newest version, with a limit on concurrent loads."""

    def __init__(
        self,
        router: Router,
        is_behind: Callable[[str], bool],
        catch_up: Callable[[str], Awaitable[None]],
        *,
        after_seconds: float,
        at_once: int,
    ) -> None:
        """``is_behind`` tells if a replica lacks the newest version, ``catch_up`` loads it.

        ``after_seconds``: maximum time that a replica waits to be idle before it loads; ``at_once``: maximum number of
        replicas that load at the same time.
        """
        self._router = router
        self._is_behind = is_behind
        self._catch_up = catch_up
        self._after_seconds = after_seconds
        self._turns = asyncio.Semaphore(at_once)
        self._published = asyncio.Event()

    def published(self) -> None:
        """Signal that a new version was published."""
        published, self._published = self._published, asyncio.Event()
        published.set()

    async def run(self, name: str) -> None:
        """Run the loop of one replica, until cancelled."""
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
