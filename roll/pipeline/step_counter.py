"""Counter of completed training steps, for a stage that must not run ahead of them."""

from __future__ import annotations

import asyncio

from roll.tracking.waits import TRAIN, waiting


class StepCounter:
    """Counter that stages can wait on. Belongs to one event loop."""

    def __init__(self, done: int = 0) -> None:
        self.done = done
        self._waiting: list[asyncio.Future[None]] = []

    def advance(self, done: int) -> None:
        """Record that ``done`` steps are over. Raises `ValueError` if that is fewer than before."""
        if done < self.done:
            raise ValueError(f"{done} steps cannot be over after {self.done} were")
        self.done = done
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    async def reached(self, steps: int) -> None:
        """Wait until ``steps`` steps are over."""
        while self.done < steps:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            with waiting(TRAIN, f"the end of training step {steps}"):
                await waiter
