"""Automatic restarts of a failed run: when it restarts, and with which configuration.

Failures count as consecutive if there is no new checkpoint between them. A long run may therefore fail now and then as
long as it makes progress, and a run without progress ends. Interrupted runs do not restart, nor does a run that was
refused before its first attempt. A later attempt that is refused counts as a failure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll.configs import derived
from roll.configs.schema import PipelineConfig
from roll.configs.wording import count
from roll.pipeline.checkpoints import newest_whole
from roll.tracking.run_directory import RunDirectory


@dataclass(frozen=True)
class Again:
    """The next attempt."""

    config: PipelineConfig
    delay_seconds: float
    words: str
    """Message to the user."""


class Restarts:
    """Counter of the consecutive failures of one run."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._newest_checkpoint = 0

    def after_failure(self, config: PipelineConfig, run: RunDirectory) -> Again | None:
        """Return the next attempt after ``config`` failed in ``run``; None if the run stays failed."""
        checkpoint, _ = newest_whole(run.checkpoints)
        newest = 0 if checkpoint is None else checkpoint.step
        if newest > self._newest_checkpoint:
            self._in_a_row = 0
        self._newest_checkpoint = newest
        self._in_a_row += 1
        settings = config.restarts
        # A run that failed after its last step would find nothing left to do, which must not count as success.
        if self._in_a_row > settings.max_in_a_row or newest >= config.max_steps:
            return None
        words = (
            f"the run begins again after step {newest} in {settings.delay_seconds:g} s "
            f"(restart {self._in_a_row} of {settings.max_in_a_row} without a new checkpoint)"
        )
        again = replace(config, resume_from_checkpoint=str(run.root))
        after = settings.synchronous_after
        if after is not None and self._in_a_row >= after:
            again = derived.synchronous(again)
            words += (
                f"; after {count(after, 'failure')} in a row it goes on in synchronous mode: async_generation_ratio "
                f"{config.async_generation_ratio:g} -> 0 for its remaining steps"
            )
        return Again(again, settings.delay_seconds, words)
