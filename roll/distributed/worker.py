"""The process of one worker: a Ray actor around one strategy.

Heavy work runs in a thread of its own, so the actor always answers `watch`, a call that never returns. Ray resolves
that call with an error as soon as the process ends, so a death is noticed and named without polling.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from roll.data.imports import DriverFolders, import_object
from roll.data.ports import free_port
from roll.distributed.chaos import Harm, harm_this_process
from roll.distributed.heartbeat import Beat
from roll.distributed.placement import WorkerPlace
from roll.strategies.allocator import return_large_blocks
from roll.tracking.chatter import give_away_output
from roll.tracking.logs import configure_logging
from roll.tracking.stacks import thread_place, working_place

Result = TypeVar("Result")


@dataclass(frozen=True)
class WorkerIdentity:
    """Role, rank and place of a worker."""

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
        """Return process id, address, node and a free port, for messages and for the rendezvous of trainers."""
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
"""Concurrency group whose calls run in a thread of their own, whatever else the process does."""


class WorkerProcess:
    """The Ray actor: an empty process until `create` fills it with a worker.

    The worker's class is passed by name, because another node can import the driver's modules only once their paths are
    known there.
    """

    _loop_beat: float
    _loop_thread: int
    _beating: asyncio.Task[None]

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
        """Wait for ever; Ray fails the call when the process dies."""
        await asyncio.Event().wait()

    @ray.method(concurrency_group=HEALTH)
    async def beat(self) -> Beat:
        """Return a sign of life, even while the worker computes or its event loop is stuck."""
        lag = max(0.0, time.monotonic() - self._loop_beat - LOOP_BEAT_SECONDS)
        stuck = lag > 10 * LOOP_BEAT_SECONDS
        place = thread_place(self._loop_thread) if stuck else working_place(self._worker.identity.name)
        return Beat(lag, place)

    @ray.method(concurrency_group=HEALTH)
    async def harm(self, harm: Harm, seconds: float | None) -> None:
        """Inject the fault that `chaos` asks for."""
        harm_this_process(harm, seconds)

    async def _beat(self) -> None:
        while True:
            self._loop_beat = time.monotonic()
            await asyncio.sleep(LOOP_BEAT_SECONDS)


def split_devices(devices: Sequence[int], per_worker: int) -> list[list[int]]:
    """Return the consecutive devices of each worker."""
    return [list(devices[start : start + per_worker]) for start in range(0, len(devices), per_worker)]
