"""The rule for which groups form the next batch, and when it is ready. A pure state machine: no tasks, no clock.

Training step ``t`` trains on batch ``t`` (counted from 0), which has B groups. With staleness bound R, a group started
at version v has the deadline ``d = v + R``, the last batch that may contain it; then no token is more than R versions
old. It is not enough that batch t waits for groups with ``d == t``. Example with R = 2 and B = 1: three groups start at
version 0, and one of them takes batch 0. If a group of version 1 now takes batch 1, the other two are both due in batch
2, which has one place. Each batch must therefore look ahead to later deadlines. Let D_u be the set of groups not yet
consumed (in flight or ready) with deadline <= u.

- Invariant, before batch t: ``|D_u| <= (u - t + 1) B`` for all u >= t. The batches t to u have room for D_u.
- Batch t is chosen so that the invariant holds for t + 1: it takes at least ``|D_u| - (u - t) B`` members of D_u. The
  ready groups allow this iff, for every u, at most ``(u - t) B`` members of D_u are still in flight. Until then the
  batch waits.
- Admission keeps the invariant. When group number g starts at v, ``d = v + R >= g // B``. For u >= d, the number of all
  unconsumed groups is ``g + 1 - t B <= (u + 1) B - t B``; for u < d, D_u does not change. A retry only moves a deadline
  later; a drop removes one.

The groups of a batch may also be chosen one by one, as they finish. A chosen group keeps its place in batch t, and
counts in D_u until the batch is taken. Choosing a group with deadline d takes room from the groups due by u, for every
u < d. It is allowed iff ``|D_u| + (chosen groups due after u) < (u - t + 1) B`` for all these u. The limits are nested,
so there are no dead ends: a batch that could be taken at once can also be completed from the groups chosen so far.

`fifo` takes groups in the order of ``(deadline at the first start, id)``, which satisfies the rule without further
checks: the group at place p has ``d >= p // B``. Unless the run was resumed, this is the order of issue. A resumed run
starts some groups again, with later deadlines than finished groups of higher ids. A group is certain to be in the next
batch as soon as fewer groups precede it than the batch has places, because it moves up if one of them is dropped.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

ConsumptionOrder = Literal["ready_first", "fifo"]


@dataclass(frozen=True, slots=True)
class FinishedGroup(Generic[Item, Result]):
    """A group whose rollout succeeded."""

    group_id: int
    item: Item
    """The item that the source gave for this group."""
    result: Result
    """The return value of the rollout."""
    start_version: int
    """Engine version when the successful attempt began. No token of the group is from an older version."""


Place = tuple[int, int]
"""Sort key of a group in `fifo` order: its deadline at its first start, and its id."""


class _InFlight:
    """Groups in flight by ascending deadline. No group's deadline is earlier than that of a group started before."""

    def __init__(self) -> None:
        self.by_deadline: dict[int, dict[int, None]] = {}
        self.place_of: dict[int, Place] = {}
        self._deadline_of: dict[int, int] = {}
        self._places: list[Place] = []
        """Sorted."""
        self._latest_deadline = 0

    def __len__(self) -> int:
        return len(self._deadline_of)

    def add(self, group_id: int, deadline: int) -> None:
        self._set_deadline(group_id, deadline)
        self.place_of[group_id] = deadline, group_id
        insort(self._places, self.place_of[group_id])

    def postpone(self, group_id: int, deadline: int) -> None:
        self._forget_deadline(group_id)
        self._set_deadline(group_id, deadline)

    def remove(self, group_id: int) -> int:
        """Forget the group and return its deadline."""
        del self._places[bisect_left(self._places, self.place_of.pop(group_id))]
        return self._forget_deadline(group_id)

    def before(self, place: Place) -> int:
        """Return the number of groups in flight with an earlier place."""
        return bisect_left(self._places, place)

    def _forget_deadline(self, group_id: int) -> int:
        deadline = self._deadline_of.pop(group_id)
        groups = self.by_deadline[deadline]
        del groups[group_id]
        if not groups:
            del self.by_deadline[deadline]
        return deadline

    def _set_deadline(self, group_id: int, deadline: int) -> None:
        if deadline < self._latest_deadline:
            raise ValueError(f"group {group_id} starts with deadline {deadline} after one of {self._latest_deadline}")
        self._latest_deadline = deadline
        self._deadline_of[group_id] = deadline
        self.by_deadline.setdefault(deadline, {})[group_id] = None


@dataclass
class _Batch:
    """State of the next batch, whose groups may be chosen one by one."""

    size: int
    index: int = 0
    chosen: Counter[int] = field(default_factory=Counter)
    """Number of chosen groups by deadline."""


class _ReadyFirst(Generic[Item, Result]):
    """Ready groups, taken in the order they finished unless deadlines require another order."""

    def __init__(self) -> None:
        self._by_deadline: dict[int, deque[tuple[int, FinishedGroup[Item, Result]]]] = {}
        self._finished = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, group: FinishedGroup[Item, Result], deadline: int, place: Place) -> None:
        self._by_deadline.setdefault(deadline, deque()).append((self._finished, group))
        self._finished += 1
        self._size += 1

    def takeable(self, in_flight: _InFlight) -> int:
        return self._size

    def choose(self, batch: _Batch, in_flight: _InFlight) -> Iterator[FinishedGroup[Item, Result]]:
        """Yield ready groups in the order they finished, except those that would take the room of earlier deadlines."""
        deadlines = sorted({*self._by_deadline, *in_flight.by_deadline, *batch.chosen})
        room, due, missing = [], 0, batch.size - batch.chosen.total()
        for deadline in deadlines:
            due += len(self._by_deadline.get(deadline, ())) + len(in_flight.by_deadline.get(deadline, ()))
            # Every chosen group takes a place of the next batch, whatever its deadline.
            room.append((deadline - batch.index) * batch.size + missing - due)
        while missing:
            earliest: tuple[int, int] | None = None
            for position, deadline in enumerate(deadlines):
                ready = self._by_deadline.get(deadline)
                if ready and (earliest is None or ready[0][0] < earliest[0]):
                    earliest = ready[0][0], position
                if room[position] <= 0:
                    break
            if earliest is None:
                return
            deadline = deadlines[earliest[1]]
            _, group = self._by_deadline[deadline].popleft()
            if not self._by_deadline[deadline]:
                del self._by_deadline[deadline]
            for position in range(earliest[1]):
                room[position] -= 1
            missing -= 1
            self._size -= 1
            yield group


class _Fifo(Generic[Item, Result]):
    """Ready groups, taken in `fifo` order. A group in flight holds back all groups with later places."""

    def __init__(self) -> None:
        self._held_back: list[tuple[Place, FinishedGroup[Item, Result]]] = []
        self._released: deque[FinishedGroup[Item, Result]] = deque()

    def __len__(self) -> int:
        return len(self._held_back) + len(self._released)

    def add(self, group: FinishedGroup[Item, Result], deadline: int, place: Place) -> None:
        heapq.heappush(self._held_back, (place, group))

    def takeable(self, in_flight: _InFlight) -> int:
        while self._held_back and not in_flight.before(self._held_back[0][0]):
            self._released.append(heapq.heappop(self._held_back)[1])
        return len(self._released)

    def choose(self, batch: _Batch, in_flight: _InFlight) -> Iterator[FinishedGroup[Item, Result]]:
        """Yield ready groups in `fifo` order, as long as the batch has room for the unfinished ones before them."""
        missing = batch.size - batch.chosen.total()
        self.takeable(in_flight)
        while missing and self._released:
            missing -= 1
            yield self._released.popleft()
        while missing and self._held_back and in_flight.before(self._held_back[0][0]) < missing:
            missing -= 1
            yield heapq.heappop(self._held_back)[1]


class GroupBuffer(Generic[Item, Result]):
    """Groups from their start until a batch takes them.

    The caller reports each start, retry, finish and drop; the versions it reports must never decrease. `take` returns
    the batches in order.
    """

    def __init__(self, *, batch_size: int, max_staleness: int, order: ConsumptionOrder) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._in_flight = _InFlight()
        self._ready: _ReadyFirst[Item, Result] | _Fifo[Item, Result] = _Fifo() if order == "fifo" else _ReadyFirst()
        self._next = _Batch(batch_size)
        self.chosen: list[FinishedGroup[Item, Result]] = []
        """Groups chosen for the next batch so far."""

    @property
    def batches_taken(self) -> int:
        """Number of batches taken. A resumed run starts with the number of its completed training steps."""
        return self._next.index

    @property
    def ready(self) -> int:
        """Number of finished groups that no batch has taken yet, including chosen ones."""
        return len(self._ready) + len(self.chosen)

    def resume_at(self, batches_taken: int) -> None:
        """Set the number of batches that were taken before the run was resumed."""
        self._next.index = batches_taken

    def has_room(self, version: int) -> bool:
        """Return True if a group that starts at ``version`` would have room in the batches up to its deadline."""
        unconsumed = len(self._in_flight) + self.ready + 1
        return unconsumed <= (version + self._max_staleness - self.batches_taken + 1) * self._batch_size

    def start(self, group_id: int, version: int) -> None:
        """Add a group that starts at ``version``.

        Raises `ValueError` if the batches up to its deadline have no room, which `Admission` never lets happen.
        """
        deadline = version + self._max_staleness
        if not self.has_room(version):
            unconsumed = len(self._in_flight) + self.ready + 1
            raise ValueError(
                f"group {group_id} started too early: it is due in batch {deadline}, the next batch is "
                f"{self.batches_taken}, and {unconsumed} groups need a place in these batches of {self._batch_size}"
            )
        self._in_flight.add(group_id, deadline)

    def restart(self, group_id: int, version: int) -> None:
        """Restart a group in flight at the same or a newer version."""
        self._in_flight.postpone(group_id, version + self._max_staleness)

    def finish(self, group: FinishedGroup[Item, Result]) -> None:
        """Move a group from in flight to ready."""
        place = self._in_flight.place_of[group.group_id]
        self._ready.add(group, self._in_flight.remove(group.group_id), place)

    def drop(self, group_id: int) -> None:
        """Forget a group in flight that will never be ready."""
        self._in_flight.remove(group_id)

    def batch_ready(self) -> bool:
        """Return True if `take` would return a batch."""
        takeable = self._ready.takeable(self._in_flight) + len(self.chosen)
        return takeable >= self._batch_size and not self._blocked_by_deadline()

    def held_up(self) -> bool:
        """Return True if enough groups are ready, but taking them would make a group in flight miss its deadline."""
        return self.ready >= self._batch_size and self._blocked_by_deadline()

    def overdue(self) -> list[int]:
        """Return the ids of the groups in flight that must finish or be dropped before the next batch can be taken.

        They are as few as possible, earliest deadline first. The list is empty unless the batch is `held_up`.
        """
        if not self.held_up():
            return []
        overdue: list[int] = []
        in_time: deque[int] = deque()
        for deadline, groups in self._in_flight.by_deadline.items():
            in_time.extend(groups)
            while len(in_time) > self._room_after_this_batch(deadline):
                overdue.append(in_time.popleft())
        return overdue

    def choose(self) -> None:
        """Choose more ready groups for the next batch, as many as the rule allows."""
        chosen = list(self._ready.choose(self._next, self._in_flight))
        self._next.chosen.update(group.start_version + self._max_staleness for group in chosen)
        self.chosen += chosen

    def take(self) -> list[FinishedGroup[Item, Result]] | None:
        """Return the next batch, sorted by group id, or None if it must wait. It includes the chosen groups."""
        if not self.batch_ready():
            return None
        self.choose()
        if len(self.chosen) < self._batch_size:
            raise RuntimeError(f"batch {self.batches_taken} was ready and has {len(self.chosen)} groups")
        batch, self.chosen = self.chosen, []
        self._next.index += 1
        self._next.chosen.clear()
        return sorted(batch, key=lambda group: group.group_id)

    def _blocked_by_deadline(self) -> bool:
        unfinished = 0
        for deadline, groups in self._in_flight.by_deadline.items():
            unfinished += len(groups)
            if unfinished > self._room_after_this_batch(deadline):
                return True
        return False

    def _room_after_this_batch(self, deadline: int) -> int:
        return (deadline - self.batches_taken) * self._batch_size
