"""Worker processes of a role: Ray actors, their calls and heartbeats, and the detection of their deaths.

Every call ends with its result, the worker's own error, the worker's death, or a timeout; each of these errors names
the worker. At the end of a run, workers are killed, not asked to stop, so none outlives it. Deadlines of requests pause
while the engines sleep, so that time in which another role has the devices does not count.

The driver notices a death without polling: it calls `watch`, which never returns, and Ray fails this call as soon as
the process ends. Ray has no common class for such errors: for example, a process killed by Ray's memory monitor raises
`OutOfMemoryError`, which is no `RayActorError`. `ACTOR_GONE` lists all of them.

Every few seconds the driver also asks each worker for a heartbeat. A thread that does nothing else answers, even while
the worker computes for minutes. The answer says how long the worker's event loop has been stuck, and in which line. No
answer means that the process is suspended, gone or unreachable.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import ray
import ray.exceptions

from roll.configs.plugins import import_object
from roll.runtime.placement import Placement, WorkerPlace, free_port
from roll.runtime.process import DriverFolders, Fault, driver_folders, inject_fault, return_large_blocks
from roll.tracking.logs import configure_logging, give_away_output
from roll.tracking.status import thread_place, working_place
from roll.tracking.waits import WORKER, waiting

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class WorkerDied(RuntimeError):
    """A worker process ended. ``worker`` is its name, such as ``actor_infer/0``."""

    def __init__(self, worker: str, cause: str) -> None:
        super().__init__(f"worker {worker} died: {cause}")
        self.worker = worker
        self.cause = cause


class WorkerFailed(RuntimeError):
    """A call raised an error inside a worker.

    The message has the original error; the traceback is in the worker's log. ``error_type`` is the class name of the
    original error. ``answer_lost`` is True if the call itself raised nothing, but Ray lost its result.
    """

    def __init__(self, worker: str, method: str, cause: str, error_type: str, *, answer_lost: bool = False) -> None:
        super().__init__(f"{worker}.{method} failed: {cause}")
        self.worker = worker
        self.method = method
        self.cause = cause
        self.error_type = error_type
        self.answer_lost = answer_lost


class WritingStuck(TimeoutError):
    """A file that a worker writes has not grown for too long. ``progress`` has its name and the amount written."""

    def __init__(self, worker: str, progress: object, seconds: float) -> None:
        super().__init__(
            f"worker {worker} has written nothing for {seconds:g} s (stall_timeout_seconds): {progress}; is its file "
            "system still there?"
        )


class WorkerTimeout(TimeoutError):
    """A call did not return within its deadline."""

    def __init__(self, worker: str, method: str, seconds: float) -> None:
        super().__init__(f"{worker}.{method} did not return within {seconds:g} s")
        self.worker = worker


ACTOR_GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.ActorPlacementGroupRemoved,
    ray.exceptions.RuntimeEnvSetupError,
)
"""Ray's errors for a call to a dead actor. They include `ActorUnavailableError` (Ray cannot reach the actor), because
callers replace such an actor. Catch `RayTaskError` first: an error raised by a living actor is also an instance of its
cause's class, which may be one of these."""


def is_gone_for_good(error: BaseException) -> bool:
    """Return True if the actor is dead, so that calling it again is useless."""
    from_a_living_actor = ray.exceptions.ActorUnavailableError | ray.exceptions.RayTaskError
    return isinstance(error, ACTOR_GONE) and not isinstance(error, from_a_living_actor)


def death_cause(error: BaseException) -> str:
    """Return a short description of why an actor died, extracted from Ray's long error message."""
    text = str(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        figures = re.search(r"was (\S+ used / \S+) limit", text)
        used = f" ({figures[1]})" if figures else ""
        return f"it was killed because its node ran low on memory{used}"
    ends = [line for line in text.splitlines() if "The actor is dead because " in line]
    if not ends:  # the actor failed to start, and a traceback ends with the error
        _, traceback, rest = text.rpartition('  File "')
        lines = dropwhile(lambda line: line[:1].isspace(), rest.splitlines()[1:]) if traceback else rest.splitlines()
        return " ".join(line.strip() for line in lines) or "no cause given"
    reason, _, detail = ends[-1].split("The actor is dead because ")[1].partition("Worker exit detail: ")
    what = reason.split(". ")[0].rstrip(".")
    detail = detail.rstrip(". ")
    if "its worker process" not in what:  # then the detail is about another process, such as the owner
        return f"{what}: {detail.split('. ')[0]}" if detail else what
    if "SIGTERM" in detail:
        return "it was ended by a SIGTERM"
    if exit_code := re.search(r"exit code:? (-?\d+)", detail, re.IGNORECASE):
        return f"it ended with exit code {exit_code[1]}"
    if "connection error" in detail:
        return "it ended without a message, by an exit or a signal such as that of the system's memory killer"
    return detail or what


class StoppableDeadlines:
    """Deadlines that are paused and resumed together."""

    def __init__(self) -> None:
        self._stopped = False
        self._seconds_left: dict[asyncio.Timeout, float] = {}
        """Deadline -> seconds left at the last `stop`, or its initial limit."""

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Raise `TimeoutError` if the block takes longer than ``seconds``, like `asyncio.timeout`.

        Time between `stop` and `resume` does not count.
        """
        async with asyncio.timeout(None if self._stopped else seconds) as deadline:
            self._seconds_left[deadline] = seconds
            try:
                yield deadline
            finally:
                del self._seconds_left[deadline]

    def stop(self) -> None:
        """Stop the clock of all deadlines. Does nothing if it is stopped already."""
        if self._stopped:
            return
        self._stopped = True
        now = asyncio.get_running_loop().time()
        for deadline in self._running():
            ends = deadline.when()
            if ends is not None:
                self._seconds_left[deadline] = ends - now
            deadline.reschedule(None)

    def resume(self) -> None:
        """Undo `stop`. Does nothing if the clock is running."""
        if not self._stopped:
            return
        self._stopped = False
        now = asyncio.get_running_loop().time()
        for deadline in self._running():
            deadline.reschedule(now + self._seconds_left[deadline])

    def _running(self) -> list[asyncio.Timeout]:
        return [deadline for deadline in self._seconds_left if not deadline.expired()]


EXIT_SECONDS = 10.0
"""Longest wait for a killed process to disappear."""
DEATH_REPORT_SECONDS = 2.0
"""Longest wait for the report of a death after a call failed.

If a rank dies, its peers fail in their collective call, often before the death itself is known.
"""


CALL_ERRORS = (WorkerDied, WorkerFailed, WorkerTimeout)
"""Errors that a call to a process can raise."""


class ProcessHandle:
    """Handle of a process that is a Ray actor. Its calls have deadlines, and their errors name the process."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        """The Ray actor, for other processes to call."""
        self.pid: int | None = None

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the actor and wait for its answer. Raises one of `CALL_ERRORS`."""
        return await self._answer(getattr(self.actor, method).remote(*args), method, timeout)

    async def ready(self, timeout: float) -> None:
        """Wait until the process is running. Raises one of `CALL_ERRORS`."""
        await self._answer(self.actor.__ray_ready__.remote(), "its start", timeout)

    async def _answer(self, reference: Any, method: str, timeout: float | None) -> Any:
        answer = asyncio.wrap_future(reference.future())
        try:
            # Not `asyncio.timeout`: after this process itself was suspended, an answer that has arrived must count.
            await asyncio.wait([answer], timeout=timeout)
            if not answer.done():
                raise WorkerTimeout(self.name, method, timeout or 0.0)
            return answer.result()
        except ray.exceptions.RayError as error:
            cause: Exception = error
            # An error raised by a living actor is also an instance of its cause's class, possibly one of `ACTOR_GONE`.
            raised_inside = isinstance(error, ray.exceptions.RayTaskError)
            if isinstance(error, ray.exceptions.RayTaskError):
                cause = error.cause or error
            elif isinstance(error, ACTOR_GONE):
                raise self.died(error) from error
            kind = type(cause).__name__
            raise WorkerFailed(self.name, method, f"{kind}: {cause}", kind, answer_lost=not raised_inside) from error
        finally:
            answer.cancel()

    def died(self, error: BaseException) -> WorkerDied:
        """Return Ray's error about the death of this process as a `WorkerDied`."""
        process = f"process {self.pid}, " if self.pid is not None else ""
        return WorkerDied(self.name, f"{process}{death_cause(error)}")

    def kill(self) -> None:
        """Kill the process at once."""
        ray.kill(self.actor, no_restart=True)

    async def end(self) -> None:
        """Kill the process and wait until it is gone, so that its memory and devices are free."""
        self.kill()
        with suppress(WorkerDied, WorkerFailed):
            try:
                await self.ready(EXIT_SECONDS)
            except WorkerTimeout:
                logger.warning("%s was killed and is still there after %g s", self.name, EXIT_SECONDS)


class WorkerHandle(ProcessHandle):
    """Handle of one worker process of a role."""

    def __init__(self, identity: WorkerIdentity, class_path: str, actor: Any) -> None:
        super().__init__(identity.name, actor)
        self.identity = identity
        self._class_path = class_path
        self.host: str | None = None
        self.node: str | None = None
        self.is_local = False
        """True if the worker runs on the driver's host."""
        self.port: int | None = None

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the worker and wait for its answer. Raises one of `CALL_ERRORS`."""
        with waiting(f"{WORKER}{self.name}", method):
            return await self._answer(self.actor.invoke.remote(method, *args), method, timeout)

    async def beat(self) -> Beat:
        """Ask the process for a heartbeat and wait for it, without a time limit; see the module docstring."""
        return await self.actor.beat.remote()

    def inject(self, fault: Fault, seconds: float | None) -> None:
        """Inject a fault into the process, for tests; see `roll.runtime.process`."""
        self.actor.inject.remote(fault, seconds)

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the worker without waiting for its result. Errors are ignored."""
        self.actor.invoke.remote(method, *args)

    async def create(self, timeout: float) -> None:
        """Wait until the process is running, then record its process id, host, node and port."""
        with waiting(f"{WORKER}{self.name}", "create"):
            facts = await self._answer(self.actor.create.remote(self._class_path, self.identity), "create", timeout)
        self.pid, self.host, self.node, self.port = facts["pid"], facts["host"], facts["node"], facts["port"]
        self.is_local = self.node == ray.get_runtime_context().get_node_id()
        logger.info("worker %s runs as process %d on %s", self.name, self.pid, self.host)

    async def wait_for_death(self) -> WorkerDied:
        """Wait until the process has ended, and return the cause."""
        try:
            await self.actor.watch.remote()
        except ACTOR_GONE as error:
            return self.died(error)
        return WorkerDied(self.name, "its watch call returned")


class WorkerGroup:
    """All ranks of a role."""

    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        self.workers = list(workers)

    async def call_all(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Make the same call on every rank and return the answers in rank order.

        Raises the first failure and stops waiting for the other calls. If a rank died, its `WorkerDied` is raised
        rather than the errors of its peers.
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
        """Return deaths reported within `DEATH_REPORT_SECONDS`; at once an empty list for a group of one rank."""
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
) -> WorkerHandle:
    """Start the actor of one rank. It is ready when `WorkerHandle.create` has returned."""
    place = placement.place(devices)
    identity = WorkerIdentity(role, rank, world_size, place, log_dir, driver_folders())
    options = {
        "max_concurrency": 1000,
        "concurrency_groups": {HEALTH: 4},
        "max_restarts": 0,
        **placement.actor_options(place),
    }
    process_class = ray.remote(**options)(WorkerProcess)
    class_path = f"{worker_class.__module__}:{worker_class.__qualname__}"
    return WorkerHandle(identity, class_path, process_class.remote())


async def start_group(build: Callable[[int], WorkerHandle], size: int, timeout: float) -> WorkerGroup:
    """Start all ranks at once, and return when all their processes are running."""
    group = WorkerGroup([build(rank) for rank in range(size)])
    try:
        await asyncio.gather(*(worker.create(timeout) for worker in group.workers))
    except BaseException:
        group.kill()
        raise
    return group


BEAT_SECONDS = 2.0
"""Interval at which all workers are asked for a heartbeat."""


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a worker."""

    loop_lag: float
    """Seconds for which the worker's event loop has been stuck."""
    place: str | None
    """Code location of the working thread (or of the stuck event loop); None if it is idle."""
    at: float = 0.0
    """Time at which the heartbeat arrived at the driver."""


class Heartbeats:
    """The last heartbeat of each process. A process that replaced another starts without one."""

    def __init__(
        self, handles: Callable[[], Iterable[WorkerHandle]], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._handles = handles
        self._clock = clock
        self._heard: dict[WorkerHandle, Beat] = {}
        self._asking: dict[WorkerHandle, asyncio.Task[None]] = {}

    def last(self, handle: WorkerHandle) -> Beat | None:
        """Return the last heartbeat; None if the process has not answered yet."""
        return self._heard.get(handle)

    async def run(self) -> None:
        """Ask all workers for heartbeats until cancelled. A worker is not asked again before it has answered."""
        try:
            while True:
                present = [handle for handle in self._handles() if handle.pid is not None]
                self._forget_all_but(present)
                for handle in present:
                    if handle not in self._asking:
                        self._asking[handle] = asyncio.create_task(self._ask(handle))
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            self._forget_all_but([])

    def _forget_all_but(self, present: list[WorkerHandle]) -> None:
        for handle in self._asking.keys() - set(present):
            self._asking.pop(handle).cancel()
        self._heard = {handle: heard for handle, heard in self._heard.items() if handle in present}

    async def _ask(self, handle: WorkerHandle) -> None:
        try:
            self._heard[handle] = replace(await handle.beat(), at=self._clock())
        except ray.exceptions.RayError as error:
            if is_gone_for_good(error):
                return  # the process has died; the task that watches it reports the cause
            logger.debug("%s gave no sign of life, and is asked again: %s", handle.name, error)
        self._asking.pop(handle, None)


@dataclass(frozen=True)
class WorkerIdentity:
    """Role, rank, devices and folders of a worker."""

    role: str
    rank: int
    world_size: int
    place: WorkerPlace
    log_dir: str | None
    folders: DriverFolders = DriverFolders()

    @property
    def name(self) -> str:
        """Role and rank, such as ``actor_infer/0``."""
        return f"{self.role}/{self.rank}"


class Worker:
    """Base class of the workers of all roles. Subclasses add the calls of their role."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self.identity = identity
        return_large_blocks()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=identity.name)
        if identity.place.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in identity.place.local_devices)
        if identity.log_dir is not None:
            configure_logging(Path(identity.log_dir), identity.name)

    async def describe(self) -> dict[str, Any]:
        """Return ``pid``, ``host`` (address), ``node`` (Ray's id) and a free ``port``.

        They are for messages and for the rendezvous of trainers.
        """
        node = ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "host": ray.util.get_node_ip_address(), "node": node, "port": free_port()}

    async def in_thread(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run heavy work in the worker's own thread, one call at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def set_threads(self) -> None:
        """Limit torch to the CPU threads of this worker's place."""
        import torch

        torch.set_num_threads(self.identity.place.cpu_threads)


LOOP_BEAT_SECONDS = 0.5
HEALTH = "health"
"""Ray concurrency group whose calls run in a thread of their own, even while the process is busy."""


class WorkerProcess:
    """The Ray actor: a process that has no worker until `create` is called.

    The worker's class is passed by name, because another node can import the driver's modules only after it has set the
    driver's import path.
    """

    async def create(self, class_path: str, identity: WorkerIdentity) -> dict[str, Any]:
        """Create the worker in this process, and return what `Worker.describe` returns."""
        identity.folders.enter()
        if identity.log_dir is not None:
            give_away_output(Path(identity.log_dir), identity.name)
        self._loop_thread = threading.get_ident()
        self._loop_beat = time.monotonic()
        self._beating = asyncio.create_task(self._beat())
        self._worker: Worker = import_object(class_path)(identity)
        return await self._worker.describe()

    async def invoke(self, method: str, *args: Any) -> Any:
        """Call a method of the worker."""
        return await getattr(self._worker, method)(*args)

    async def watch(self) -> None:
        """Wait for ever. Ray fails this call when the process dies."""
        await asyncio.Event().wait()

    @ray.method(concurrency_group=HEALTH)
    async def beat(self) -> Beat:
        """Return a heartbeat, even while the worker computes or its event loop is stuck."""
        lag = max(0.0, time.monotonic() - self._loop_beat - LOOP_BEAT_SECONDS)
        stuck = lag > 10 * LOOP_BEAT_SECONDS
        place = thread_place(self._loop_thread) if stuck else working_place(self._worker.identity.name)
        return Beat(lag, place)

    @ray.method(concurrency_group=HEALTH)
    async def inject(self, fault: Fault, seconds: float | None) -> None:
        """Inject the fault that `chaos` asks for."""
        inject_fault(fault, seconds)

    async def _beat(self) -> None:
        while True:
            self._loop_beat = time.monotonic()
            await asyncio.sleep(LOOP_BEAT_SECONDS)


def split_devices(devices: Sequence[int], per_worker: int) -> list[list[int]]:
    """Split devices into consecutive parts of ``per_worker`` devices, one part per worker."""
    return [list(devices[start : start + per_worker]) for start in range(0, len(devices), per_worker)]
