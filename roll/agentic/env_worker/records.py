"""Records that the driver and an environment worker exchange: commands one way, answers the other.

A failure is a record, not an exception: thousands of episodes share one call, and one failure must not fail the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium

from roll.agentic.episode import EnvironmentFailed, Observation

EnvFactory = Callable[[str, Mapping[str, Any]], gymnasium.Env]
"""Factory of environments: (env_type, env_config) -> a new environment."""

Observe = Callable[..., Observation]
"""Function that makes an observation from (text, info, *, reward, terminated, truncated, frame).

After a reset it is called with ``frame`` only. An exception means that the environment's answer is invalid.
"""

FailureKind = Literal["raised", "hung", "nonsense", "lost"]
"""``lost``: the process that held the environment is gone."""


@dataclass(frozen=True)
class EnvSpec:
    """Environments of one tag: how to make them, and time limits of their calls."""

    env_type: str
    env_config: Mapping[str, Any] = field(default_factory=dict)
    reset_timeout_seconds: float = 60.0
    """Limit of a reset, and of making the environment before its first one."""
    step_timeout_seconds: float = 60.0


@dataclass(frozen=True)
class HostSettings:
    """Limits of one worker process. A process that exceeds one is replaced once its episodes have ended."""

    close_timeout_seconds: float = 5.0
    """Limit of an environment's `close`. Only the shutdown waits for it."""
    max_stuck_threads: int = 8
    """Number of threads in calls that are past their deadline and may never return."""
    max_open_files: int = 1024
    """Open files beyond those at the start and those that `files_per_environment` allows.

    This limit and the following ones find environments that leak; Linux only.
    """
    files_per_environment: int = 32
    """Files that a living environment may hold; one with a tool server has pipes and sockets."""
    max_extra_threads: int = 256
    """Threads beyond those at the start, those that `threads_per_environment` allows, and those of running calls."""
    threads_per_environment: int = 8
    max_memory_growth_bytes: int = 4 * 2**30
    """Growth of the resident memory."""
    leak_check_seconds: float = 1.0
    """Interval between two checks of these limits."""
    thread_stack_bytes: int = 2**20
    """Stack size of the threads that run calls."""


@dataclass(frozen=True)
class EnvFailure:
    """Reason why an episode cannot continue."""

    tag: str
    seed: int
    turn: int | None
    """The turn whose action was being carried out, from 0; None: at the reset."""
    kind: FailureKind
    cause: str
    proven: bool = False
    """True if no other episode was in a ``lost`` process. Otherwise another one may have caused the loss."""

    @property
    def may_be_innocent(self) -> bool:
        """True if the environment may not be the cause, so that the episode can simply be started again."""
        return self.kind == "lost" and not self.proven

    def __str__(self) -> str:
        when = "at the reset" if self.turn is None else f"turn {self.turn}"
        return f"environment `{self.tag}`, seed {self.seed}, {when}: {self.cause}"


class SessionFailed(EnvironmentFailed):
    """An `EnvironmentFailed` whose failure can be counted."""

    def __init__(self, failure: EnvFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class EnvPoolClosed(RuntimeError):
    """The pool was shut down or cannot start its processes, so there are no environments. A retry does not help."""


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
    """End a session. There is no answer."""

    session: int


Command = Reset | Step | Close


@dataclass(frozen=True)
class Answer:
    """Outcome of a `Reset` or a `Step`."""

    session: int
    outcome: Observation | EnvFailure


@dataclass(frozen=True)
class Report:
    """News of a worker since its last report."""

    answers: list[Answer]
    retire_because: str | None
    """Reason why the process should take no new sessions; None: it may."""
    counts: dict[str, int]
    """Totals of the process: environments ``made``, ``reused``, ``closed``, ``close_failures``."""
