"""The runner of a stage, a small state machine around a function, and the channels between stages.

Every change of state is recorded with its time. That record is the timeline, the idle shares and the hang report. A
stage whose function raises is FAILED and stops the whole graph: no error is swallowed and nothing spins.

A channel has one producer and one consumer. A full channel makes the producer wait; this is how back-pressure reaches
the rollout. `close` marks the end of the data, never a sentinel item, so a crash cannot be mistaken for a normal end. A
producer that fails leaves its channel open, and the graph cancels the consumer.
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
    """The channel was closed and accepts no more items."""


class Channel:
    """A channel of at most ``capacity`` items, in order; the consumer iterates over it."""

    capacity = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self._items: deque[Any] = deque()
        self._closed = False
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: Any) -> None:
        """Wait for room and append. Raises `ChannelClosed` after `close`."""
        async with self._changed:
            with waiting(f"room/{self.name}", "room for an item"):
                await self._changed.wait_for(lambda: self._closed or len(self) < self.capacity)
            if self._closed:
                raise ChannelClosed(f"channel {self.name!r} is closed")
            self._items.append(item)
            self._changed.notify_all()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        """Wait for an item. The iteration ends once the channel is closed and empty."""
        async with self._changed:
            with waiting(f"items/{self.name}", "an item"):
                await self._changed.wait_for(lambda: self._closed or self._items)
            if not self._items:
                raise StopAsyncIteration
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    async def close(self) -> None:
        """Close the channel to new items. Items already put are still delivered."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()


class StageState(enum.Enum):
    """States of a stage, with their names in the timeline."""

    IDLE = "idle"
    WAITING_INPUT = "waiting for input"
    WAITING_RESOURCE = "waiting for devices"
    RUNNING = "running"
    WAITING_OUTPUT = "waiting for output"
    FAILED = "failed"
    DONE = "done"


@dataclass(eq=False)
class Stage:
    """The loop of one stage: take an item, hold the devices, call the function, pass the result on."""

    name: str
    work: Callable[[Any], Awaitable[Any]]
    """Function from an item to the item for the next stage, which notes the time spent on it (`note_time`)."""
    source: AsyncIterator[Any]
    timeline: Timeline
    outbox: Channel | None = None
    side: Channel | None = None
    """A second channel, which gets each item as it is now (its `beside`), before the first one does."""
    before: Callable[[Any], Awaitable[None]] | None = None
    """Waits, before the devices are taken, for events that happen only while other roles have them."""
    hold: Callable[[], Any] | None = None
    """Returns a context manager that holds the devices."""
    finish: Callable[[Any], Awaitable[None]] | None = None
    """Gets each item of the last stage, with the time of this stage noted."""
    passes_parts: bool = False
    """True if results that are not ``complete`` go on to the next stage, too. They never take the side channel."""
    state: StageState = field(default=StageState.IDLE, init=False)
    _task: asyncio.Task[Any] | None = field(default=None, init=False)

    @property
    def inbox(self) -> Channel | None:
        """The channel from which items come; None if they come from elsewhere."""
        return self.source if isinstance(self.source, Channel) else None

    def place(self) -> str | None:
        """Return the line of code in which the stage waits; None before `run`."""
        return None if self._task is None else task_place(self._task)

    async def run(self) -> None:
        """Work until the input ends, then close the output."""
        self._task = asyncio.current_task()
        try:
            self._enter(StageState.WAITING_INPUT)
            async for item in self.source:
                result = await self._worked(item)
                if not result.complete and not self.passes_parts:
                    self._enter(StageState.WAITING_INPUT)
                    continue
                if self.finish is not None:
                    await self.finish(result)
                if self.side is not None and result.complete:
                    self._enter(StageState.WAITING_OUTPUT)
                    await self.side.put(result.beside())
                if self.outbox is not None:
                    self._enter(StageState.WAITING_OUTPUT)
                    await self.outbox.put(result)
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
    """Stages and background tasks in one task group: the first failure cancels all others and is raised."""

    def __init__(self, stages: Iterable[Stage], waits: WaitBoard | None = None) -> None:
        """Keep the stages. ``waits`` records the waits of all tasks."""
        self.stages = list(stages)
        self._waits = WaitBoard() if waits is None else waits

    async def run(
        self,
        background: Mapping[str, Callable[[], Awaitable[None]]] | None = None,
        first: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run all stages to their end; then cancel the ``background`` tasks (name -> task).

        ``first`` is awaited, with the background tasks running, before the stages start. Raises the first failure
        itself, not an exception group, so that its cause is named plainly.
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
                failure = failure.exceptions[0]  # it came before everything else was cancelled
        if failure is not None:
            # Raised outside the handler, so that the group that holds it does not become its own cause.
            raise failure

    async def failure(
        self, background: Mapping[str, Callable[[], Awaitable[None]]], first: Callable[[], Awaitable[None]]
    ) -> Exception | None:
        """Do what `run` does, and return what it raises; None if all stages came to their end.

        It has a task of its own: in Python 3.11 a failed task group leaves its owner marked as cancelled.
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
    """Counter that stages can wait on. Belongs to one event loop."""

    def __init__(self, done: int = 0, stage: str = TRAIN) -> None:
        """Count from ``done``. ``stage`` is the actor that counts, which waiting stages wait for."""
        self.done = done
        self._stage = stage
        self._advanced = asyncio.Event()

    def advance(self, done: int) -> None:
        """Record that ``done`` steps are over. Raises `ValueError` if ``done`` is less than before."""
        if done < self.done:
            raise ValueError(f"{done} steps cannot be over after {self.done} were")
        self.done = done
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def reached(self, steps: int) -> None:
        """Wait until ``steps`` steps are over."""
        while self.done < steps:
            with waiting(self._stage, f"the end of training step {steps}"):
                await self._advanced.wait()
