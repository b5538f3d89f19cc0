"""Generation on devices that other roles may want.

The gate holds the engine's devices while requests are running. When another role waits for them, the gate lets go, and
the device lock interrupts the requests by putting the engine to sleep. They continue when the gate has the devices
again. An engine with devices of its own is never interrupted.
"""

from __future__ import annotations

import asyncio

from roll.engines.base import Completion, GenerateRequest
from roll.engines.pool import InferencePool
from roll.runtime.locks import DeviceLock
from roll.tracking.waits import waiting


class EngineGate:
    """The engine as rollouts and validation use it."""

    def __init__(self, pool: InferencePool, lock: DeviceLock, role: str) -> None:
        self._pool = pool
        self._lock = lock
        self._role = role
        self._demand = 0
        self._demanded = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()

    async def generate(
        self, request: GenerateRequest, *, sticky_key: str | None = None, min_version: int | None = None
    ) -> Completion:
        """Run one request to its end, once the engine has its devices."""
        self._enter()
        try:
            with waiting("gate", "the engine to have its devices"):
                await self._open.wait()
            return await self._pool.generate(request, sticky_key=sticky_key, min_version=min_version)
        finally:
            self._leave()

    def forget(self, sticky_key: str) -> None:
        """Drop the routing of this key; no request with it will follow."""
        self._pool.forget(sticky_key)

    async def run(self) -> None:
        """Hold the devices whenever there are requests, until cancelled."""
        while True:
            await self._demanded.wait()
            async with self._lock.hold(self._role):
                self._open.set()
                await self._until_idle_or_wanted()
                self._open.clear()

    def _enter(self) -> None:
        self._demand += 1
        self._demanded.set()
        self._idle.clear()

    def _leave(self) -> None:
        self._demand -= 1
        if self._demand == 0:
            self._demanded.clear()
            self._idle.set()

    async def _until_idle_or_wanted(self) -> None:
        waits = [asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(self._lock.wait_contended())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
