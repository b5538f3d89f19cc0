"""Waits and holdings: the edges of the wait-for graph that `roll doctor` reads.

An actor does one thing after another (a stage, the checkpointer), or several at once that do not wait for each other's
resources (a group's requests). `acting` names the actor of the code inside it; tasks that start there belong to the
same actor. `part` is for concurrent work that does compete, and `apart` for work that outlives the actor. Outside
`acting`, `waiting` and `holding` do nothing, so the code can be used without a board.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

START = "start"  # the code that starts the roles and publishes the first version
TRAIN = "stage/train"
CRITIC = "stage/critic"
PUBLISHER = "stage/param_update"  # the stage that brings weights to the engines
ENGINE = "engine"  # the task that looks after the engine's replicas
LOGP = "actor_logp"  # the task that computes log-probabilities beside the trainer; may hold publication memory
GROUP = "group/"  # prefix of a group's number: its rollout
WORKER = "worker/"  # prefix of a worker's name: a process that is called
SCHEDULER = "scheduler"  # the wait for a batch
REPLICAS = "replicas"  # any engine that may take a request
REWARD_MODEL = "rewards."  # prefix of the name of a reward that has processes on devices: any of these
PUBLICATION_MEMORY = "publication memory"
STAGE_VALIDATION = "a validation"  # holder of publication memory while the publisher measures the version in it
VALIDATION = "validation"  # the task that validates beside the stages, and then holder of publication memory
PUBLISHING = "the publication under way"  # holder of publication memory while a weight update is under way


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
        entry = Wait(who, on, what, self._clock())
        entries[id(entry)] = entry
        try:
            yield
        finally:
            del entries[id(entry)]


_ACTING: ContextVar[tuple[str, WaitBoard] | None] = ContextVar("acting", default=None)
"""The present actor's name and board."""


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
    """Make this block an actor of its own, one of several that the present actor waits for."""
    own = name if (whole := _ACTING.get()) is None else f"{whole[0]}/{name}"
    with waiting(own, "a part of it"), apart(own):
        yield


def apart(name: str) -> AbstractContextManager[None]:
    """Make this block, and tasks started in it, an actor of its own, which the present actor does not wait for."""
    actor = _ACTING.get()
    return nullcontext() if actor is None else acting(name, actor[1])


def waiting(on: str, what: str) -> AbstractContextManager[None]:
    """List a wait of the present actor while this is open."""
    if (actor := _ACTING.get()) is None:
        return nullcontext()
    name, board = actor
    return board.wait(name, on, what)


def holding(on: str, what: str) -> AbstractContextManager[None]:
    """List a holding of the present actor while this is open."""
    if (actor := _ACTING.get()) is None:
        return nullcontext()
    name, board = actor
    return board.hold(name, on, what)
