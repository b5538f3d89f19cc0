"""The process of one worker: a Ray actor around one strategy.

Heavy work runs in one thread of its own, so the actor always answers `watch`, the call that never returns: Ray
resolves it with an error the moment the process ends, which is how a death is noticed and named without polling.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from roll.data.imports import import_object
from roll.data.ports import free_port
from roll.distributed.allocator import return_large_blocks
from roll.distributed.chaos import Harm, harm_this_process
from roll.distributed.heartbeat import Beat
from roll.distributed.placement import WorkerPlace
from roll.tracking.chatter import give_away_output
from roll.tracking.logs import configure_logging
from roll.tracking.stacks import thread_place, working_place

Result = TypeVar("Result")


@dataclass(frozen=True)
class WorkerIdentity:
    """Who a worker is."""

    role: str
    rank: int
    world_size: int
    place: WorkerPlace
    log_dir: str | None
    import_paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """Role and rank, such as ``actor_infer/0``."""
        return f"{self.role}/{self.rank}"


class Worker:
    """What the workers of all roles share. Subclasses add the calls of their role."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self.identity = identity
        return_large_blocks()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=identity.name)
        if identity.place.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in identity.place.local_devices)
        if identity.log_dir is not None:
            configure_logging(Path(identity.log_dir), identity.name)

    async def describe(self) -> dict[str, Any]:
        """Process id, node and address, for messages and for the rendezvous of trainers."""
        node = ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "host": ray.util.get_node_ip_address(), "node": node, "port": free_port()}

    async def in_thread(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run heavy work in the worker's own thread, calls one after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def set_threads(self) -> None:
        """Limit torch to the threads of this worker's place."""
        import torch

        torch.set_num_threads(self.identity.place.cpu_threads)


LOOP_BEAT_SECONDS = 0.5
HEALTH = "health"
"""Calls of this concurrency group run in a thread of their own, beside whatever else the process does."""


class WorkerProcess:
    """The Ray actor: an empty process until `create` fills it with a worker.

    The worker's class travels as a name, because on another node the driver's modules can only be imported once its
    paths are known there.
    """

    _loop_beat: float
    _loop_thread: int
    _beating: asyncio.Task[None]

    async def create(self, class_path: str, identity: WorkerIdentity) -> dict[str, Any]:
        """Become the worker; returns what `Worker.describe` tells."""
        for path in reversed(identity.import_paths):
            if path not in sys.path:
                sys.path.insert(0, path)
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
        """Never returns; ends with Ray's error when the process dies."""
        await asyncio.Event().wait()

    @ray.method(concurrency_group=HEALTH)
    async def beat(self) -> Beat:
        """A sign of life, also while the worker computes or its event loop is stuck."""
        lag = max(0.0, time.monotonic() - self._loop_beat - LOOP_BEAT_SECONDS)
        stuck = lag > 10 * LOOP_BEAT_SECONDS
        place = thread_place(self._loop_thread) if stuck else working_place(self._worker.identity.name)
        return Beat(lag, place)

    @ray.method(concurrency_group=HEALTH)
    async def harm(self, harm: Harm, seconds: float | None) -> None:
        """What `chaos` asks for."""
        harm_this_process(harm, seconds)

    async def _beat(self) -> None:
        while True:
            self._loop_beat = time.monotonic()
            await asyncio.sleep(LOOP_BEAT_SECONDS)


def split_devices(devices: Sequence[int], per_worker: int) -> list[list[int]]:
    """Consecutive devices of each worker."""
    return [list(devices[start : start + per_worker]) for start in range(0, len(devices), per_worker)]
