"""The stage, a small state machine with its own consume-produce loop, and the channels between stages.

Every change of state is recorded with its time. That record is the timeline, the idle shares and the hang report. A
stage that raises is FAILED and stops the whole graph: no error is swallowed and nothing spins.

A channel has one producer and one consumer. A full channel makes the producer wait; this is how back-pressure reaches
the rollout. `close` marks the end of the data, never a sentinel item, so a crash cannot be mistaken for a normal end. A
producer that fails leaves its channel open, and the graph cancels the consumer.

A custom stage subclasses the built-in stage that it replaces and is built with the same arguments. It is registered
with `register_stage`, or named as `package.module:Class` in the `stages` section of the configuration.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.plugins import import_object
from roll.tracking.status import task_place
from roll.tracking.waits import START, TRAIN, WaitBoard, acting, waiting

Item = TypeVar("Item")


class ChannelClosed(Exception):
    """The channel was closed: it has no more items, or accepts no more."""


class Channel(Generic[Item]):
    """A first-in, first-out channel of at most ``capacity`` items."""

    def __init__(self, name: str, capacity: int = 1) -> None:
        if capacity < 1:
            raise ValueError(f"channel {name!r} needs a capacity of at least 1, not {capacity}")
        self.name = name
        self.capacity = capacity
        self._items: deque[Item] = deque()
        self._closed = False
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        """True if `put` would wait."""
        return len(self._items) >= self.capacity

    async def put(self, item: Item) -> None:
        """Wait for room and append. Raises `ChannelClosed` after `close`."""
        async with self._changed:
            with waiting(f"room/{self.name}", "room for an item"):
                await self._changed.wait_for(lambda: self._closed or not self.full)
            if self._closed:
                raise ChannelClosed(f"channel {self.name!r} is closed")
            self._items.append(item)
            self._changed.notify_all()

    async def get(self) -> Item:
        """Wait for an item. Raises `ChannelClosed` once the channel is closed and empty."""
        async with self._changed:
            with waiting(f"items/{self.name}", "an item"):
                await self._changed.wait_for(lambda: self._closed or self._items)
            if not self._items:
                raise ChannelClosed(f"channel {self.name!r} is closed")
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


StageClass = TypeVar("StageClass", bound=type[Stage])

_STAGES: dict[str, type[Stage]] = {}


def register_stage(name: str) -> Callable[[StageClass], StageClass]:
    """Return a class decorator that registers a stage under a name. It raises `ValueError` if the name is taken."""

    def register(stage: StageClass) -> StageClass:
        if name in _STAGES:
            raise ValueError(f"a stage named {name!r} is already registered")
        _STAGES[name] = stage
        return stage

    return register


def resolve_stages(defaults: Mapping[str, str], chosen: Mapping[str, str]) -> dict[str, type[Stage]]:
    """Return the class of each stage: the default or the chosen one.

    Raises `ConfigError` for classes that cannot be found or do not fit.
    """
    problems: list[ConfigProblem] = []
    classes = {stage: _STAGES[name] for stage, name in defaults.items()}
    for stage, name in chosen.items():
        path = f"stages.{stage}"
        if stage not in defaults:
            problems.append(
                ConfigProblem(path, f"there is no stage {stage!r} to replace", f"choose from {sorted(defaults)}")
            )
            continue
        try:
            found = _STAGES[name] if name in _STAGES else import_object(name)
        except ImportError as error:
            problems.append(
                ConfigProblem(path, str(error), f"give a registered name ({sorted(_STAGES)}) or `package.module:Class`")
            )
            continue
        if not (isinstance(found, type) and issubclass(found, classes[stage])):
            problems.append(
                ConfigProblem(
                    path,
                    f"{name!r} is not a subclass of {classes[stage].__name__}",
                    f"derive the stage from roll.pipeline.stages.{classes[stage].__name__}",
                )
            )
            continue
        classes[stage] = found
    if problems:
        raise ConfigError(problems)
    return classes


class StepCounter:
    """Counter that stages can wait on. Belongs to one event loop."""

    def __init__(self, done: int = 0) -> None:
        self.done = done
        self._waiting: list[asyncio.Future[None]] = []

    def advance(self, done: int) -> None:
        """Record that ``done`` steps are over. Raises `ValueError` if that is fewer than before."""
        if done < self.done:
            raise ValueError(f"{done} steps cannot be over after {self.done} were")
        self.done = done
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    async def reached(self, steps: int) -> None:
        """Wait until ``steps`` steps are over."""
        while self.done < steps:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            with waiting(TRAIN, f"the end of training step {steps}"):
                await waiter
