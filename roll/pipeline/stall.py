"""Nothing hangs without a deadline: a run in which nothing moves any more ends with a report of who waits for whom."""

from __future__ import annotations

import asyncio

from roll.pipeline.doctor.live import explain_stall
from roll.pipeline.status import StatusKeeper
from roll.tracking.driver_watch import Attention


class RunStalled(RuntimeError):
    """No stage, group or request made progress for `stall_timeout_seconds`."""


async def watch_for_stall(keeper: StatusKeeper, limit: float) -> None:
    """Raise `RunStalled` when nothing has moved for ``limit`` seconds, as far as somebody watched; runs until
    cancelled."""
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
