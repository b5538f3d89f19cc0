"""The scheduler: keeps as many groups in flight as the plan allows, and hands out finished ones batch by batch.

The decisions are made in `admission.py`, `buffer.py` and `ledger.py`; this file owns the tasks. Every rollout runs
inside `run`, so none outlives it. All groups that may start after an event are started at once, in order, without an
await in between, so with ratio 0 nothing depends on timing. An error that ends the run early is raised by `run` and by
a waiting `next_batch`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Generic, Literal, Protocol, get_args

from roll.rollout.admission import Admission, DropLimit, Refusal, TooManyDrops, exact_ratio
from roll.rollout.buffer import ConsumptionOrder, FinishedGroup, GroupBuffer, Item, Result
from roll.rollout.journal import Recovered, RolloutProgress
from roll.rollout.ledger import DropReason, Ledger

StalenessPolicy = Literal["wait", "drop"]


class FatalRolloutError(Exception):
    """An error that ends the run at once, without a retry. A rollout raises it alone or inside an exception group."""


class SourceExhausted(RuntimeError):
    """The source ended before the run had all the groups it needs."""


class NoMoreBatches(Exception):
    """`next_batch` was called after the last batch of the run."""


class SchedulerStopped(RuntimeError):
    """`next_batch` was called (or was waiting) on a scheduler whose `run` was cancelled."""


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """Settings of the scheduler. Raises `ValueError` on impossible values."""

    batch_size: int
    """Groups per training step."""
    max_steps: int
    ratio: float | Fraction = 0
    """Number of batches by which generation may be ahead of training; fractions are allowed."""
    max_staleness: int = 0
    """Largest staleness in versions: batch t contains no group started at a version below t minus this."""
    order: ConsumptionOrder = "ready_first"
    staleness_policy: StalenessPolicy = "wait"
    max_group_retries: int = 2
    max_consecutive_refunds: int = 64
    """Number of drops in a row at which the run fails."""

    def __post_init__(self) -> None:
        exact_ratio(self.ratio)
        for name, value, least in (
            ("batch_size", self.batch_size, 1),
            ("max_steps", self.max_steps, 1),
            ("max_staleness", self.max_staleness, 0),
            ("max_group_retries", self.max_group_retries, 0),
            ("max_consecutive_refunds", self.max_consecutive_refunds, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.order not in get_args(ConsumptionOrder):
            raise ValueError(f"order must be one of {get_args(ConsumptionOrder)}, not {self.order!r}")
        if self.staleness_policy not in get_args(StalenessPolicy):
            policies = get_args(StalenessPolicy)
            raise ValueError(f"staleness_policy must be one of {policies}, not {self.staleness_policy!r}")


@dataclass(frozen=True, slots=True)
class GroupRequest(Generic[Item]):
    """The argument of a rollout: one attempt at one group."""

    group_id: int
    item: Item
    start_version: int
    """Oldest version that a token of this attempt may come from. Lease replicas with ``min_version=start_version``."""
    attempt: int
    """Number of this attempt, from 1."""


@dataclass(frozen=True, slots=True)
class BatchPart(Generic[Item, Result]):
    """Groups of a batch that are handed out together."""

    groups: list[FinishedGroup[Item, Result]]
    completes: bool
    """True if these are the last groups of their batch."""


class SchedulerObserver(Protocol[Item, Result]):
    """Observer that is called when a group finishes or is dropped. An exception that it raises ends the run."""

    def group_finished(self, group: FinishedGroup[Item, Result]) -> None:
        """Handle a group that is ready to be trained on."""

    def group_dropped(self, group_id: int, reason: DropReason, version: int) -> None:
        """Handle a group that will not be trained on.

        ``version``: policy version at which a new group may start in its slot. A resumed run that keeps that group must
        also count this drop, or it would issue one group too many. Groups cancelled at the end of the run are not
        reported.
        """


def is_fatal(error: BaseException) -> bool:
    """Return True if the error is a `FatalRolloutError`, alone or inside an exception group."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(FatalRolloutError) is not None
    return isinstance(error, FatalRolloutError)


logger = logging.getLogger(__name__)

STARTED_AT_ONCE = 256
"""Maximum number of groups that start in one turn of the event loop; a group takes some 70 microseconds."""


@dataclass(slots=True, eq=False)
class _Running(Generic[Item]):
    group_id: int
    item: Item
    start_version: int
    attempt: int = 1
    task: asyncio.Task[None] | None = None


class _Phase(Enum):
    NEW = "new"
    RUNNING = "running"
    STOPPED = "stopped"


class RolloutScheduler(Generic[Item, Result]):
    """Scheduler that turns a source of items into batches of finished groups.

    ``source`` gives one item per group, synchronously; the group that replaces a dropped one gets the next item.
    ``rollout`` is awaited once per attempt. If it raises, it is retried ``max_group_retries`` times; then the group is
    dropped as ``failed``. ``group_filter`` returns True to keep a result; otherwise ``on_filtered`` gets the result and
    the group is dropped as ``filtered``. If one of them raises, the run ends. One task awaits `run` and another one
    awaits `next_groups` (or `next_batch`). All calls must come from the same event loop.
    """

    def __init__(
        self,
        plan: SchedulePlan,
        source: Iterator[Item],
        rollout: Callable[[GroupRequest[Item]], Awaitable[Result]],
        *,
        group_filter: Callable[[Result], bool] | None = None,
        on_filtered: Callable[[Result], None] = lambda result: None,
        observer: SchedulerObserver[Item, Result] | None = None,
    ) -> None:
        self.plan = plan
        self.ledger = Ledger()
        self._source = source
        self._rollout = rollout
        self._group_filter = group_filter
        self._on_filtered = on_filtered
        self._observer = observer
        self._admission = Admission(
            batch_size=plan.batch_size, max_steps=plan.max_steps, ratio=plan.ratio, max_staleness=plan.max_staleness
        )
        self._buffer: GroupBuffer[Item, Result] = GroupBuffer(
            batch_size=plan.batch_size, max_staleness=plan.max_staleness, order=plan.order
        )
        self._drop_limit = DropLimit(plan.max_consecutive_refunds)
        self._in_flight: dict[int, _Running[Item]] = {}
        self._to_begin_again: deque[_Running[Item]] = deque()
        """Groups that were in flight when the run was resumed; they start before any new group."""
        self._handed_out: set[int] = set()
        """Ids of the groups of the next batch that were already handed out."""
        self._untrained: deque[tuple[int, ...]] = deque()
        """Ids of the groups of each batch that was handed out but not trained on yet, oldest batch first."""
        self._cancelled: list[int] = []
        """Ids of the groups that the end of this run cut off."""
        self._phase = _Phase.NEW
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None
        self._batch_waiter: asyncio.Future[None] | None = None
        self._wants_parts = False
        """True if the waiting consumer accepts less than a whole batch."""

    def resume(
        self,
        progress: RolloutProgress,
        recovered: Recovered,
        restored: Callable[[int, Item, bytes], FinishedGroup[Item, Result]],
    ) -> None:
        """Continue where another scheduler with the same source and batch size stopped. Call it before `run`.

        ``restored`` rebuilds a finished group from its id, its item and its payload in the journal. Groups in flight
        start again, with their own ids and items. Finished groups also start again if the buffer has no room for them
        because this plan allows less staleness. Raises `SourceExhausted` if the source has fewer items than before.
        """
        if self._phase is not _Phase.NEW or self.ledger.issued:
            raise RuntimeError("a scheduler is resumed before it has done anything")
        step = progress.steps_done
        self._admission.resume_at(step)
        self._buffer.resume_at(step)
        open_groups = {*recovered.finished, *recovered.in_flight}
        items = self._items_again(recovered.issued, open_groups)
        dropped = Counter(progress.dropped)
        dropped.update(recovered.dropped.values())
        self.ledger = Ledger.resumed(recovered.issued, dropped, open_groups)
        if self.ledger.consumed != step * self.plan.batch_size:
            raise ValueError(
                f"{step} steps of {self.plan.batch_size} groups were done, but {self.ledger.consumed} groups are "
                "neither open nor dropped"
            )
        finished = [restored(group_id, items[group_id], kept) for group_id, kept in recovered.finished.items()]
        # Sorted by deadline, because the buffer requires starts in this order.
        for group in sorted(finished, key=lambda group: (group.start_version, group.group_id)):
            if self._buffer.has_room(group.start_version):
                self._buffer.start(group.group_id, group.start_version)
                self._buffer.finish(group)
                self.ledger.finish(group.group_id)
                open_groups.remove(group.group_id)
        for group_id in sorted(open_groups):
            self._in_flight[group_id] = _Running(group_id, items[group_id], step)
        self._to_begin_again.extend(self._in_flight.values())
        self.ledger.check()

    def progress(self) -> RolloutProgress:
        """Return the state of the rollouts after the last completed training step, for a checkpoint.

        Groups that the end of this run cancelled count as open: a run that goes on, for more steps, trains on them.
        """
        untrained = [group_id for batch in self._untrained for group_id in batch]
        return RolloutProgress(
            steps_done=self._admission.steps_done,
            issued=self.ledger.issued,
            dropped=dict(self.ledger.dropped - Counter({"cancelled": len(self._cancelled)})),
            open_groups=tuple(sorted([*untrained, *self.ledger.open_groups(), *self._cancelled])),
        )

    async def run(self) -> None:
        """Run rollouts until the last batch has been handed out.

        Afterwards no rollout is running, and groups that had not ended are dropped as ``cancelled``. Raises
        `TooManyDrops`, `SourceExhausted`, `FatalRolloutError` (or the exception group that holds it), or the error
        that the source, the filter or the observer raised.
        """
        if self._phase is not _Phase.NEW:
            raise RuntimeError("a scheduler runs once")
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._phase = _Phase.RUNNING
                try:
                    self._start_admissible()
                    await self._ended.wait()
                finally:
                    self._stop()
        finally:
            self._in_flight.clear()
            self._cancelled = self.ledger.open_groups()
            for group_id in self._cancelled:
                self.ledger.drop(group_id, "cancelled")
            self.ledger.check()
        if self._failure is not None:
            raise self._failure

    async def next_batch(self) -> list[FinishedGroup[Item, Result]]:
        """Wait for the next batch: exactly ``batch_size`` groups, sorted by group id; see `next_groups`."""
        return (await self.next_groups(self.plan.batch_size)).groups

    async def next_groups(self, least: int) -> BatchPart[Item, Result]:
        """Wait for at least ``least`` more groups of the next batch, or for all the rest of it, and return them.

        Groups are sorted by group id. Handing out the last ones counts as consumption of the whole batch. Raises
        `NoMoreBatches` after ``max_steps`` batches, `SchedulerStopped` if `run` was cancelled, and whatever `run`
        raises if it failed. Only one consumer may wait; a second one raises `RuntimeError`.
        """
        if self._batch_waiter is not None:
            raise RuntimeError("another task already waits for the next batch")
        self._wants_parts = least < self.plan.batch_size
        while (part := self._take(least)) is None:
            self._batch_waiter = asyncio.get_running_loop().create_future()
            try:
                await self._batch_waiter
            finally:
                self._batch_waiter = None
        return part

    def training_step_done(self, steps_done: int, publishes: bool = False) -> None:
        """Record that ``steps_done`` training steps are complete; more groups may start.

        ``publishes``: the engines will get this version; at ratio 0 groups wait for it. Raises `ValueError` unless this
        is one more step than before and its batch was handed out.
        """
        if steps_done > self._buffer.batches_taken:
            raise ValueError(f"step {steps_done} cannot be done: {self._buffer.batches_taken} batches were handed out")
        self._admission.training_step_done(steps_done, publishes)
        self._untrained.popleft()
        self._start_admissible()

    def weights_published(self, version: int) -> None:
        """Record that all live replicas now hold ``version`` or newer.

        Raises `ValueError` if the version decreases or is ahead of the steps done.
        """
        self._admission.weights_published(version)
        self._start_admissible()

    def pause_admission(self) -> None:
        """Start no group until `resume_admission`. Groups in flight continue, retries included. Pauses are counted."""
        self._admission.pause()

    def resume_admission(self) -> None:
        """Undo one `pause_admission`. Raises `RuntimeError` if there is none."""
        self._admission.resume()
        self._start_admissible()

    def holding_up(self) -> list[int]:
        """Return the ids of the groups in flight that must end before the next batch can be taken.

        Enough groups are ready, but the later batches up to the staleness deadline of these groups have no room for
        them. Empty if no batch is held up.
        """
        return self._buffer.overdue() if self._in_flight else []

    def why_waiting(self) -> Refusal | Literal["source", "stopped"]:
        """Return the reason why no group is started now."""
        if isinstance(self._failure, SourceExhausted):
            return "source"
        refusal = self._admission.refusal(self.ledger.net_issued)
        return "stopped" if refusal is None or self._failure is not None else refusal

    # Starting

    def _start_admissible(self) -> None:
        """Start every group that may start now; of very many, the rest in later turns of the event loop."""
        if self._phase is not _Phase.RUNNING or self._failure is not None:
            return
        self._begin_again()
        last = self.ledger.issued + STARTED_AT_ONCE
        while not self._to_begin_again and self._admission.refusal(self.ledger.net_issued) is None:
            if self.ledger.issued == last:
                asyncio.get_running_loop().call_soon(self._start_admissible)
                return
            try:
                item = next(self._source)
            except StopIteration:
                missing = self.plan.max_steps * self.plan.batch_size - self.ledger.net_issued
                message = f"the source ended after {self.ledger.issued} groups; {missing} more are needed"
                self._fail(SourceExhausted(message))
                return
            except Exception as error:
                error.add_note(f"raised by the source, asked for the item of group {self.ledger.issued}")
                self._fail(error)
                return
            group = _Running(self.ledger.issue(), item, self._admission.version)
            self._buffer.start(group.group_id, group.start_version)
            self._in_flight[group.group_id] = group
            self._begin(group)

    def _begin_again(self) -> None:
        """Start the groups that were in flight before the resume, as many as admission and the buffer allow."""
        version = self._admission.version
        while self._to_begin_again and not self._admission.is_paused and self._buffer.has_room(version):
            group = self._to_begin_again.popleft()
            group.start_version = version
            self._buffer.start(group.group_id, version)
            self._begin(group)

    def _begin(self, group: _Running[Item]) -> None:
        group.task = self._tasks.create_task(self._attempt_until_done(group), name=f"group-{group.group_id}")

    def _items_again(self, issued: int, wanted: Collection[int]) -> dict[int, Item]:
        """Draw the items of earlier groups from the source and return those that are wanted, by group id."""
        items: dict[int, Item] = {}
        for group_id in range(issued):
            try:
                item = next(self._source)
            except StopIteration:
                message = f"the source ended after {group_id} groups; before the run was resumed it gave {issued}"
                raise SourceExhausted(message) from None
            if group_id in wanted:
                items[group_id] = item
        return items

    # One group's life

    async def _attempt_until_done(self, group: _Running[Item]) -> None:
        failure: BaseException | None = None
        while failure is None or self._may_retry(group, failure):
            try:
                result = await self._rollout(
                    GroupRequest(group.group_id, group.item, group.start_version, group.attempt)
                )
            except asyncio.CancelledError as cancelled:
                # `Task.cancelling` is unreliable: in Python 3.11 it stays set after a `TaskGroup` inside has failed.
                if not self._is_in_flight(group):
                    raise
                failure = cancelled  # Something the rollout awaited was cancelled, not this group.
            except Exception as error:
                failure = error
            else:
                self._finish(group, result)
                return

    def _may_retry(self, group: _Running[Item], failure: BaseException) -> bool:
        """Record a failed attempt, and return True if another one follows."""
        if is_fatal(failure):
            self._fail(failure)
        if not self._is_in_flight(group):
            return False
        if group.attempt > self.plan.max_group_retries:
            logger.warning("group %d failed %d times and is dropped: %r", group.group_id, group.attempt, failure)
            self._drop(group, "failed", failure)
            return False
        logger.info("attempt %d of group %d failed and is retried: %r", group.attempt, group.group_id, failure)
        group.attempt += 1
        group.start_version = self._admission.version
        self._buffer.restart(group.group_id, group.start_version)
        self._wake_consumer()
        return True

    def _finish(self, group: _Running[Item], result: Result) -> None:
        if not self._is_in_flight(group):
            return
        try:
            kept = self._group_filter is None or self._group_filter(result)
        except Exception as error:
            error.add_note(f"raised by the group filter on group {group.group_id}")
            self._fail(error)
            return
        if not kept:
            if self._observed(self._on_filtered, result):
                self._drop(group, "filtered")
            return
        del self._in_flight[group.group_id]
        self.ledger.finish(group.group_id)
        self._drop_limit.accepted()
        finished = FinishedGroup(group.group_id, group.item, result, group.start_version)
        self._buffer.finish(finished)
        if self._observer is not None and not self._observed(self._observer.group_finished, finished):
            return
        self._wake_consumer()

    def _observed(self, tell: Callable[..., None], *what: object) -> bool:
        """Call the observer. Return False, and end the run, if it raised."""
        try:
            tell(*what)
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _is_in_flight(self, group: _Running[Item]) -> bool:
        """Return False once the group was dropped while its task was still unwinding, or the run is ending."""
        return self._phase is _Phase.RUNNING and self._failure is None and group.group_id in self._in_flight

    def _drop(self, group: _Running[Item], reason: DropReason, cause: BaseException | None = None) -> None:
        """Drop a group in flight, and start the group that takes its slot."""
        del self._in_flight[group.group_id]
        self._buffer.drop(group.group_id)
        self.ledger.drop(group.group_id, reason)
        if self._observer is not None and not self._observed(
            self._observer.group_dropped, group.group_id, reason, self._admission.version
        ):
            return
        try:
            self._drop_limit.dropped(reason, cause)
        except TooManyDrops as error:
            self._fail(error)
            return
        self._start_admissible()
        self._wake_consumer()

    # Batches

    def _take(self, least: int) -> BatchPart[Item, Result] | None:
        if self._failure is None and self.plan.staleness_policy == "drop":
            self._drop_overdue()
        if self._failure is not None:
            raise self._failure
        if self._buffer.batches_taken == self.plan.max_steps:
            raise NoMoreBatches(f"all {self.plan.max_steps} batches were handed out")
        if self._phase is _Phase.STOPPED:
            raise SchedulerStopped("the scheduler's run was cancelled before the last batch")
        batch = self._buffer.take()
        if batch is None:
            return self._take_part(least)
        for group in batch:
            self.ledger.consume(group.group_id)
        self._untrained.append(tuple(group.group_id for group in batch))
        self.ledger.check()
        if self._buffer.batches_taken == self.plan.max_steps:
            self._ended.set()
        rest = self._not_handed_out(batch)
        self._handed_out.clear()
        return BatchPart(rest, True)

    def _take_part(self, least: int) -> BatchPart[Item, Result] | None:
        if least >= self.plan.batch_size:
            return None
        self._buffer.choose()
        if len(self._buffer.chosen) - len(self._handed_out) < least:
            return None
        part = sorted(self._not_handed_out(self._buffer.chosen), key=lambda group: group.group_id)
        self._handed_out.update(group.group_id for group in part)
        return BatchPart(part, False)

    def _not_handed_out(self, groups: list[FinishedGroup[Item, Result]]) -> list[FinishedGroup[Item, Result]]:
        return [group for group in groups if group.group_id not in self._handed_out]

    def _drop_overdue(self) -> None:
        if self._phase is not _Phase.RUNNING:
            return
        for group_id in self._buffer.overdue():
            group = self._in_flight[group_id]
            self._drop(group, "stale")
            if group.task is not None:
                group.task.cancel()

    def _wake_consumer(self) -> None:
        """Wake a waiting `next_batch` if it may succeed now."""
        if self._batch_waiter is None or self._batch_waiter.done():
            return
        held_up = self.plan.staleness_policy == "drop" and self._buffer.held_up()
        if self._wants_parts or held_up or self._buffer.batch_ready():
            self._batch_waiter.set_result(None)

    # Ending

    def _fail(self, error: BaseException) -> None:
        """End the run with this error, unless it is ending already. `run` wakes up and stops everything."""
        if self._failure is not None or self._phase is not _Phase.RUNNING:
            return
        self._failure = error
        self._ended.set()

    def _stop(self) -> None:
        self._phase = _Phase.STOPPED
        for group in self._in_flight.values():
            if group.task is not None:
                group.task.cancel()
        if self._batch_waiter is not None and not self._batch_waiter.done():
            self._batch_waiter.set_result(None)
