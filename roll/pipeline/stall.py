"""Nothing hangs without a deadline: a run in which nothing moves any more ends with a report of who waits for what."""

from __future__ import annotations

import asyncio

from roll.pipeline.context import RunContext


class RunStalled(RuntimeError):
    """No stage, group or request made progress for `stall_timeout_seconds`."""


async def watch_for_stall(context: RunContext) -> None:
    """Raise `RunStalled` when nothing has moved for too long; runs until cancelled."""
    limit = context.config.stall_timeout_seconds
    clock = asyncio.get_running_loop()
    last, moved_at = _signs_of_life(context), clock.time()
    while True:
        await asyncio.sleep(min(5.0, limit / 4))
        now = _signs_of_life(context)
        if now != last:
            last, moved_at = now, clock.time()
        elif clock.time() - moved_at > limit:
            raise RunStalled(
                f"nothing has moved for {limit:g} s (stall_timeout_seconds)\n"
                f"{context.recorder.timeline.hang_report()}\nscheduler: {context.scheduler.snapshot()}"
            )


def _signs_of_life(context: RunContext) -> tuple[object, ...]:
    states = tuple((name, state.since) for name, state in context.recorder.timeline.last_states().items())
    counts = tuple(context.scheduler.ledger.counts().items())
    side = tuple(sorted(context.side.metrics().items()))
    return states, counts, context.pool.completed, context.pool.restarts, side
