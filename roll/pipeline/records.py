"""The records of the steps, and the validations that run beside the stages.

A validation on replicas that keep its version is a task of the run, not a part of a stage: training, newer weights and
rollouts go on. There is one at a time. The next version that is due reaches the other replicas and waits there for it,
and newer ones wait behind that: a second version to keep would need another buffer and more replicas, and no validation
is left out. An error in it ends the run.

The result belongs to the record of the version's step, and records are written in the order of the steps, once each. So
they wait here for the validation before them, and the checkpoints of their steps are completed afterwards: a resumed
run goes back to a step before the validation, and has lost no result. What the run has measured so far is written when
it ends early, too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from roll.engines.pool import InferencePool
from roll.pipeline.checkpoints import Checkpointer
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.rollouts import ValidationResult, Validator
from roll.tracking.waits import VALIDATION, waiting

Record = tuple[int, dict[str, float]]
"""Step (0: before the first one) and metrics."""


@dataclass(eq=False)
class StepRecords:
    """The records that are to be written, and the validations they wait for, in order."""

    recorder: RunRecorder
    checkpoints: Checkpointer
    pool: InferencePool
    validator: Validator | None
    _queue: asyncio.Queue[int | Record] = field(default_factory=asyncio.Queue, init=False)
    """Records, and versions to validate, each before the record of its step."""
    _validated: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ended: ValidationResult | None = field(default=None, init=False)
    """The last validation, until the record of its step is written."""

    def __post_init__(self) -> None:
        self._validated.set()

    def validate(self, version: int) -> None:
        """Begin a validation of the newest version. The caller has awaited `validated`."""
        self.pool.pin()
        self._validated.clear()
        self._queue.put_nowait(version)

    async def validated(self) -> None:
        """Wait until no validation is under way and all replicas have the newest version."""
        with waiting(VALIDATION, "the end of the validation before"):
            await self._validated.wait()

    def put(self, step: int, metrics: dict[str, float]) -> None:
        """Take the record of the next step."""
        self._queue.put_nowait((step, metrics))

    async def written(self) -> None:
        """Wait until all records are written, and the checkpoint of the last step."""
        with waiting(VALIDATION, "the records of all steps"):
            await self._queue.join()

    async def run(self) -> None:
        """Validate, write records and complete checkpoints, one after another. Runs until cancelled."""
        try:
            while True:
                item = await self._queue.get()
                if isinstance(item, int):
                    await self._validate(item)
                else:
                    self._write(item)
                    step, _ = item
                    if step and self.checkpoints.due(step):
                        await self.recorder.sync()
                        await self.checkpoints.step_recorded(step)
                self._queue.task_done()
        finally:
            while not self._queue.empty():
                left = self._queue.get_nowait()
                if not isinstance(left, int):
                    self._write(left)

    def _write(self, record: Record) -> None:
        step, metrics = record
        if self._ended is not None and self._ended.version == step:
            metrics, self._ended = metrics | self._ended.metrics, None
        self.recorder.log(metrics, step)

    async def _validate(self, version: int) -> None:
        if self.validator is None:
            raise RuntimeError(f"version {version} cannot be validated: this run has no validation")
        await self.pool.ready_to_validate()
        with self.recorder.validating(version):
            result = await self.validator.run(version)
        await self.pool.unpin()
        self._validated.set()
        await self.recorder.validation(result)
        self.recorder.show_validation(result)
        self._ended = result
