"""The workers of one role, as the driver sees them.

Every wait ends with the answer, the worker's own error, its death, or a timeout; each of these errors names the worker.
At the end of a run workers are killed, not asked to stop, so none outlives it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError

from roll.data.actor_deaths import ACTOR_GONE, memory_death
from roll.data.imports import driver_folders
from roll.distributed.chaos import Harm
from roll.distributed.errors import WorkerDied, WorkerFailed, WorkerTimeout
from roll.distributed.heartbeat import Beat
from roll.distributed.placement import Placement
from roll.distributed.worker import HEALTH, Worker, WorkerIdentity, WorkerProcess
from roll.tracking.waits import WORKER, waiting

logger = logging.getLogger(__name__)

DEATH_REPORT_SECONDS = 2.0
"""Longest wait for the report of a death.

A rank whose peer has died fails in the collective, often before the death itself is known.
"""


class WorkerHandle:
    """One worker process."""

    def __init__(self, identity: WorkerIdentity, class_path: str, actor: Any) -> None:
        self.identity = identity
        self._class_path = class_path
        self._actor = actor
        self.pid: int | None = None
        self.host: str | None = None
        self.node: str | None = None
        self.is_local = False
        """True if the worker runs on the driver's host."""
        self.port: int | None = None

    @property
    def name(self) -> str:
        """Role and rank, such as ``actor_infer/0``."""
        return self.identity.name

    @property
    def actor(self) -> Any:
        """The Ray actor, for other workers to call."""
        return self._actor

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the worker and wait for its answer."""
        return await self._answer(self._actor.invoke.remote(method, *args), method, timeout)

    async def beat(self) -> Beat:
        """Wait for a sign of life, as long as the process is silent; see `roll.distributed.heartbeat`."""
        return await self._actor.beat.remote()

    def harm(self, harm: Harm, seconds: float | None) -> None:
        """Inject a fault into the process, for tests; see `roll.distributed.chaos`."""
        self._actor.harm.remote(harm, seconds)

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the worker without waiting for it; its death is noticed elsewhere."""
        self._actor.invoke.remote(method, *args)

    async def create(self, timeout: float) -> None:
        """Wait until the process runs, then record its process id, host, node and port."""
        ref = self._actor.create.remote(self._class_path, self.identity)
        facts = await self._answer(ref, "create", timeout)
        self.pid, self.host, self.node, self.port = facts["pid"], facts["host"], facts["node"], facts["port"]
        self.is_local = self.node == ray.get_runtime_context().get_node_id()
        logger.info("worker %s runs as process %d on %s", self.name, self.pid, self.host)

    async def _answer(self, ref: Any, method: str, timeout: float | None) -> Any:
        try:
            with waiting(f"{WORKER}{self.name}", method):
                async with asyncio.timeout(timeout):
                    return await ref
        except RayTaskError as error:
            # This clause comes first: Ray makes the error an instance of its cause's class too, such as TimeoutError.
            cause = error.cause if error.cause is not None else error
            raise WorkerFailed(self.name, method, f"{type(cause).__name__}: {cause}", type(cause).__name__) from error
        except ACTOR_GONE as error:
            raise self.died(error) from error
        except RayError as error:  # the answer was lost, for example with its node
            raise WorkerFailed(self.name, method, f"{type(error).__name__}: {error}", type(error).__name__) from error
        except TimeoutError:
            raise WorkerTimeout(self.name, method, timeout or 0.0) from None

    async def wait_for_death(self) -> WorkerDied:
        """Wait until the process has ended, and return the cause."""
        try:
            await self._actor.watch.remote()
        except ACTOR_GONE as error:
            return self.died(error)
        return WorkerDied(self.name, "its watch call returned")

    def died(self, error: BaseException) -> WorkerDied:
        """Return what Ray's error says about the death of this worker."""
        process = f"process {self.pid}, " if self.pid is not None else ""
        return WorkerDied(self.name, f"{process}{_death_cause(error)}")

    def kill(self) -> None:
        """Kill the process now."""
        ray.kill(self._actor, no_restart=True)


class WorkerGroup:
    """All ranks of a role."""

    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        self.workers = list(workers)

    async def call_all(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Make the same call on every rank and return the answers in rank order.

        Raises the first failure and gives up the other calls. The death of a rank takes precedence over the errors of
        its peers.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(worker.call(method, *args, timeout=timeout)) for worker in self.workers]
        except ExceptionGroup as failures:
            deaths = [error for error in failures.exceptions if isinstance(error, WorkerDied)]
            causes: Sequence[Exception] = deaths or await self._recent_deaths() or failures.exceptions
            raise causes[0] from None
        return [task.result() for task in tasks]

    async def watch(self) -> NoReturn:
        """Raise `WorkerDied` as soon as any rank dies."""
        deaths = [asyncio.ensure_future(worker.wait_for_death()) for worker in self.workers]
        try:
            done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            raise done.pop().result()
        finally:
            for death in deaths:
                death.cancel()

    async def _recent_deaths(self) -> list[WorkerDied]:
        """Return deaths reported within `DEATH_REPORT_SECONDS`; none for a single rank, which has no peers."""
        if len(self.workers) == 1:
            return []
        try:
            async with asyncio.timeout(DEATH_REPORT_SECONDS):
                await self.watch()
        except WorkerDied as death:
            return [death]
        except TimeoutError:
            return []

    def kill(self) -> None:
        """Kill all processes now."""
        for worker in self.workers:
            worker.kill()


def start_worker(
    worker_class: type[Worker],
    placement: Placement,
    *,
    role: str,
    rank: int,
    world_size: int,
    devices: Sequence[int],
    log_dir: str | None,
    concurrency: int = 1000,
) -> WorkerHandle:
    """Start the actor of one rank; it is ready once `WorkerHandle.create` has returned."""
    place = placement.place(devices)
    identity = WorkerIdentity(role, rank, world_size, place, log_dir, driver_folders())
    options = {
        "max_concurrency": concurrency,
        "concurrency_groups": {HEALTH: 4},
        "max_restarts": 0,
        **placement.actor_options(place),
    }
    process_class = ray.remote(**options)(WorkerProcess)
    class_path = f"{worker_class.__module__}:{worker_class.__qualname__}"
    return WorkerHandle(identity, class_path, process_class.remote())


async def start_group(build: Callable[[int], WorkerHandle], size: int, timeout: float) -> WorkerGroup:
    """Start all ranks at once, and return when every process runs."""
    group = WorkerGroup([build(rank) for rank in range(size)])
    try:
        await asyncio.gather(*(worker.create(timeout) for worker in group.workers))
    except BaseException:
        group.kill()
        raise
    return group


def _death_cause(error: BaseException) -> str:
    of_memory = memory_death(error)
    if of_memory is not None:
        return of_memory
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wanted = [line for line in lines if "exit" in line.lower() or "killed" in line.lower() or "died" in line.lower()]
    return (wanted or lines or ["no cause given"])[-1]
