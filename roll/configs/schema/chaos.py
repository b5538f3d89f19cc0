"""Fault injection, for tests of recovery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.configs.schema.options import COUNT, NOT_NEGATIVE, POSITIVE, option

PUBLICATION_CHAOS = ("delay_publication", "corrupt_bucket")
"""Kinds of faults that affect a weight update, not a process."""


@dataclass
class ChaosEvent:
    """A fault that is injected once in the life of a run."""

    kind: Literal["kill", "freeze", "fill_disk", "delay_publication", "corrupt_bucket"] = option(
        "kill",
        help="`kill` (SIGKILL), `freeze` (SIGSTOP) or `fill_disk` (no file grows beyond 16 KiB any more) a process; "
        "`delay_publication` or `corrupt_bucket` (one byte changes on the way) for the weights of a version.",
    )
    at_step: int = option(
        1, help="Once so many training steps are over; of a publication: the version of this number.", range=COUNT
    )
    role: str = option(
        "actor_train",
        help="Whose process (`kill`, `freeze`, `fill_disk`): `driver`, `actor_train`, `actor_infer`, `reference`, "
        "`critic`, or `rewards.<name>` of a reward model.",
    )
    rank: int = option(0, help="Which of its processes.", range=NOT_NEGATIVE)
    seconds: float | None = option(
        None, help="How long a publication is held back, or a process stands still. `freeze` without: for good.",
        range=POSITIVE,
    )


@dataclass
class ChaosConfig:
    """Fault injection, for tests of recovery only. See `docs/faults.md`."""

    enabled: bool = option(False, help="Has to be `true` for events to be accepted.")
    events: list[ChaosEvent] = option(factory=list, help="What happens, each once, however often the run is resumed.")
