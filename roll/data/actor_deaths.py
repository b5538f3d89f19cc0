"""The errors of Ray that mean that an actor's process is gone.

Ray has no common class for them: a process killed by its memory monitor raises `OutOfMemoryError`, which is no
`RayActorError`. Rewards, environments and workers all need this list but do not import each other, so it is kept here.
"""

from __future__ import annotations

import re

from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

ACTOR_GONE = (
    RayActorError,
    OutOfMemoryError,
    NodeDiedError,
    WorkerCrashedError,
    LocalRayletDiedError,
    ActorUnschedulableError,
    ActorPlacementGroupRemoved,
    RuntimeEnvSetupError,
)
"""Catch these after `RayTaskError`: the error of a living actor is also an instance of its cause's class. An actor that
Ray cannot reach (`ActorUnavailableError`) is included: callers replace it."""


def is_gone_for_good(error: BaseException) -> bool:
    """Return True if the actor is dead and calling it again is useless."""
    return isinstance(error, ACTOR_GONE) and not isinstance(error, ActorUnavailableError | RayTaskError)


def memory_death(error: BaseException) -> str | None:
    """Return a short message for a process that Ray's memory monitor killed; None for any other error.

    Ray's own text is long and ends with general advice.
    """
    if not isinstance(error, OutOfMemoryError):
        return None
    figures = re.search(r"was (\S+ used / \S+) limit", str(error))
    used = f" ({figures[1]})" if figures else ""
    return f"it was killed because its node ran low on memory{used}"
