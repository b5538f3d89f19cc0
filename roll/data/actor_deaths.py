"""Which of Ray's errors say that the process of an actor is gone.

Ray has no class for them in common: a process that its memory monitor killed raises `OutOfMemoryError`, which is no
`RayActorError`. Rewards, environments and workers all need to know, and do not know each other; hence it stands here.
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
"""To be caught after `RayTaskError`: the error of a living actor is an instance of its own cause's class too. An actor
that Ray cannot reach (`ActorUnavailableError`) counts: whoever calls it does so to replace it."""


def is_gone_for_good(error: BaseException) -> bool:
    """Whether asking again is in vain."""
    return isinstance(error, ACTOR_GONE) and not isinstance(error, ActorUnavailableError | RayTaskError)


def memory_death(error: BaseException) -> str | None:
    """What to say of a process that Ray's memory monitor killed, whose long text ends with general advice; None for
    any other error."""
    if not isinstance(error, OutOfMemoryError):
        return None
    figures = re.search(r"was (\S+ used / \S+) limit", str(error))
    used = f" ({figures[1]})" if figures else ""
    return f"it was killed because its node ran low on memory{used}"
