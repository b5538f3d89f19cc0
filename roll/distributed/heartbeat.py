"""Signs of life of worker processes, and where they are.

The driver asks each worker now and then. The answer comes from a thread that does nothing else, so a worker that
computes for minutes answers; it also says how long the worker's event loop has been stuck, and in which line of the
program it is. No answer at all means that the process is stopped, gone, or out of reach.
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
"""Between two questions."""


@dataclass(frozen=True)
class Beat:
    """What a worker says of itself."""

    loop_lag: float
    """Seconds for which its event loop has not come round."""
    place: str | None
    """Where the thread that does the work (or the stuck loop) is; None: it has nothing to do."""


@dataclass(frozen=True)
class HeardBeat:
    """A beat, and when it arrived."""

    beat: Beat
    at: float


class Heartbeats:
    """The last beat of each worker, by process, so that a new process is not taken for its predecessor."""

    def __init__(
        self, handles: Callable[[], Iterable[WorkerHandle]], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._handles = handles
        self._clock = clock
        self._heard: dict[WorkerHandle, HeardBeat] = {}
        self._asking: dict[WorkerHandle, asyncio.Task[None]] = {}

    def last(self, handle: WorkerHandle) -> HeardBeat | None:
        """None: it has not answered yet."""
        return self._heard.get(handle)

    async def run(self) -> None:
        """Ask again and again, until cancelled. One that has not answered is not asked anew."""
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
                return  # it has died, which whoever watches it reports with the cause
            logger.debug("%s gave no sign of life, and is asked again: %s", handle.name, error)
        self._asking.pop(handle, None)
