"""When a run that failed begins again by itself, and with which configuration.

A failure in a row is one without a new checkpoint since the one before: a long run may fail now and then for as long as
it gets on, and one that gets nowhere ends. Interrupted runs do not begin again, nor does a run that was refused before
its first attempt; a later attempt that is refused counts as a failure.
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
    """A further attempt."""

    config: PipelineConfig
    delay_seconds: float
    words: str
    """For the owner of the run."""


class Restarts:
    """Counts the failures of one run."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._newest_checkpoint = 0

    def after_failure(self, config: PipelineConfig, run: RunDirectory) -> Again | None:
        """How the run goes on; None: it stays failed. ``config`` is that of the attempt which failed in ``run``."""
        checkpoint, _ = newest_whole(run.checkpoints)
        newest = 0 if checkpoint is None else checkpoint.step
        if newest > self._newest_checkpoint:
            self._in_a_row = 0
        self._newest_checkpoint = newest
        self._in_a_row += 1
        settings = config.restarts
        # A run that failed after its last step would find nothing left to do, which is no success.
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
