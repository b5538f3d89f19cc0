"""Waits and holdings of actors: the edges of the wait-for graph that `roll doctor` reads.

An actor does one thing after another (a stage, the checkpointer), or several things at once that do not wait for each
other's resources (the requests of a group). `acting` sets the actor for a block of code and the tasks started in it.
`part` is for concurrent work that does compete for resources, and `apart` for work that outlives the actor. Outside of
`acting`, `waiting` and `holding` do nothing, so the code can be used without a board.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

START = "start"  # the code that starts the roles and publishes the first version
TRAIN = "stage/train"
CRITIC = "stage/critic"
PUBLISHER = "stage/param_update"  # the stage that sends weights to the engines
ENGINE = "engine"  # the task that manages the engine's replicas
LOGP = "actor_logp"  # the task that computes log-probabilities beside the trainer; may hold a weight buffer
GROUP = "group/"  # + number of a group: its rollout
WORKER = "worker/"  # + name of a worker: a call to its process
SCHEDULER = "scheduler"  # the wait for a batch
REPLICAS = "replicas"  # any engine replica that may take a request
REWARD_MODEL = "rewards."  # + name of a reward model: any of its processes
PUBLICATION_MEMORY = "publication memory"  # the weight buffers
STAGE_VALIDATION = "a validation"  # holds a weight buffer while the publisher validates its version
VALIDATION = "validation"  # the task that validates beside the stages; holds a weight buffer meanwhile
PUBLISHING = "the publication under way"  # holds a weight buffer during a weight update


Key = TypeVar("Key")


@dataclass(frozen=True)
class Wait:
    """An edge of the graph: an actor waits for something, or holds it."""

    who: str
    """Name of the actor."""
    on: str
    """The thing waited for or held: another actor, or a resource such as ``devices/...`` or ``worker/...``."""
    what: str
    """Description for users."""
    since: float


class WaitBoard:
    """All current waits and holdings of a process. Use it in one event loop only.

    Tens of thousands of requests may wait at once, so what is read every second is counted as they come and go.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._waits: dict[_Listed, None] = {}
        self._of_groups: dict[_Listed, None] = {}
        self._holdings: dict[_Listed, None] = {}
        self._alike: dict[tuple[str, str, str], int] = {}
        """(Group, on, what) -> its current waits."""
        self._groups_by_wait: dict[str, int] = {}

    def waits(self, groups: int | None = None) -> list[Wait]:
        """Return the current waits without duplicates, oldest first, those of groups last.

        ``groups``: maximum number of waits of groups; None: all.
        """
        return [*_distinct(self._waits), *islice(_distinct(self._of_groups), groups)]

    def groups_by_wait(self) -> dict[str, int]:
        """Return the number of groups by what they wait for."""
        return dict(self._groups_by_wait)

    def holdings(self) -> list[Wait]:
        """Return the current holdings, oldest first."""
        return [holding.told() for holding in self._holdings]

    def wait(self, who: str, on: str, what: str) -> AbstractContextManager[None]:
        """List a wait of an actor during a block."""
        if who.startswith(GROUP):
            return _ListedOfGroup(self._of_groups, who, on, what, self._clock, self._count)
        return _Listed(self._waits, who, on, what, self._clock)

    def hold(self, who: str, on: str, what: str) -> AbstractContextManager[None]:
        """List a holding of an actor during a block."""
        return _Listed(self._holdings, who, on, what, self._clock)

    def _count(self, wait: _Listed, number: int) -> None:
        """Count a wait of a group that begins (1) or ends (-1)."""
        alike = _added(self._alike, (wait.who, wait.on, wait.what), number)
        if alike == (1 if number > 0 else 0):
            _added(self._groups_by_wait, wait.on, number)


def _added(counts: dict[Key, int], key: Key, number: int) -> int:
    """Add to a count, which is left out while it is 0, and return it."""
    count = counts.get(key, 0) + number
    if count:
        counts[key] = count
    else:
        del counts[key]
    return count


class _Listed(AbstractContextManager[None]):
    """An entry that is listed during a block. Each request and turn has some, so this is no generator and no `Wait`."""

    __slots__ = ("_clock", "_entries", "on", "since", "what", "who")

    def __init__(self, entries: dict[_Listed, None], who: str, on: str, what: str, clock: Callable[[], float]) -> None:
        self._entries, self.who, self.on, self.what, self._clock = entries, who, on, what, clock

    def __enter__(self) -> None:
        self.since = self._clock()
        self._entries[self] = None

    def __exit__(self, *failure: object) -> None:
        del self._entries[self]

    def told(self) -> Wait:
        """Return the entry as it is reported."""
        return Wait(self.who, self.on, self.what, self.since)


class _ListedOfGroup(_Listed):
    """An entry that is counted as well."""

    __slots__ = ("_count",)

    def __init__(
        self,
        entries: dict[_Listed, None],
        who: str,
        on: str,
        what: str,
        clock: Callable[[], float],
        count: Callable[[_Listed, int], None],
    ) -> None:
        super().__init__(entries, who, on, what, clock)
        self._count = count

    def __enter__(self) -> None:
        super().__enter__()
        self._count(self, 1)

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        self._count(self, -1)


def _distinct(waits: Iterable[_Listed]) -> Iterator[Wait]:
    seen: set[tuple[str, str, str]] = set()
    for wait in waits:
        edge = wait.who, wait.on, wait.what
        if edge not in seen:
            seen.add(edge)
            yield wait.told()


_ACTING: ContextVar[tuple[str, WaitBoard] | None] = ContextVar("acting", default=None)
"""Name and board of the current actor."""


@contextmanager
def _as_actor(actor: tuple[str, WaitBoard] | None) -> Iterator[None]:
    token = _ACTING.set(actor)
    try:
        yield
    finally:
        _ACTING.reset(token)


def acting(name: str, board: WaitBoard) -> AbstractContextManager[None]:
    """Attribute the waits of this block, and of tasks started in it, to an actor."""
    return _as_actor((name, board))


def unobserved() -> AbstractContextManager[None]:
    """Ignore the waits of this block, such as those of a task that always waits for the next event."""
    return _as_actor(None)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Make this block an actor of its own, for which the current actor waits."""
    own = name if (whole := _ACTING.get()) is None else f"{whole[0]}/{name}"
    with waiting(own, "a part of it"), apart(own):
        yield


def apart(name: str) -> AbstractContextManager[None]:
    """Make this block, and tasks started in it, an actor of its own, for which the current actor does not wait."""
    actor = _ACTING.get()
    return nullcontext() if actor is None else acting(name, actor[1])


def waiting(on: str, what: str) -> AbstractContextManager[None]:
    """List a wait of the current actor during a block."""
    if (actor := _ACTING.get()) is None:
        return nullcontext()
    name, board = actor
    return board.wait(name, on, what)


def holding(on: str, what: str) -> AbstractContextManager[None]:
    """List a holding of the current actor during a block."""
    if (actor := _ACTING.get()) is None:
        return nullcontext()
    name, board = actor
    return board.hold(name, on, what)
