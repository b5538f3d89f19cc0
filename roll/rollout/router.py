"""Routing of requests to engine replicas, and the known state of each replica.

A request leases a replica: the least loaded live one, or the one its episode used before. Only leases count as load.
Requests that still wait for a replica hold nothing, so a weight update never waits for them. They wait until a
deadline, and then raise an error with the state of each replica. This module never calls an engine.

Some replicas may be reserved. From then on they get only requests that ask for a reserved replica. Other requests that
already run there finish there; the next turn of such an episode goes to another replica.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from roll.tracking.waits import REPLICAS, waiting


class NoReplica(RuntimeError):
    """No live (and new enough) replica was found before the deadline. The message gives the state of each replica."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to send one request to a replica."""

    replica_id: str
    incarnation: int
    """`ReplicaState.incarnation` when the lease was made. A lease on a dead replica is no load of its replacement."""


Rank = tuple[bool, int, int]
"""Sort key of a live replica: (is draining, load, position in the list of names). The smallest one takes the next
request."""


class ReplicaGroup(NamedTuple):
    """Weight version and reservation of a replica. Replicas of one group can serve the same requests."""

    version: int
    reserved: bool


@dataclass(slots=True)
class ReplicaState:
    """The known state of one replica."""

    live: bool = False
    version: int = -1
    """Version of the replica's weights; meaningful only while live."""
    load: int = 0
    """Number of leases held on it."""
    draining: bool = False
    """True while the replica finishes its requests before a change. It may be idle then, but begins no new request."""
    incarnation: int = 0
    """Number of times it has become live."""
    rank: Rank = (False, 0, 0)
    """Its entry in the heap, while live at most its current sort key. Any other, even an equal tuple, is outdated."""
    group: ReplicaGroup = ReplicaGroup(-1, False)
    """Group whose heap holds `rank`."""
    cause: str | None = None
    """First reported reason why it is not live. None while it is live, or if it has not started yet."""


class Router:
    """Least-loaded routing with sticky episodes. Ties go to the replica named first.

    A choice, and the oldest version, take amortised logarithmic time for each version that replicas hold.
    """

    def __init__(
        self,
        replica_ids: Iterable[str],
        limit: Callable[[float], AbstractAsyncContextManager[asyncio.Timeout]] = asyncio.timeout,
    ) -> None:
        """Create the router with all replicas not live; `mark_live` opens them.

        ``limit(seconds)`` returns the timeout context for `acquire`. Raises `ValueError` if there are no names or two
        are equal.
        """
        names = list(replica_ids)
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a router needs distinct replica names, at least one; got {names}")
        self._replicas = {name: ReplicaState() for name in names}
        self._names = names
        self._place = {name: place for place, name in enumerate(names)}
        self._ranks: dict[ReplicaGroup, list[Rank]] = {}
        """Group -> heap with a rank of each of its live replicas. A rank that has grown is updated, and an outdated
        one is removed, when it reaches the top."""
        self._limit = limit
        self._sticky: dict[Hashable, Lease] = {}
        self._reserved: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._became_idle = asyncio.Event()

    def state(self, replica_id: str) -> ReplicaState:
        """Return the replica's state, to be read only. Raises `KeyError` naming the known replicas."""
        if replica_id not in self._replicas:
            raise KeyError(f"unknown replica {replica_id!r}; known are {', '.join(self._replicas)}")
        return self._replicas[replica_id]

    def mark_live(self, replica_id: str, version: int) -> None:
        """Open a replica for requests, with weights of ``version``. Raises `ValueError` if it was live already."""
        state = self.state(replica_id)
        if state.live:
            raise ValueError(f"replica {replica_id} is live already, at version {state.version}")
        state.live = True
        state.cause = None
        state.version = version
        state.draining = False
        state.incarnation += 1
        self._regroup(replica_id)
        self._wake_waiting()

    def mark_dead(self, replica_id: str, cause: str | BaseException) -> None:
        """Close a replica that is gone or failed to start. Its leases are void, and its episodes move to others.

        A replica may be reported several times; the first cause is kept.
        """
        state = self.state(replica_id)
        if state.cause is not None:
            return
        state.live = False
        state.load = 0
        state.cause = cause if isinstance(cause, str) else repr(cause)

    def set_version(self, replica_id: str, version: int) -> None:
        """Record that a live replica has loaded ``version``.

        Raises `ValueError` if it is not live or the version decreases.
        """
        state = self.state(replica_id)
        if not state.live:
            raise ValueError(f"replica {_describe_state(replica_id, state)}")
        if version < state.version:
            raise ValueError(f"replica {replica_id} went back from version {state.version} to {version}")
        state.version = version
        self._regroup(replica_id)
        self._wake_waiting()

    def oldest(self) -> int | None:
        """Return the smallest version over the live replicas that are not reserved; None if there is none."""
        free = (group for group in list(self._ranks) if not group.reserved)
        return min((group.version for group in free if self._first(group) is not None), default=None)

    def reserve(self, replica_ids: Iterable[str]) -> None:
        """Replace the set of reserved replicas. A reserved replica that dies and restarts is still reserved."""
        before, self._reserved = self._reserved, frozenset(replica_ids)
        for replica_id in before ^ self._reserved:
            self._regroup(replica_id)
        self._wake_waiting()

    @contextmanager
    def draining(self, replica_id: str) -> Iterator[None]:
        """During a block, send new requests to other replicas if there are any, including those of this replica's
        episodes."""
        state = self.state(replica_id)
        incarnation = state.incarnation
        state.draining = True
        try:
            yield
        finally:
            if state.incarnation == incarnation:
                state.draining = False
                self._lower(replica_id)

    async def acquire(
        self,
        *,
        timeout: float,
        sticky_key: Hashable | None = None,
        min_version: int | None = None,
        reserved: bool = False,
    ) -> Lease:
        """Lease a live replica that holds ``min_version`` or newer, waiting up to ``timeout`` seconds for one.

        Requests with the same ``sticky_key`` go to the same replica while it lives and is new enough; call `forget`
        when the episode ends. If any replicas are reserved, requests with ``reserved`` go only to them, and all others
        only to the rest. Raises `NoReplica` at the deadline. A caller that is cancelled while waiting holds nothing.
        """
        replica_id = self._choose(sticky_key, min_version, reserved)
        if replica_id is None:
            replica_id = await self._wait_for_one(timeout, sticky_key, min_version, reserved)
        state = self._replicas[replica_id]
        state.load += 1
        lease = Lease(replica_id, state.incarnation)
        if sticky_key is not None:
            self._sticky[sticky_key] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """Give a lease back, once. If its replica has died since, this does nothing."""
        state = self._replicas[lease.replica_id]
        if not state.live or state.incarnation != lease.incarnation:
            return
        if state.load == 0:
            raise RuntimeError(f"replica {lease.replica_id} was released more often than acquired")
        state.load -= 1
        self._lower(lease.replica_id)
        if state.load == 0:
            self._became_idle.set()

    async def idle(self, replica_id: str) -> None:
        """Wait until a replica has no request."""
        while self.state(replica_id).load:
            self._became_idle.clear()
            await self._became_idle.wait()

    def forget(self, sticky_key: Hashable) -> None:
        """Forget the replica of an episode that has ended."""
        self._sticky.pop(sticky_key, None)

    def _choose(self, sticky_key: Hashable | None, min_version: int | None, reserved: bool) -> str | None:
        earlier = self._sticky.get(sticky_key) if sticky_key is not None else None
        if earlier is not None and self._is_for(earlier.replica_id, reserved):
            state = self._replicas[earlier.replica_id]
            if state.incarnation == earlier.incarnation and _usable(state, min_version) and not state.draining:
                return earlier.replica_id
        wanted, best = bool(self._reserved) and reserved, None
        for group in list(self._ranks):
            first = self._first(group)  # also for other groups, because it deletes empty ones
            if first is not None and group.reserved == wanted and (min_version is None or group.version >= min_version):
                best = first if best is None else min(best, first)
        return None if best is None else self._names[best[-1]]

    async def _wait_for_one(
        self, timeout: float, sticky_key: Hashable | None, min_version: int | None, reserved: bool
    ) -> str:
        try:
            async with self._limit(timeout):
                while (replica_id := self._choose(sticky_key, min_version, reserved)) is None:
                    with waiting(REPLICAS, _wanted(min_version)):
                        await self._changed.wait()
        except TimeoutError:
            states = "; ".join(
                _describe_state(name, state) + (" (reserved)" if name in self._reserved else "")
                for name, state in self._replicas.items()
            )
            raise NoReplica(f"no {_wanted(min_version)} within {timeout} s ({states})") from None
        return replica_id

    def _regroup(self, replica_id: str) -> None:
        """Update the group of a replica whose version or reservation has changed."""
        state = self._replicas[replica_id]
        state.group = ReplicaGroup(state.version, replica_id in self._reserved)
        self._rank(replica_id)

    def _lower(self, replica_id: str) -> None:
        """Update the rank of a replica that may have become less."""
        state = self._replicas[replica_id]
        if (state.draining, state.load) < state.rank[:2]:
            self._rank(replica_id)

    def _rank(self, replica_id: str) -> None:
        """Push the current rank of a replica on the heap of its group if it is live."""
        state = self._replicas[replica_id]
        if not state.live:
            return
        ranks = self._ranks.setdefault(state.group, [])
        state.rank = (state.draining, state.load, self._place[replica_id])
        heapq.heappush(ranks, state.rank)
        if len(ranks) > 4 * len(self._names):
            ranks[:] = [each.rank for each in self._replicas.values() if each.live and each.group == state.group]
            heapq.heapify(ranks)

    def _first(self, group: ReplicaGroup) -> Rank | None:
        """Return the smallest rank of a group. If it has no live replica, delete it and return None."""
        ranks = self._ranks[group]
        while ranks:
            first = ranks[0]
            draining, load, place = first
            state = self._replicas[self._names[place]]
            if not state.live or state.rank is not first:
                heapq.heappop(ranks)
            elif state.load == load and state.draining == draining:
                return first
            else:
                state.rank = (state.draining, state.load, place)
                heapq.heapreplace(ranks, state.rank)
        del self._ranks[group]
        return None

    def _is_for(self, replica_id: str, reserved: bool) -> bool:
        """Return True if the replica serves requests with this value of ``reserved``."""
        return not self._reserved or (replica_id in self._reserved) == reserved

    def _wake_waiting(self) -> None:
        """Wake all waiting callers to try again, in the order of their requests."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _wanted(min_version: int | None) -> str:
    return "live replica" if min_version is None else f"live replica with version {min_version} or newer"


def _usable(state: ReplicaState, min_version: int | None) -> bool:
    return state.live and (min_version is None or state.version >= min_version)


def _describe_state(name: str, state: ReplicaState) -> str:
    if state.live:
        return f"{name} is live at version {state.version}"
    return f"{name} is not live: {state.cause or 'it has not started yet'}"
