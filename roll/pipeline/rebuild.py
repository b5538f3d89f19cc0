"""Restarts of the trainers in place: the first remedy for a dead trainer or a failed stage.

All processes that compute on batches (policy, critic, reference, teacher, `actor_logp`) are replaced, and resume from
the newest checkpoint. Engines, environments, reward workers and finished groups survive; the steps since the checkpoint
are repeated. This counts as one of the restarts that `restarts` allows. A second failure without a new checkpoint in
between, and every failure that new trainers cannot cure, ends the run, which may then restart as a whole.

No state of the failed attempt reaches the next one. Its tasks have ended with the stages, and their requests were
aborted in the engines. Its threads are joined, since one of them may still be renaming a checkpoint. The engines accept
no request until they have the weights of the new trainers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from roll.configs import derived
from roll.pipeline.algorithm import MismatchTooLarge, StalenessViolation
from roll.pipeline.chaos import Chaos
from roll.pipeline.journal import JournalKeeper
from roll.pipeline.preflight import Prepared
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.resume import Restarts, ResumePoint, look_again, take_out_of_the_way
from roll.pipeline.roles import Roles
from roll.pipeline.stage import Stage, StageState
from roll.pipeline.status import RunStalled, StatusKeeper
from roll.rollout.admission import TooManyDrops
from roll.rollout.scheduler import SourceExhausted, is_fatal
from roll.runtime.workers import CALL_ERRORS
from roll.tracking.summary import describe_error
from roll.tracking.waits import ENGINE, START, acting, waiting
from roll.weights.publisher import WEIGHT_BACKENDS

Result = TypeVar("Result")
INCURABLE = (RunStalled, StalenessViolation, MismatchTooLarge, TooManyDrops, SourceExhausted)
"""Failures of stages that new trainers would not cure."""


class TrainerRestarts:
    """Restarts failed trainers, and owns the task that supervises the engines, which survives these restarts."""

    def __init__(
        self,
        prepared: Prepared,
        recorder: RunRecorder,
        roles: Roles,
        journal: JournalKeeper | None,
        status: StatusKeeper,
        chaos: Chaos,
        restarts: Restarts,
    ) -> None:
        self._prepared, self._config = prepared, prepared.config
        self._recorder, self._roles, self._journal = recorder, roles, journal
        self._status, self._chaos, self._restarts = status, chaos, restarts
        self._engines: asyncio.Task[None]
        self._threads = self._new_threads()

    @asynccontextmanager
    async def engines_supervised(self) -> AsyncIterator[None]:
        """Run the engine supervision inside this context."""
        with acting(ENGINE, self._recorder.waits):
            self._engines = asyncio.create_task(self._roles.pool.run(), name=ENGINE)
        try:
            yield
        finally:
            self._engines.cancel()
            await asyncio.wait([self._engines])
            if not self._engines.cancelled():
                self._engines.exception()  # marks the exception as retrieved; `engines` has raised it

    async def engines(self) -> None:
        """Wait until the engine supervision fails, and raise its error. Cancelling this call leaves it running."""
        await asyncio.shield(self._engines)

    async def after(self, failure: Exception, stages: Sequence[Stage]) -> ResumePoint:
        """Restart the trainers after ``failure`` has ended the ``stages``, and return the point where the run resumes.

        Raises ``failure`` if a restart is not allowed or does not succeed.
        """
        point = words = None
        try:
            words = await self._allowed(failure, stages)
            if words is not None:
                self._recorder.event(f"{describe_error(failure)}; {words}")
                self._status.starting()
                with acting(START, self._recorder.waits):
                    point = await self._begin_again()
        except Exception as error:
            self._recorder.event(f"the trainers could not begin again: {describe_error(error)}")
            if words is not None:
                self._restarts.take_back()
        if point is None:
            raise failure
        return point

    async def _allowed(self, failure: Exception, stages: Sequence[Stage]) -> str | None:
        """Return the message to the user if a restart is allowed, else None."""
        if self._journal is None or not self._may_help(failure, stages) or not self._can_be_replaced():
            return None
        await self._threads_ended()
        return await asyncio.to_thread(self._restarts.in_place, self._config, self._recorder.run)

    def _may_help(self, failure: Exception, stages: Sequence[Stage]) -> bool:
        if isinstance(failure, CALL_ERRORS) and failure.worker.partition("/")[0] in self._roles.trainer_roles():
            return True
        raised = any(stage.state is StageState.FAILED for stage in stages)
        return raised and not is_fatal(failure) and not isinstance(failure, INCURABLE)

    def _can_be_replaced(self) -> bool:
        """Return True if the trainers can be replaced: the run is not interrupted, the engines have not failed and are
        not connected to the trainers directly, and no reward model shares the trainers' devices."""
        task = asyncio.current_task()
        if self._engines.done() or (task is not None and task.cancelling()):
            return False
        roles, locks = self._roles.trainer_roles(), self._roles.locks
        judges = derived.reward_models(self._config).keys()
        return derived.weight_transport(self._config) not in WEIGHT_BACKENDS and not any(
            locks[role].roles & judges for role in roles
        )

    async def _begin_again(self) -> ResumePoint:
        config, run, journal = self._config, self._recorder.run, self._journal
        assert journal is not None
        await self._in_time(journal.written(), "the journal is not on the disk")
        await self._roles.pool.forget_weights()
        self._require_engines()
        await self._roles.end_trainers()
        await asyncio.sleep(config.restarts.delay_seconds)
        looking = asyncio.to_thread(look_again, ResumePoint(run, None), config, self._prepared.source)
        point = await self._in_time(looking, "the checkpoints could not be read")
        self._recorder.go_back(point.last_record, partial(take_out_of_the_way, point, config.max_ckpt_to_keep))
        await self._roles.start_trainers(point.checkpoint, self._chaos.corrupted_versions())
        self._require_engines()
        roles = ", ".join(self._roles.trainer_roles())
        self._recorder.event("\n".join([f"begun again in place after step {point.step}: {roles}", *point.notes]))
        return point

    async def _threads_ended(self) -> None:
        """Wait until all threads of the failed attempt have ended. Raises `TimeoutError`."""
        before, self._threads = self._threads, self._new_threads()
        with waiting("threads", "the end of threads of the driver"):
            await self._in_time(asyncio.to_thread(before.shutdown), "threads of the driver have not ended")

    async def _in_time(self, work: Awaitable[Result], otherwise: str) -> Result:
        """Await ``work``. After `stall_timeout_seconds`, raise a `TimeoutError` that begins with ``otherwise``."""
        seconds = self._config.stall_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise TimeoutError(f"{otherwise} after {seconds:g} s (stall_timeout_seconds)") from None

    def _require_engines(self) -> None:
        """Raise `RuntimeError` if the engines have failed in the meantime."""
        if self._engines.done():
            raise RuntimeError("the engines have failed meanwhile") from self._engines.exception()

    def _new_threads(self) -> ThreadPoolExecutor:
        threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
        asyncio.get_running_loop().set_default_executor(threads)
        return threads
