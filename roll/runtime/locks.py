"""Device locks: they decide which role may use a set of shared devices.

Roles that share a device share one lock. The lock is held by a *role*, not by a task. Several tasks of the role that
holds it may work at once (generation continues while one replica loads new weights). Tasks of other roles wait in line,
and later tasks of the holding role do not overtake them. When another role gets the lock, the states of the old role
are offloaded before those of the new role are loaded. Roles with devices of their own never wait for another role.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from roll.tracking.waits import holding, waiting


class Resident(Protocol):
    """A role whose states can be offloaded from its devices and loaded again."""

    async def load_states(self) -> None:
        """Load the states that the role computes with onto the devices."""

    async def offload_states(self) -> None:
        """Undo `load_states`, so that another role can use the devices."""


class DeviceLock:
    """A lock that is first come, first served between roles, and shared by the tasks of one role."""

    def __init__(self, roles: Iterable[str]) -> None:
        self.roles = frozenset(roles)
        self.name = f"devices/{'+'.join(sorted(self.roles))}"
        self._residents: dict[str, Resident] = {}
        self._loaded: set[str] = set()
        self.holder: str | None = None
        """Role that holds the devices; None if they are free."""
        self._holders = 0
        self._turn = asyncio.Lock()
        """The right to take the devices next, granted in the order of the requests."""
        self._waiting = 0
        self._contended = asyncio.Event()
        self._freed = asyncio.Event()
        self._freed_at = -math.inf
        self._switch = asyncio.Lock()
        self._settled = True
        """False while the states on the devices are exchanged, and after an exchange that was interrupted."""
        self._switch_seconds = 0.0
        """Duration of the fastest exchange of states so far. Slower ones may have waited for a process to start."""

    def register(self, role: str, resident: Resident) -> None:
        """Register the states of a role, which must be on the devices, as after a model was loaded."""
        self._check(role)
        self._residents[role] = resident
        self._loaded.add(role)

    def forget(self, role: str) -> None:
        """Unregister the states of a role whose processes have ended. They left the devices with the processes."""
        self._check(role)
        self._residents.pop(role, None)
        self._loaded.discard(role)

    @property
    def contended(self) -> bool:
        """True while a task waits for the lock."""
        return self._contended.is_set()

    async def wait_contended(self) -> None:
        """Wait until a task waits for the lock."""
        await self._contended.wait()

    async def quiet(self, role: str) -> None:
        """Wait until the devices have been free for at least as long as an exchange of states takes.

        A role that calls this before `hold` does not take the devices in the short pauses between other roles that use
        them one after another. Returns at once if the states of ``role`` are on the free devices and no task waits.
        """
        with waiting(self.name, f"the devices, as {role}"):
            while self.holder != role:
                left = self._freed_at + self._switch_seconds - asyncio.get_running_loop().time()
                if self.holder is not None:
                    self._freed.clear()
                    await self._freed.wait()
                elif not self._waiting and (left <= 0 or role in self._loaded):
                    return
                else:
                    await asyncio.sleep(max(0, left))

    @asynccontextmanager
    async def hold(self, role: str) -> AsyncIterator[None]:
        """Hold the devices as ``role``, with its states loaded."""
        with waiting(self.name, f"the devices, as {role}"):
            await self._acquire(role)
        try:
            with holding(self.name, f"as {role}"):
                await self._make_resident(role)
                yield
        finally:
            self._holders -= 1
            if self._holders == 0:
                self.holder = None
                self._freed_at = asyncio.get_running_loop().time()
                self._freed.set()

    async def _acquire(self, role: str) -> None:
        self._check(role)
        if not self._waiting and self.holder in (None, role):
            self._grant(role)
            return
        self._waiting += 1
        self._contended.set()
        try:
            async with self._turn:
                while self.holder not in (None, role):
                    self._freed.clear()
                    await self._freed.wait()
                self._grant(role)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._contended.clear()

    def _check(self, role: str) -> None:
        if role not in self.roles:
            raise KeyError(f"role {role!r} does not share this lock; it belongs to {sorted(self.roles)}")

    def _grant(self, role: str) -> None:
        self.holder = role
        self._holders += 1

    async def _make_resident(self, role: str) -> None:
        """Offload the states of all other roles and load those of ``role``.

        After an exchange that was interrupted, states that were already moved may be moved again.
        """
        async with AsyncExitStack() as switched:
            with waiting(f"{self.name}/states", "states that are being moved"):
                await switched.enter_async_context(self._switch)
            switched.enter_context(holding(f"{self.name}/states", f"loading {role}"))
            wanted = {role} & self._residents.keys()
            if self._settled and self._loaded == wanted:
                return
            # An interrupted exchange may have moved part of any role's states.
            known = self._loaded if self._settled else set(self._residents)
            missing = wanted - (self._loaded if self._settled else set())
            self._settled = False
            started = asyncio.get_running_loop().time()
            for other in sorted(known - {role}):
                await self._residents[other].offload_states()
                self._loaded.discard(other)
            if missing:
                await self._residents[role].load_states()
                self._loaded.add(role)
            self._settled = True
            elapsed = asyncio.get_running_loop().time() - started
            self._switch_seconds = min(elapsed, self._switch_seconds or elapsed)


def build_device_locks(devices_of_role: Mapping[str, Iterable[int]]) -> dict[str, DeviceLock]:
    """Return the lock of each role: roles that share a device, directly or through a third role, share one lock."""
    clusters: list[tuple[set[str], set[int]]] = []
    for role, devices in devices_of_role.items():
        roles, union = {role}, set(devices)
        for other in [cluster for cluster in clusters if cluster[1] & union]:
            clusters.remove(other)
            roles |= other[0]
            union |= other[1]
        clusters.append((roles, union))
    locks: dict[str, DeviceLock] = {}
    for roles, _ in clusters:
        lock = DeviceLock(roles)
        locks.update(dict.fromkeys(roles, lock))
    return locks
