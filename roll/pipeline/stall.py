"""The deadline of a run in which nothing moves: it fails with a report of its waits."""

from __future__ import annotations

import asyncio

from roll.pipeline.doctor.live import explain_stall
from roll.pipeline.status import StatusKeeper
from roll.tracking.driver_watch import Attention


class RunStalled(RuntimeError):
    """No stage, group or request made progress for `stall_timeout_seconds`."""


async def watch_for_stall(keeper: StatusKeeper, limit: float) -> None:
    """Raise `RunStalled` if nothing has moved for ``limit`` seconds. Runs until cancelled.

    A look counts for at most twice its interval, so time in which the whole process was stopped hardly counts.
    """
    interval = min(5.0, limit / 4)
    attention = Attention(2 * interval, asyncio.get_running_loop().time)
    quiet, moved_at = 0.0, keeper.now().moved_at
    while True:
        await asyncio.sleep(interval)
        status, seconds = keeper.now(), attention.look()
        quiet = quiet + seconds if status.moved_at == moved_at else 0.0
        moved_at = status.moved_at
        if quiet > limit:
            raise RunStalled(f"nothing has moved for {limit:g} s (stall_timeout_seconds)\n{explain_stall(status)}")
