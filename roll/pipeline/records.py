"""Records of steps, in order, and validations that run in parallel to the stages.

A validation on pinned replicas (which keep the validated version) is a task of the run rather than part of a stage:
training, weight updates and rollouts continue. Only one runs at a time. The next version to validate is loaded by the
other replicas and waits there; newer versions wait behind it. Pinning a second version would need another weight buffer
and more replicas, and no validation is skipped. An error in a validation ends the run.

The result of a validation is recorded with the step of its version. Records are written once each, in the order of
steps, so later records wait for it, and so does the completion of their checkpoints: a run that resumes earlier repeats
the validation and loses no result. If the run ends early, all waiting records are still written.
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
"""Step (0: the initial model) and its metrics."""


@dataclass(eq=False)
class StepRecords:
    """Queue of records to write and of validations to run, in order."""

    recorder: RunRecorder
    checkpoints: Checkpointer
    pool: InferencePool
    validator: Validator | None
    _queue: asyncio.Queue[int | Record] = field(default_factory=asyncio.Queue, init=False)
    """Records, and versions to validate. A version precedes the record of its step."""
    _validated: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ended: ValidationResult | None = field(default=None, init=False)
    """The last validation, until the record of its step is written."""

    def __post_init__(self) -> None:
        self._validated.set()

    def validate(self, version: int) -> None:
        """Queue a validation of the newest version, and pin the replicas that keep it. Await `validated` first."""
        self.pool.pin()
        self._validated.clear()
        self._queue.put_nowait(version)

    async def validated(self) -> None:
        """Wait until no validation is running and all replicas have the newest version."""
        with waiting(VALIDATION, "the end of the validation before"):
            await self._validated.wait()

    def put(self, step: int, metrics: dict[str, float]) -> None:
        """Queue the record of the next step."""
        self._queue.put_nowait((step, metrics))

    async def written(self) -> None:
        """Wait until all records are written and the checkpoint of the last step is complete."""
        with waiting(VALIDATION, "the records of all steps"):
            await self._queue.join()

    async def run(self) -> None:
        """Run validations, write records and complete checkpoints, in order, until cancelled."""
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
