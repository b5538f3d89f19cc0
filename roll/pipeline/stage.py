"""The stage: a small state machine with its own consume-produce loop.

Every change of state is recorded with its time. That record is the timeline, the idle shares and the hang report. A
stage that raises is FAILED and stops the whole graph: no error is swallowed and nothing spins.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from roll.pipeline.channel import Channel, ChannelClosed
from roll.tracking.stacks import task_place
from roll.tracking.waits import START, WaitBoard, acting


class StageState(enum.Enum):
    """States of a stage, with their names in the timeline."""

    IDLE = "idle"
    WAITING_INPUT = "waiting for input"
    WAITING_RESOURCE = "waiting for devices"
    RUNNING = "running"
    WAITING_OUTPUT = "waiting for output"
    FAILED = "failed"
    DONE = "done"


class StateRecorder(Protocol):
    """Recorder of a stage's states; the timeline implements it."""

    def transition(self, actor: str, state: str, at: float | None = None, **details: Any) -> None:
        """Record that ``actor`` is in ``state`` from now on, or from ``at`` (seconds of the recorder's clock)."""


class StageItem(Protocol):
    """An item that flows through channels."""

    def note_time(self, stage: str, seconds: float) -> None:
        """Add the seconds for which a stage has worked on this item (waiting not counted)."""


class Stage:
    """One consume-produce loop. Subclasses implement `process`; a source also overrides `take_input`, a sink `deliver`.

    ``hold`` opens the context in which `process` runs (a device lock held as a role). A stage without it needs no
    devices.
    """

    def __init__(
        self,
        name: str,
        recorder: StateRecorder,
        *,
        inbox: Channel[Any] | None = None,
        outbox: Channel[Any] | None = None,
        hold: Callable[[], Any] | None = None,
    ) -> None:
        self.name = name
        self.inbox = inbox
        self.outbox = outbox
        self.state = StageState.IDLE
        self._recorder = recorder
        self._hold = hold
        self._task: asyncio.Task[Any] | None = None

    async def take_input(self) -> Any:
        """Return the next item to work on. Raises `ChannelClosed` at the end of the data."""
        if self.inbox is None:
            raise TypeError(f"stage {self.name!r} has no inbox and does not override take_input")
        return await self.inbox.get()

    async def before_devices(self, item: Any) -> None:
        """Wait, before taking the devices, for events that happen only while other roles have them."""

    async def process(self, item: Any) -> StageItem:
        """Work on one item and return the item for the next stage."""
        raise NotImplementedError

    async def deliver(self, result: Any) -> None:
        """Pass on a finished item, whose time has been recorded."""
        if self.outbox is not None:
            self.enter(StageState.WAITING_OUTPUT)
            await self.outbox.put(result)

    def enter(self, state: StageState, **details: Any) -> None:
        """Change the state and record it."""
        self.state = state
        self._recorder.transition(f"stage/{self.name}", state.value, **details)

    def place(self) -> str | None:
        """Return the line of code in which the stage waits; None before `run`."""
        return None if self._task is None else task_place(self._task)

    async def run(self) -> None:
        """Work until the input ends, then close the output."""
        self._task = asyncio.current_task()
        try:
            await self._loop()
        except asyncio.CancelledError:
            self.enter(StageState.DONE, cancelled=True)
            raise
        except BaseException as error:
            self.enter(StageState.FAILED, error=f"{type(error).__name__}: {error}")
            raise
        self.enter(StageState.DONE)

    async def _loop(self) -> None:
        while True:
            self.enter(StageState.WAITING_INPUT)
            try:
                item = await self.take_input()
            except ChannelClosed:
                break
            await self.deliver(await self._work(item))
        if self.outbox is not None:
            await self.outbox.close()

    async def _work(self, item: Any) -> StageItem:
        if self._hold is None:
            return await self._process_timed(item)
        self.enter(StageState.WAITING_RESOURCE)
        await self.before_devices(item)
        async with self._hold():
            return await self._process_timed(item)

    async def _process_timed(self, item: Any) -> StageItem:
        self.enter(StageState.RUNNING)
        clock = asyncio.get_running_loop()
        started = clock.time()
        result = await self.process(item)
        result.note_time(self.name, clock.time() - started)
        return result


class StageGraph:
    """Stages and background tasks in one task group: the first failure cancels all others and is raised."""

    def __init__(self, stages: Iterable[Stage], waits: WaitBoard | None = None) -> None:
        """Keep the stages. ``waits`` records the waits of all tasks."""
        self.stages = list(stages)
        self._waits = WaitBoard() if waits is None else waits

    async def run(
        self,
        background: Iterable[tuple[str, Callable[[], Awaitable[None]]]] = (),
        first: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run all stages to their end; then cancel the ``background`` tasks.

        ``first`` is awaited, with the background tasks running, before the stages start. Raises the first failure
        itself, not an exception group, so that its cause is named plainly.
        """
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._acting(name, start), name=name) for name, start in background]
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
            failure = first_cause(failures)
        if failure is not None:
            # Raised outside the handler, so that the group that holds it does not become its own cause.
            raise failure


    async def _acting(self, name: str, start: Callable[[], Awaitable[None]]) -> None:
        with acting(name, self._waits):
            await start()


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first leaf of an exception group: the failure that came before everything else was cancelled."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
