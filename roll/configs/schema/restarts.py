"""Restarts after a failure that the run could not recover from."""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.ranges import Range
from roll.configs.schema.options import COUNT, NOT_NEGATIVE, option


@dataclass
class RestartsConfig:
    """Automatic restarts of a failed run from its newest checkpoint. See `docs/checkpoints.md`."""

    max_in_a_row: int = option(
        0,
        help="Restarts in a row, without a new checkpoint in between, before the run stays failed; 0: it stays failed "
        "at once. Needs `save_steps`.",
        range=NOT_NEGATIVE,
    )
    synchronous_after: int | None = option(
        None,
        help="After so many failures in a row the run goes on with `async_generation_ratio: 0` to its last step, and "
        "says so. Default: never.",
        range=COUNT,
    )
    delay_seconds: float = option(5.0, help="Wait before a restart.", range=Range(at_least=0, at_most=300))
