"""Nothing hangs without a deadline: a run in which nothing moves any more ends with a report of who waits for whom."""

from __future__ import annotations

import asyncio

from roll.pipeline.doctor.live import explain_stall
from roll.pipeline.status import StatusKeeper


class RunStalled(RuntimeError):
    """No stage, group or request made progress for `stall_timeout_seconds`."""


async def watch_for_stall(keeper: StatusKeeper, limit: float) -> None:
    """Raise `RunStalled` when nothing has moved for ``limit`` seconds; runs until cancelled."""
    while True:
        await asyncio.sleep(min(5.0, limit / 4))
        status = keeper.now()
        if status.loop_beat - status.moved_at > limit:
            raise RunStalled(f"nothing has moved for {limit:g} s (stall_timeout_seconds)\n{explain_stall(status)}")
