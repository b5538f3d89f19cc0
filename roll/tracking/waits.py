"""Waits and holdings of actors: the edges of the wait-for graph that `roll doctor` reads.

An actor does one thing after another (a stage, the checkpointer), or several things at once that do not wait for each
other's resources (the requests of a group). `acting` sets the actor for a block of code and the tasks started in it.
`part` is for concurrent work that does compete for resources, and `apart` for work that outlives the actor. Outside of
`acting`, `waiting` and `holding` do nothing, so the code can be used without a board.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice

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
        self._waits: dict[int, Wait] = {}
        self._of_groups: dict[int, Wait] = {}
        self._holdings: dict[int, Wait] = {}
        self._alike: Counter[tuple[str, str, str]] = Counter()
        """(Group, on, what) -> its current waits."""
        self._groups_by_wait: Counter[str] = Counter()

    def waits(self, groups: int | None = None) -> list[Wait]:
        """Return the current waits without duplicates, oldest first, those of groups last.

        ``groups``: maximum number of waits of groups; None: all.
        """
        return [*_distinct(self._waits.values()), *islice(_distinct(self._of_groups.values()), groups)]

    def groups_by_wait(self) -> dict[str, int]:
        """Return the number of groups by what they wait for."""
        return dict(self._groups_by_wait)

    def holdings(self) -> list[Wait]:
        """Return the current holdings, oldest first."""
        return list(self._holdings.values())

    @contextmanager
    def wait(self, who: str, on: str, what: str) -> Iterator[None]:
        """List a wait of an actor during a block."""
        if not who.startswith(GROUP):
            with self._listed(self._waits, who, on, what):
                yield
            return
        alike = who, on, what
        self._alike[alike] += 1
        if self._alike[alike] == 1:
            self._groups_by_wait[on] += 1
        try:
            with self._listed(self._of_groups, who, on, what):
                yield
        finally:
            self._alike[alike] -= 1
            if not self._alike[alike]:
                del self._alike[alike]
                self._groups_by_wait[on] -= 1
                if not self._groups_by_wait[on]:
                    del self._groups_by_wait[on]

    def hold(self, who: str, on: str, what: str) -> AbstractContextManager[None]:
        """List a holding of an actor during a block."""
        return self._listed(self._holdings, who, on, what)

    @contextmanager
    def _listed(self, entries: dict[int, Wait], who: str, on: str, what: str) -> Iterator[None]:
        entry = Wait(who, on, what, self._clock())
        entries[id(entry)] = entry
        try:
            yield
        finally:
            del entries[id(entry)]


def _distinct(waits: Iterable[Wait]) -> Iterator[Wait]:
    seen: set[tuple[str, str, str]] = set()
    for wait in waits:
        edge = wait.who, wait.on, wait.what
        if edge not in seen:
            seen.add(edge)
            yield wait


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
