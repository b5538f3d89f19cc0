"""Signs of life of the worker processes, and the line of code that each one is in.

The driver asks each worker every few seconds. A thread that does nothing else answers, so a worker that computes for
minutes still answers. The answer also says how long the worker's event loop has been stuck, and where in the program.
No answer at all means that the process is stopped, gone or unreachable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray.exceptions import RayError

from roll.data.actor_deaths import is_gone_for_good

if TYPE_CHECKING:
    from roll.distributed.group import WorkerHandle

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
"""Interval between two rounds of questions."""


@dataclass(frozen=True)
class Beat:
    """A worker's sign of life."""

    loop_lag: float
    """Seconds for which its event loop has been stuck."""
    place: str | None
    """Code location of the working thread (or of the stuck loop); None if it is idle."""


@dataclass(frozen=True)
class HeardBeat:
    """A beat and its time of arrival."""

    beat: Beat
    at: float


class Heartbeats:
    """The last beat of each process. A replacement process does not inherit its predecessor's."""

    def __init__(
        self, handles: Callable[[], Iterable[WorkerHandle]], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._handles = handles
        self._clock = clock
        self._heard: dict[WorkerHandle, HeardBeat] = {}
        self._asking: dict[WorkerHandle, asyncio.Task[None]] = {}

    def last(self, handle: WorkerHandle) -> HeardBeat | None:
        """Return the last beat; None if the process has not answered yet."""
        return self._heard.get(handle)

    async def run(self) -> None:
        """Ask every worker repeatedly, until cancelled. A worker that has not answered yet is not asked again."""
        try:
            while True:
                present = [handle for handle in self._handles() if handle.pid is not None]
                self._forget_all_but(present)
                for handle in present:
                    if handle not in self._asking:
                        self._asking[handle] = asyncio.create_task(self._ask(handle))
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            self._forget_all_but([])

    def _forget_all_but(self, present: list[WorkerHandle]) -> None:
        for handle in self._asking.keys() - set(present):
            self._asking.pop(handle).cancel()
        self._heard = {handle: heard for handle, heard in self._heard.items() if handle in present}

    async def _ask(self, handle: WorkerHandle) -> None:
        try:
            self._heard[handle] = HeardBeat(await handle.beat(), self._clock())
        except RayError as error:
            if is_gone_for_good(error):
                return  # it has died; the task that watches it reports the cause
            logger.debug("%s gave no sign of life, and is asked again: %s", handle.name, error)
        self._asking.pop(handle, None)
