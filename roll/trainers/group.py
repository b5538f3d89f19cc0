"""All ranks of a trainer (or of a forward-only role) as one object.

A batch is put into the object store once; every rank reads it from there and takes its share. Collective calls go out
one after the other, so all ranks receive them in the same order, whichever task makes them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import ray

from roll.data.records import SampleBatch
from roll.runtime.actors import WorkerGroup, WritingStuck
from roll.tracking.status import Attention
from roll.trainers.step import Objective
from roll.trainers.worker import TrainerSpec, TrainPlan, WritingProgress
from roll.weights.publisher import Publication, PushTarget

LOOK_SECONDS = 30.0
"""Longest interval between two progress checks of a write. Its completion is noticed at once."""


class TrainerGroup:
    """All ranks of one role."""

    def __init__(self, workers: WorkerGroup, *, start_timeout_seconds: float, call_timeout_seconds: float) -> None:
        self.workers = workers
        self._start_timeout_seconds = start_timeout_seconds
        self._call_timeout_seconds = call_timeout_seconds
        self._together = asyncio.Lock()
        self._folders: set[str] = set()
        """Folders into which exports and snapshots are being written."""
        self.unwritten: list[list[WritingProgress]] = []
        """Writes of each rank that were unfinished at the last check, with their progress."""

    async def start(self, spec: TrainerSpec) -> None:
        """Join the ranks and load the model on each."""
        first = self.workers.workers[0]
        await self.workers.call_all("start", spec, first.host, first.port, timeout=self._start_timeout_seconds)

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return float32 ``[total_tokens]``: the log-probability of each token under the role's model."""
        answers = await self._call("log_probs", ray.put(batch), temperature)
        return np.array(answers[0])

    async def base_log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return `log_probs` of the base model, without the adapters that the role trains."""
        return np.array((await self._call("base_log_probs", ray.put(batch), temperature))[0])

    async def values(self, batch: SampleBatch) -> np.ndarray:
        """Return float32 ``[total_tokens]``: the critic's value before each token of the batch."""
        return np.array((await self._call("values", ray.put(batch)))[0])

    async def train(self, batch: SampleBatch, objective: Objective, plan: TrainPlan) -> dict[str, float]:
        """Run one training step and return the metrics of rank 0 (equal on all ranks)."""
        return (await self._call("train", ray.put(batch), objective, plan))[0]

    async def gather(self, version: int, buffer: int, dtype: str, bucket_bytes: int) -> None:
        """Copy the weights into a buffer of the weight update."""
        await self._call("gather", version, buffer, dtype, bucket_bytes)

    async def send(self, version: int) -> Publication:
        """Hand gathered weights to the transport while training continues."""
        return await self.workers.workers[0].call("send", version, timeout=self._call_timeout_seconds)

    async def push(self, version: int, target: PushTarget) -> None:
        """Push a version into one paused engine while training continues."""
        await self._call_beside("push", version, target)

    def disconnect(self, name: str) -> None:
        """Tell every rank that an engine is gone, so that no push waits for it."""
        for worker in self.workers.workers:
            worker.tell("disconnect", name)

    def release(self, version: int) -> None:
        """Tell rank 0 that no engine will load this version again."""
        self.workers.workers[0].tell("release", version)

    async def export(self, folder: str) -> None:
        """Copy the model. It is written into the folder in Hugging Face format while the ranks continue."""
        self._folders.add(folder)
        await self._call("export", folder)

    async def snapshot(self, folder: str) -> None:
        """Copy the training state of all ranks. They write it into the folder while they continue."""
        self._folders.add(folder)
        await self._call("snapshot", folder)

    async def written(self) -> None:
        """Wait until all exports and snapshots so far are on the disk, for as long as bytes move.

        Raises `WritingStuck` if nothing moved on one rank for longer than a call may take.
        """
        limit, folders = self._call_timeout_seconds, sorted(self._folders)
        interval = min(LOOK_SECONDS, limit / 4)
        attention = Attention(2 * interval, asyncio.get_running_loop().time)
        before: dict[int, list[WritingProgress]] = {}
        quiet: dict[int, float] = {}
        while True:
            self.unwritten = await self._call_beside("written", folders, interval)
            if not any(self.unwritten):
                self._folders.difference_update(folders)
                return
            seconds = attention.look()
            for rank, there in enumerate(self.unwritten):
                quiet[rank] = quiet[rank] + seconds if there and there == before.get(rank) else 0.0
                if quiet[rank] > limit:
                    raise WritingStuck(self.workers.workers[rank].name, there[0], limit)
                before[rank] = there

    async def offload_states(self) -> None:
        """Move the states of all ranks to host memory, to free the devices for another role."""
        await self._call("offload_states")

    async def load_states(self) -> None:
        """Undo `offload_states`."""
        await self._call("load_states")

    async def watch(self) -> None:
        """Raise `WorkerDied` as soon as a rank dies."""
        await self.workers.watch()

    async def _call(self, method: str, *args: object) -> list[Any]:
        async with self._together:
            return await self._call_beside(method, *args)

    async def _call_beside(self, method: str, *args: object) -> list[Any]:
        """Make a call that does not use the ranks' model, and therefore need not wait for calls that do."""
        return await self.workers.call_all(method, *args, timeout=self._call_timeout_seconds)


class BaseOfTrainer:
    """The base model of a trainer of adapters, used as the reference. No second copy of it exists."""

    def __init__(self, trainer: TrainerGroup) -> None:
        self._trainer = trainer

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return what a `TrainerGroup` of the base model would return."""
        return await self._trainer.base_log_probs(batch, temperature)
