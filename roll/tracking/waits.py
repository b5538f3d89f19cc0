"""Waits and holdings: the edges of the wait-for graph that `roll doctor` reads.

An actor does one thing after another (a stage, the checkpointer), or several at once that do not wait for each other's
resources (a group's requests). `acting` names the actor of the code inside it; tasks that start there belong to the
same actor. `part` is for concurrent work that does compete, and `apart` for work that outlives the actor. Code that can
wait says so with `waiting`. Code that holds something that others may wait for says so with `holding`. Outside `acting`
both do nothing, so the code can be used without a board. The names shared by waits and the doctor's graph are below.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

START = "start"
"""The code that starts the roles and publishes the first version."""
TRAIN = "stage/train"
PUBLISHER = "stage/param_update"
"""The stage that brings weights to the engines."""
ENGINE = "engine"
"""The task that looks after the engine's replicas."""
GROUP = "group/"
"""Prefix of a group's number: its rollout."""
WORKER = "worker/"
"""Prefix of a worker's name: a process that is called."""
SCHEDULER = "scheduler"
"""The wait for a batch."""
REPLICAS = "replicas"
"""Any engine that may take a request."""
REWARD_MODEL = "rewards."
"""Prefix of the name of a reward that has processes on devices: any of these."""
PUBLICATION_MEMORY = "publication memory"
PUBLISHING = "the publication under way"
"""Holder of publication memory while a weight update is under way."""


@dataclass(frozen=True)
class Wait:
    """An edge from an actor to what it waits for, or to what it holds."""

    who: str
    on: str
    """An actor, or something that actors hold or serve, such as ``devices/...`` or ``worker/...``."""
    what: str
    """Description for a user."""
    since: float


class WaitBoard:
    """All present waits and holdings of a process. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._waits: dict[int, Wait] = {}
        self._holdings: dict[int, Wait] = {}

    def waits(self) -> list[Wait]:
        """Return the waits in the order in which they began."""
        return list(self._waits.values())

    def holdings(self) -> list[Wait]:
        """Return the holdings in the order in which they began."""
        return list(self._holdings.values())

    def wait(self, who: str, on: str, what: str) -> AbstractContextManager[None]:
        """List a wait of an actor while this is open."""
        return self._listed(self._waits, who, on, what)

    def hold(self, who: str, on: str, what: str) -> AbstractContextManager[None]:
        """List a holding of an actor while this is open."""
        return self._listed(self._holdings, who, on, what)

    @contextmanager
    def _listed(self, entries: dict[int, Wait], who: str, on: str, what: str) -> Iterator[None]:
        number = next(self._numbers)
        entries[number] = Wait(who, on, what, self._clock())
        try:
            yield
        finally:
            del entries[number]


@dataclass(frozen=True)
class _Actor:
    name: str
    board: WaitBoard


_ACTING: ContextVar[_Actor | None] = ContextVar("acting", default=None)


def acting(name: str, board: WaitBoard) -> AbstractContextManager[None]:
    """Attribute the waits of this block, and of tasks started in it, to an actor."""
    return _as_actor(_Actor(name, board))


@contextmanager
def part(name: str) -> Iterator[None]:
    """Make this block an actor of its own, which the present actor waits for.

    It is for one of several things that the present actor does at the same time.
    """
    own = name if (whole := _ACTING.get()) is None else f"{whole.name}/{name}"
    with waiting(own, "a part of it"), apart(own):
        yield


def apart(name: str) -> AbstractContextManager[None]:
    """Make this block, and tasks started in it, an actor of its own, which the present actor does not wait for."""
    actor = _ACTING.get()
    return nullcontext() if actor is None else acting(name, actor.board)


def unobserved() -> AbstractContextManager[None]:
    """Ignore the waits of this block, such as those of a task that always waits for the next event."""
    return _as_actor(None)


def waiting(on: str, what: str) -> AbstractContextManager[None]:
    """List a wait of the present actor while this is open."""
    actor = _ACTING.get()
    return nullcontext() if actor is None else actor.board.wait(actor.name, on, what)


def holding(on: str, what: str) -> AbstractContextManager[None]:
    """List a holding of the present actor while this is open."""
    actor = _ACTING.get()
    return nullcontext() if actor is None else actor.board.hold(actor.name, on, what)


@contextmanager
def _as_actor(actor: _Actor | None) -> Iterator[None]:
    token = _ACTING.set(actor)
    try:
        yield
    finally:
        _ACTING.reset(token)
