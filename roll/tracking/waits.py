"""Who waits for what, and who has it: the edges of the wait-for graph that `roll doctor` reads.

An actor is whoever does one thing after another (a stage, the checkpointer), or several at once that take nothing from
each other (a group's requests). `acting` says who the code below it works for; tasks that it starts belong to the same
actor. `part` is for several things at once that do, `apart` for what goes on when it has ended. Whatever can wait says
so with `waiting`, and what others may have to wait for is said with `holding`. Outside `acting` both do nothing, so
parts can be used without a board. Names that both a wait and the doctor's graph know are below.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

START = "start"
"""Whoever starts the roles and publishes the first version."""
TRAIN = "stage/train"
PUBLISHER = "stage/param_update"
"""The stage that brings weights to the engines."""
ENGINE = "engine"
"""Whoever looks after the engine's replicas."""
GROUP = "group/"
"""Before a group's number: its rollout."""
WORKER = "worker/"
"""Before a worker's name: a process that is called."""
SCHEDULER = "scheduler"
"""A batch: what a wait for the scheduler is for."""
REPLICAS = "replicas"
"""Any engine that may take a request."""
REWARD_MODEL = "rewards."
"""Before the name of a reward that has processes on devices: any of these."""
PUBLICATION_MEMORY = "publication memory"
PUBLISHING = "the publication under way"
"""Holds publication memory."""


@dataclass(frozen=True)
class Wait:
    """An edge from an actor to what it waits for, or to what it has."""

    who: str
    on: str
    """An actor, or something that actors have or answer for, such as ``devices/...`` or ``worker/...``."""
    what: str
    """In words."""
    since: float


class WaitBoard:
    """All waits and holdings of a process as of now. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._waits: dict[int, Wait] = {}
        self._holdings: dict[int, Wait] = {}

    def waits(self) -> list[Wait]:
        """In the order in which they began."""
        return list(self._waits.values())

    def holdings(self) -> list[Wait]:
        """In the order in which they began."""
        return list(self._holdings.values())

    @contextmanager
    def _listed(self, entries: dict[int, Wait], who: str, on: str, what: str) -> Iterator[None]:
        number = next(self._numbers)
        entries[number] = Wait(who, on, what, self._clock())
        try:
            yield
        finally:
            del entries[number]

    @contextmanager
    def wait(self, who: str, on: str, what: str) -> Iterator[None]:
        """An actor waits while this is open."""
        with self._listed(self._waits, who, on, what):
            yield

    @contextmanager
    def hold(self, who: str, on: str, what: str) -> Iterator[None]:
        """An actor has something while this is open."""
        with self._listed(self._holdings, who, on, what):
            yield


@dataclass(frozen=True)
class _Actor:
    name: str
    board: WaitBoard


_ACTING: ContextVar[_Actor | None] = ContextVar("acting", default=None)


@contextmanager
def acting(name: str, board: WaitBoard) -> Iterator[None]:
    """What is done here, and in tasks begun here, is done by this actor."""
    token = _ACTING.set(_Actor(name, board))
    try:
        yield
    finally:
        _ACTING.reset(token)


@contextmanager
def part(name: str) -> Iterator[None]:
    """One of several things that the present actor does at the same time: an actor of its own, which it waits for."""
    whole = _ACTING.get()
    if whole is None:
        yield
        return
    own = f"{whole.name}/{name}"
    with whole.board.wait(whole.name, own, "a part of it"), acting(own, whole.board):
        yield


@contextmanager
def apart(name: str) -> Iterator[None]:
    """Tasks begun here go on by themselves: an actor of its own, which the present one does not wait for."""
    whole = _ACTING.get()
    if whole is None:
        yield
        return
    with acting(name, whole.board):
        yield


@contextmanager
def unobserved() -> Iterator[None]:
    """Waits in here mean nothing: somebody listens all the time."""
    token = _ACTING.set(None)
    try:
        yield
    finally:
        _ACTING.reset(token)


@contextmanager
def waiting(on: str, what: str) -> Iterator[None]:
    """The present actor waits while this is open."""
    actor = _ACTING.get()
    if actor is None:
        yield
        return
    with actor.board.wait(actor.name, on, what):
        yield


@contextmanager
def holding(on: str, what: str) -> Iterator[None]:
    """The present actor has something while this is open."""
    actor = _ACTING.get()
    if actor is None:
        yield
        return
    with actor.board.hold(actor.name, on, what):
        yield
