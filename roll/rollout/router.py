"""Which engine replica a request goes to, and what is known about each replica.

A request leases a replica: the least loaded live one, or the one its episode used before. Only leased requests count as
load; those that still wait for a replica hold nothing, so that a weight update never waits for them. Waiting ends at
a deadline with an error that says what became of each replica. Nothing here talks to an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from roll.tracking.waits import REPLICAS, waiting


class NoReplica(RuntimeError):
    """No live (and new enough) replica within the deadline. The message names the state or cause of each."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to send one request to a replica."""

    replica_id: str
    incarnation: int
    """A lease on a replica that has died since does not count against its successor."""


@dataclass(slots=True)
class ReplicaState:
    """What the router knows of one replica."""

    live: bool = False
    version: int = -1
    """Version of its weights; meaningful while live."""
    load: int = 0
    """Leases held on it."""
    incarnation: int = 0
    """Times it has become live."""
    cause: str | None = None
    """Why it is not live, as reported first; None while it is, or has not started yet."""


class Router:
    """Least-loaded routing with sticky episodes. Ties go to the replica named first."""

    def __init__(
        self,
        replica_ids: Iterable[str],
        limit: Callable[[float], AbstractAsyncContextManager[asyncio.Timeout]] = asyncio.timeout,
    ) -> None:
        """Replicas begin as not live; `mark_live` opens them. ``limit`` is the clock of `acquire`'s deadlines. Raises
        `ValueError` without names or with equal ones."""
        names = list(replica_ids)
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a router needs distinct replica names, at least one; got {names}")
        self._replicas = {name: ReplicaState() for name in names}
        self._limit = limit
        self._sticky: dict[Hashable, Lease] = {}
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def oldest_live_version(self) -> int | None:
        """Smallest version over the live replicas, which is the engine's for admission; None if none is live."""
        return min((state.version for state in self._replicas.values() if state.live), default=None)

    def state(self, replica_id: str) -> ReplicaState:
        """The replica's state, to be read only. Raises `KeyError` naming the known replicas."""
        if replica_id not in self._replicas:
            raise KeyError(f"unknown replica {replica_id!r}; known are {', '.join(self._replicas)}")
        return self._replicas[replica_id]

    def mark_live(self, replica_id: str, version: int) -> None:
        """The replica accepts requests, with weights of ``version``. Raises `ValueError` if it was live already."""
        state = self.state(replica_id)
        if state.live:
            raise ValueError(f"replica {replica_id} is live already, at version {state.version}")
        state.live = True
        state.cause = None
        state.version = version
        state.load = 0
        state.incarnation += 1
        self._wake_waiters()

    def mark_dead(self, replica_id: str, cause: str | BaseException, *, incarnation: int | None = None) -> None:
        """The replica is gone (or failed to start): its leases are void, and its episodes will move.

        Each request on a dead replica may report it: the first cause stays, and a report about an earlier
        ``incarnation`` than the present one (`Lease.incarnation`) is ignored.
        """
        state = self.state(replica_id)
        if state.cause is not None or (incarnation is not None and incarnation != state.incarnation):
            return
        state.live = False
        state.load = 0
        state.cause = cause if isinstance(cause, str) else repr(cause)

    def set_version(self, replica_id: str, version: int) -> None:
        """The live replica has loaded ``version``. Raises `ValueError` if it is not live or the version goes back."""
        state = self.state(replica_id)
        if not state.live:
            raise ValueError(f"replica {_describe_state(replica_id, state)}")
        if version < state.version:
            raise ValueError(f"replica {replica_id} went back from version {state.version} to {version}")
        state.version = version
        self._wake_waiters()

    @asynccontextmanager
    async def lease(
        self, *, timeout: float, sticky_key: Hashable | None = None, min_version: int | None = None
    ) -> AsyncIterator[str]:
        """`acquire` and `release` around a block; gives the replica's id."""
        lease = await self.acquire(timeout=timeout, sticky_key=sticky_key, min_version=min_version)
        try:
            yield lease.replica_id
        finally:
            self.release(lease)

    async def acquire(
        self, *, timeout: float, sticky_key: Hashable | None = None, min_version: int | None = None
    ) -> Lease:
        """Lease a live replica that holds ``min_version`` or newer, waiting up to ``timeout`` seconds for one.

        Requests with the same ``sticky_key`` go to the same replica while it lives and is new enough; end the episode
        with `forget`. Raises `NoReplica` at the deadline. Cancelled while waiting, it holds nothing.
        """
        try:
            async with self._limit(timeout) as deadline:
                while (replica_id := self._choose(sticky_key, min_version)) is None:
                    with waiting(REPLICAS, _wanted(min_version)):
                        await self._wait_for_change()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise NoReplica(self._describe(min_version, timeout)) from None
        state = self._replicas[replica_id]
        state.load += 1
        lease = Lease(replica_id, state.incarnation)
        if sticky_key is not None:
            self._sticky[sticky_key] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """Give a lease back, once. On a replica that has died since, nothing is left to give back."""
        state = self.state(lease.replica_id)
        if not state.live or state.incarnation != lease.incarnation:
            return
        if state.load == 0:
            raise RuntimeError(f"replica {lease.replica_id} was released more often than acquired")
        state.load -= 1

    def forget(self, sticky_key: Hashable) -> None:
        """The episode has ended; its replica need not be remembered."""
        self._sticky.pop(sticky_key, None)

    def _choose(self, sticky_key: Hashable | None, min_version: int | None) -> str | None:
        earlier = self._sticky.get(sticky_key) if sticky_key is not None else None
        if earlier is not None:
            state = self._replicas[earlier.replica_id]
            if state.incarnation == earlier.incarnation and _usable(state, min_version):
                return earlier.replica_id
        usable = [name for name, state in self._replicas.items() if _usable(state, min_version)]
        return min(usable, key=lambda name: self._replicas[name].load, default=None)

    async def _wait_for_change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _describe(self, min_version: int | None, timeout: float) -> str:
        states = [_describe_state(name, state) for name, state in self._replicas.items()]
        return f"no {_wanted(min_version)} within {timeout} s ({'; '.join(states)})"


def _wanted(min_version: int | None) -> str:
    return "live replica" if min_version is None else f"live replica with version {min_version} or newer"


def _usable(state: ReplicaState, min_version: int | None) -> bool:
    return state.live and (min_version is None or state.version >= min_version)


def _describe_state(name: str, state: ReplicaState) -> str:
    if state.live:
        return f"{name} is live at version {state.version}"
    return f"{name} is not live: {state.cause or 'it has not started yet'}"
