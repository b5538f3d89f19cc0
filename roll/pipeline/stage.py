"""The runner of a stage, a small state machine around a function, and the channels between stages.

Every change of state is recorded with its time. The record is the source of the timeline, the idle shares and the
report of a stalled run. A stage whose function raises becomes FAILED and stops the whole graph; no error is swallowed.

A channel has one producer and one consumer. A full channel blocks the producer, which is how back-pressure reaches the
rollouts. The end of the data is marked by `close` rather than a sentinel item, so a crash cannot be mistaken for a
normal end: a producer that fails leaves its channel open, and the graph cancels the consumer.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from roll.tracking.status import task_place
from roll.tracking.timeline import Timeline
from roll.tracking.waits import START, TRAIN, WaitBoard, acting, waiting


class ChannelClosed(Exception):
    """`Channel.put` was called after `Channel.close`."""


class Channel:
    """First-in, first-out channel for one item, or up to ``capacity`` parts of one. The consumer iterates over it."""

    def __init__(self, name: str, capacity: int = 1) -> None:
        self.name = name
        self.capacity = capacity
        self._items: deque[Any] = deque()
        self._closed = False
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: Any) -> None:
        """Wait for room and append an item. Raises `ChannelClosed` after `close`."""
        async with self._changed:
            with waiting(f"room/{self.name}", "room for an item"):
                await self._changed.wait_for(lambda: self._closed or self._has_room())
            if self._closed:
                raise ChannelClosed(f"channel {self.name!r} is closed")
            self._items.append(item)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return not self._items or (len(self) < self.capacity and not self._items[-1].complete)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        """Wait for the next item. Iteration ends when the channel is closed and empty."""
        async with self._changed:
            with waiting(f"items/{self.name}", "an item"):
                await self._changed.wait_for(lambda: self._closed or self._items)
            if not self._items:
                raise StopAsyncIteration
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    async def close(self) -> None:
        """Accept no more items. Items already in the channel are still delivered."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()


class StageState(enum.Enum):
    """States of a stage; values are the names in the timeline."""

    IDLE = "idle"
    WAITING_INPUT = "waiting for input"
    WAITING_RESOURCE = "waiting for devices"
    RUNNING = "running"
    WAITING_OUTPUT = "waiting for output"
    FAILED = "failed"
    DONE = "done"


@dataclass(eq=False)
class Stage:
    """The loop of one stage: take an item, hold the devices, call the function, and pass on the result."""

    name: str
    work: Callable[[Any], Awaitable[Any]]
    """Function from an item to the item for the next stage. Items record the time spent on them (`note_time`)."""
    source: AsyncIterator[Any]
    timeline: Timeline
    outbox: Channel | None = None
    side: Channel | None = None
    """Second output channel. Gets a snapshot of each complete item (`beside`) before ``outbox`` gets the item."""
    before: Callable[[Any], Awaitable[None]] | None = None
    """Called before taking the devices, to wait for events that other roles on these devices must bring about first."""
    hold: Callable[[], Any] | None = None
    """Returns a context manager that holds the devices."""
    finish: Callable[[Any], Awaitable[None]] | None = None
    """Called with each result of a stage that no other stage follows."""
    join: Callable[[list[Any]], Awaitable[Any]] | None = None
    """Makes one part of the parts of a batch that wait in the input channel, since each call of ``work`` costs time."""
    passes_parts: bool = False
    """True to pass on results that are not ``complete``. The side channel gets only complete ones."""
    state: StageState = field(default=StageState.IDLE, init=False)
    _task: asyncio.Task[Any] | None = field(default=None, init=False)

    @property
    def inbox(self) -> Channel | None:
        """Input channel; None if items come from another source."""
        return self.source if isinstance(self.source, Channel) else None

    def place(self) -> str | None:
        """Return the line of code at which the stage is waiting; None before `run`."""
        return None if self._task is None else task_place(self._task)

    async def run(self) -> None:
        """Process items until the input ends, then close the output channels."""
        self._task = asyncio.current_task()
        try:
            self._enter(StageState.WAITING_INPUT)
            async for item in self.source:
                result = await self._worked(await self._with_waiting_parts(item))
                if not result.complete and not self.passes_parts:
                    del item, result
                    self._enter(StageState.WAITING_INPUT)
                    continue
                passing_on = self._pass_on(result)
                del item, result  # the last stage's `finish` may free them
                await passing_on
                self._enter(StageState.WAITING_INPUT)
            for channel in (self.side, self.outbox):
                if channel is not None:
                    await channel.close()
        except asyncio.CancelledError:
            self._enter(StageState.DONE, cancelled=True)
            raise
        except BaseException as error:
            self._enter(StageState.FAILED, error=f"{type(error).__name__}: {error}")
            raise
        self._enter(StageState.DONE)

    async def _pass_on(self, result: Any) -> None:
        if self.finish is not None:
            finishing = self.finish(result)
            del result
            await finishing
            return
        if self.side is not None and result.complete:
            self._enter(StageState.WAITING_OUTPUT)
            await self.side.put(result.beside())
        if self.outbox is not None:
            self._enter(StageState.WAITING_OUTPUT)
            await self.outbox.put(result)

    async def _with_waiting_parts(self, item: Any) -> Any:
        if self.join is None or self.inbox is None:
            return item
        parts = [item]
        while not parts[-1].complete and len(self.inbox):
            parts.append(await anext(self.inbox))
        return item if len(parts) == 1 else await self.join(parts)

    async def _worked(self, item: Any) -> Any:
        if self.hold is not None:
            self._enter(StageState.WAITING_RESOURCE)
            if self.before is not None:
                await self.before(item)
        clock = asyncio.get_running_loop().time
        async with nullcontext() if self.hold is None else self.hold():
            self._enter(StageState.RUNNING)
            started = clock()
            result = await self.work(item)
            seconds = clock() - started
        if result is None:
            raise TypeError(f"stage {self.name!r} returned nothing: a stage returns its batch")
        result.note_time(self.name, seconds)
        return result

    def _enter(self, state: StageState, **details: Any) -> None:
        self.state = state
        self.timeline.transition(f"stage/{self.name}", state.value, **details)


class StageGraph:
    """Stages and background tasks in one task group. The first failure cancels all of them and is raised."""

    def __init__(self, stages: Iterable[Stage], waits: WaitBoard | None = None) -> None:
        """``waits``: board that records what each task waits for."""
        self.stages = list(stages)
        self._waits = WaitBoard() if waits is None else waits

    async def run(
        self,
        background: Mapping[str, Callable[[], Awaitable[None]]] | None = None,
        first: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run all stages to their end, then cancel the ``background`` tasks (name -> coroutine function).

        ``first`` runs beside the background tasks, before the stages start. Raises the first failure itself rather than
        an exception group, so that the cause is plain.
        """
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(self._acting(name, start), name=name)
                    for name, start in (background or {}).items()
                ]
                if first is not None:
                    await self._acting(START, first)
                workers = [
                    group.create_task(self._acting(f"stage/{stage.name}", stage.run), name=f"stage/{stage.name}")
                    for stage in self.stages
                ]
                await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as failures:
            failure = failures
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]  # the first one; it caused the cancellations
        if failure is not None:
            # Raised outside the handler, so that the exception group does not become its context.
            raise failure

    async def failure(
        self, background: Mapping[str, Callable[[], Awaitable[None]]], first: Callable[[], Awaitable[None]]
    ) -> Exception | None:
        """Like `run`, but return the failure instead of raising it; None if all stages finished.

        Uses a separate task, because in Python 3.11 a failed task group leaves its parent task marked as cancelled.
        """
        running = asyncio.create_task(self.run(background, first))
        try:
            await running
        except Exception as error:
            return error
        return None

    async def _acting(self, name: str, start: Callable[[], Awaitable[None]]) -> None:
        with acting(name, self._waits):
            await start()


class StepCounter:
    """Counter of completed steps that tasks can wait on. Use it in one event loop only."""

    def __init__(self, done: int = 0, stage: str = TRAIN) -> None:
        """Start at ``done``. ``stage``: the actor that advances the counter, shown as what waiting tasks wait for."""
        self.done = done
        self._stage = stage
        self._advanced = asyncio.Event()

    def advance(self, done: int) -> None:
        """Set the number of completed steps. Raises `ValueError` if it is less than before."""
        if done < self.done:
            raise ValueError(f"{done} steps cannot be over after {self.done} were")
        self.done = done
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def reached(self, steps: int) -> None:
        """Wait until ``steps`` steps are completed."""
        while self.done < steps:
            with waiting(self._stage, f"the end of training step {steps}"):
                await self._advanced.wait()
