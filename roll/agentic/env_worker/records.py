"""What crosses the border between the driver and an environment worker: commands one way, answers the other.

A failure is a record, not an exception: thousands of episodes share one call, and one that failed must not fail it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium

from roll.agentic.episode import EnvironmentFailed, Observation

EnvFactory = Callable[[str, Mapping[str, Any]], gymnasium.Env]
"""(env_type, env_config) -> a new environment."""

Observe = Callable[..., Observation]
"""(text, info, *, reward, terminated, truncated, frame) -> what the policy gets to see; after a reset it is called with
``frame`` only. Whatever it raises says that the environment answered nonsense."""

FailureKind = Literal["raised", "hung", "nonsense", "lost"]
"""``lost``: the process that held the environment is gone."""


@dataclass(frozen=True)
class EnvSpec:
    """How the environments of a tag are made, and how long their calls may take."""

    env_type: str
    env_config: Mapping[str, Any] = field(default_factory=dict)
    reset_timeout_seconds: float = 60.0
    """Of a reset, and of making the environment before its first one."""
    step_timeout_seconds: float = 60.0


@dataclass(frozen=True)
class HostSettings:
    """Limits of one worker process. Where one is passed the process is replaced once its episodes have ended."""

    close_timeout_seconds: float = 5.0
    """For an environment's `close`, which nobody waits for except at the very end."""
    max_stuck_threads: int = 8
    """Threads in calls that are past their deadline and will perhaps never return."""
    max_open_files: int = 1024
    """More than when the process began and than `files_per_environment` explains. This and what follows finds
    environments that leak; Linux only."""
    files_per_environment: int = 32
    """What a living environment may hold; one with a tool server has pipes and sockets."""
    max_extra_threads: int = 256
    """More than when the process began and than `threads_per_environment` explains, those of running calls not
    counted."""
    threads_per_environment: int = 8
    max_memory_growth_bytes: int = 4 * 2**30
    """Resident."""
    leak_check_seconds: float = 1.0
    """Between two looks at these."""
    thread_stack_bytes: int = 2**20
    """Of the threads that run calls."""


@dataclass(frozen=True)
class EnvFailure:
    """Why an episode cannot go on."""

    tag: str
    seed: int
    turn: int | None
    """The turn whose action was being carried out, from 0; None: at the reset."""
    kind: FailureKind
    cause: str
    proven: bool = False
    """Of a ``lost`` one: no other episode was in the process. Else it may have been another one's doing."""

    @property
    def may_be_innocent(self) -> bool:
        """Whether the environment may have had no part in it, so that the episode may simply be begun again."""
        return self.kind == "lost" and not self.proven

    def __str__(self) -> str:
        when = "at the reset" if self.turn is None else f"turn {self.turn}"
        return f"environment `{self.tag}`, seed {self.seed}, {when}: {self.cause}"


class SessionFailed(EnvironmentFailed):
    """An `EnvironmentFailed` that can be counted."""

    def __init__(self, failure: EnvFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class EnvPoolClosed(RuntimeError):
    """No environments any more: the pool was shut down, or it cannot start its processes. No retry cures that."""


@dataclass(frozen=True)
class Reset:
    """Begin an episode in a session; the first one also opens the session."""

    session: int
    tag: str
    seed: int
    frames: bool


@dataclass(frozen=True)
class Step:
    """Carry out an action."""

    session: int
    text: str


@dataclass(frozen=True)
class Close:
    """The session has ended. There is no answer."""

    session: int


Command = Reset | Step | Close


@dataclass(frozen=True)
class Answer:
    """How a `Reset` or a `Step` ended."""

    session: int
    outcome: Observation | EnvFailure


@dataclass(frozen=True)
class Report:
    """What a worker has to say since its last report."""

    answers: list[Answer]
    retire_because: str | None
    """Why the process should take no new sessions; None: it may."""
    counts: dict[str, int]
    """Totals of the process: environments ``made``, ``reused``, ``closed``, ``close_failures``."""
