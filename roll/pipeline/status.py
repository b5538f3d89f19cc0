"""The current status of a run, for `status.json`, `roll doctor` and the detection of stalled runs.

Stages, waits and workers are read in one turn of the event loop, so they form a consistent snapshot. A run without
progress fails after a timeout, with a report of its waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from roll.configs.run import RunConfig
from roll.doctor.diagnosis import explain_stall
from roll.pipeline.context import RunContext
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.stage import Stage
from roll.runtime.workers import Heartbeats, WorkerHandle
from roll.tracking.status import (
    WRITE_SECONDS,
    Attention,
    ChannelStatus,
    DriverStatus,
    Phase,
    RunStatus,
    SchedulerStatus,
    StageStatus,
    StatusFile,
    WorkerStatus,
    look_at,
)
from roll.tracking.waits import GROUP

logger = logging.getLogger(__name__)

LISTED_GROUPS = 32
"""Maximum number of groups whose waits are listed individually, oldest first."""


class RunStalled(RuntimeError):
    """No stage, group or request made progress for `stall_timeout_seconds`."""


async def watch_for_stall(keeper: StatusKeeper, limit: float) -> None:
    """Raise `RunStalled` after ``limit`` seconds without progress. Runs until cancelled.

    Each check counts for at most twice its interval, so that time in which the process was suspended hardly counts.
    """
    interval = min(5.0, limit / 4)
    attention = Attention(2 * interval, asyncio.get_running_loop().time)
    quiet, before = 0.0, keeper.moved_at()
    while True:
        await asyncio.sleep(interval)
        moved_at, seconds = keeper.moved_at(), attention.look()
        quiet = quiet + seconds if moved_at == before else 0.0
        before = moved_at
        if quiet > limit:
            why = explain_stall(keeper.now())
            raise RunStalled(f"nothing has moved for {limit:g} s (stall_timeout_seconds)\n{why}")


class StatusKeeper:
    """Tracks the status of a run, from its start to its end."""

    def __init__(
        self,
        config: RunConfig,
        recorder: RunRecorder,
        handles: Callable[[], Iterable[WorkerHandle]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``handles`` returns the current workers. ``clock`` returns seconds, as the recorder's clock does."""
        self._clock = clock
        self._config = config
        self._recorder = recorder
        self._handles = handles
        self._heartbeats = Heartbeats(handles, clock=clock)
        self._first_seen: dict[WorkerHandle, WorkerStatus] = {}
        self._driver = DriverStatus.of_this_process()
        self._counts: tuple[object, ...] = ()
        self._moved_at = clock()
        self._context: RunContext | None = None
        self._supervised: Callable[[], tuple[int, *tuple[object, ...]]] | None = None
        self._stages: Sequence[Stage] = ()

    def running(self, context: RunContext, stages: Sequence[Stage]) -> None:
        """Switch from the phase `starting` to `running`."""
        self._context, self._stages = context, stages

    def supervised(self, moved: Callable[[], tuple[int, *tuple[object, ...]]]) -> None:
        """Switch to the phase `running` in supervised fine-tuning. ``moved`` returns the number of completed steps and
        further values that change with any progress."""
        self._supervised = moved

    def starting(self) -> None:
        """Switch back to the phase `starting`, because some roles restart."""
        self._context, self._stages = None, ()

    @asynccontextmanager
    async def kept(self, file: StatusFile) -> AsyncIterator[None]:
        """Keep the status file up to date inside this context."""
        tasks = [asyncio.create_task(self._heartbeats.run()), asyncio.create_task(self._keep(file))]
        for task in tasks:
            task.add_done_callback(_log_failure)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            file.ending()

    def moved_at(self) -> float:
        """Return the time at which the run was first seen in its present state."""
        if self._supervised is not None:
            counts: tuple[object, ...] = self._supervised()
        else:
            counts = () if self._context is None else _counts(self._context)
        if counts != self._counts:
            self._counts, self._moved_at = counts, self._clock()
        return self._moved_at

    def now(self) -> RunStatus:
        """Return the current status of the run."""
        context, moved_at, at = self._context, self.moved_at(), self._clock()
        board = self._recorder.waits
        status = RunStatus(
            driver=self._driver,
            phase="starting" if context is None and self._supervised is None else "running",
            written=at,
            loop_beat=at,
            moved_at=moved_at,
            stall_timeout_seconds=self._config.stall_timeout_seconds,
            max_steps=self._config.max_steps,
            workers=tuple(self._workers()),
            holdings=tuple(board.holdings()),
            waits=tuple(board.waits(groups=LISTED_GROUPS)),
            groups_by_wait=board.groups_by_wait(),
        )
        if self._supervised is not None:
            return replace(status, step=self._supervised()[0])
        if context is None:
            return status
        scheduler = context.scheduler
        holders = {str(holder) for holders in context.pool.buffers.holders().values() for holder in holders}
        return replace(
            status,
            step=context.steps.done,
            stages=tuple(self._stage_states()),
            channels=tuple(_channels(self._stages)),
            scheduler=SchedulerStatus(
                in_flight=scheduler.ledger.in_flight,
                buffered=scheduler.ledger.buffered,
                refusal=scheduler.why_waiting(),
                holding_up=tuple(f"{GROUP}{group_id}" for group_id in scheduler.holding_up()[:LISTED_GROUPS]),
            ),
            memory_holders=tuple(sorted(holders)),
        )

    async def _keep(self, file: StatusFile) -> None:
        last: Phase | None = None
        while True:
            status = self.now()
            file.update(status, at_once=status.phase != last)
            last = status.phase
            await asyncio.sleep(WRITE_SECONDS)

    def _workers(self) -> Iterator[WorkerStatus]:
        present = [handle for handle in self._handles() if handle.pid is not None]
        self._first_seen = {handle: self._first_seen.get(handle) or self._seen(handle) for handle in present}
        for handle, known in self._first_seen.items():
            beat = self._heartbeats.last(handle)
            if beat is None:
                yield known
            else:
                yield replace(known, asked_since=beat.at, has_answered=True, loop_lag=beat.loop_lag, place=beat.place)

    def _seen(self, handle: WorkerHandle) -> WorkerStatus:
        facts = look_at(handle.pid) if handle.is_local and handle.pid is not None else None
        return WorkerStatus(
            handle.name,
            handle.pid or 0,
            handle.is_local,
            asked_since=self._clock(),
            started=None if facts is None else facts.started,
            has_answered=False,
        )

    def _stage_states(self) -> Iterator[StageStatus]:
        recorded = self._recorder.timeline.last_states()
        for stage in self._stages:
            name = f"stage/{stage.name}"
            if name in recorded:
                state = recorded[name]
                details = {key: str(value) for key, value in state.details.items()}
                yield StageStatus(name, state.state, state.since, details, stage.place())


def _counts(context: RunContext) -> tuple[object, ...]:
    """Return values that change whenever a stage, group, response, environment or checkpoint makes progress."""
    states = tuple((name, state.since) for name, state in context.recorder.timeline.last_states().items())
    counts = tuple(context.scheduler.ledger.counts().items())
    side = tuple(sorted(context.side.metrics().items()))
    engines = context.pool.completed, context.pool.tokens_seen, context.pool.restarts
    return states, counts, engines, side, context.checkpoints.progress()


def _channels(stages: Sequence[Stage]) -> Iterator[ChannelStatus]:
    for producer, consumer in itertools.combinations(stages, 2):
        channel = consumer.inbox
        if channel is not None and channel in (producer.side, producer.outbox):
            yield ChannelStatus(
                channel.name, f"stage/{producer.name}", f"stage/{consumer.name}", len(channel), channel.capacity
            )


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("`status.json` is not kept up to date any more", exc_info=task.exception())
