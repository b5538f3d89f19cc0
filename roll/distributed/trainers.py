"""All ranks of a trainer (or of a forward-only role) as one object.

A batch is put into the object store once; every rank reads it from there and takes its share. Calls in which ranks
meet go out one after the other, so that whoever makes them, all ranks get them in the same order.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import ray

from roll.data.records import SampleBatch
from roll.distributed.errors import WritingStuck
from roll.distributed.group import WorkerGroup
from roll.distributed.train_worker import TrainerSpec, TrainPlan
from roll.distributed.transports.engine_push import PushTarget
from roll.distributed.weights import Publication
from roll.distributed.writing import WritingProgress
from roll.strategies.train.step import Objective
from roll.tracking.driver_watch import Attention

LOOK_SECONDS = 30.0
"""Between two looks at what is being written; its end is heard of at once."""


class TrainerGroup:
    """The ranks of one role."""

    def __init__(self, workers: WorkerGroup, *, start_timeout_seconds: float, call_timeout_seconds: float) -> None:
        self.workers = workers
        self._start_timeout_seconds = start_timeout_seconds
        self._call_timeout_seconds = call_timeout_seconds
        self._together = asyncio.Lock()
        self._folders: set[str] = set()
        """Into which exports and snapshots are being written."""
        self.unwritten: list[list[WritingProgress]] = []
        """Of each rank, as of the last look: what is not on the disk yet, and how far it has come."""

    async def start(self, spec: TrainerSpec) -> None:
        """Join the ranks and load the model on each."""
        first = self.workers.workers[0]
        await self.workers.call_all("start", spec, first.host, first.port, timeout=self._start_timeout_seconds)

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """float32 ``[total_tokens]``: log-probability of each token of the batch under the role's model."""
        answers = await self._call("log_probs", ray.put(batch), temperature)
        return np.array(answers[0])

    async def base_log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """The same of the model that the role trains adapters on, without them."""
        return np.array((await self._call("base_log_probs", ray.put(batch), temperature))[0])

    async def values(self, batch: SampleBatch) -> np.ndarray:
        """float32 ``[total_tokens]``: the critic's value before each token of the batch."""
        return np.array((await self._call("values", ray.put(batch)))[0])

    async def train(self, batch: SampleBatch, objective: Objective, plan: TrainPlan) -> dict[str, float]:
        """One training step; metrics of rank 0 (equal on all ranks)."""
        return (await self._call("train", ray.put(batch), objective, plan))[0]

    async def gather(self, version: int, half: int, dtype: str, bucket_bytes: int) -> None:
        """Copy the weights into this half of the publication's memory."""
        await self._call("gather", version, half, dtype, bucket_bytes)

    async def send(self, version: int) -> Publication:
        """Hand gathered weights to the transport, beside training."""
        return await self.workers.workers[0].call("send", version, timeout=self._call_timeout_seconds)

    async def push(self, version: int, target: PushTarget) -> None:
        """Put a version into one engine, which is paused. Beside training."""
        await self._call_beside("push", version, target)

    def disconnect(self, name: str) -> None:
        """Say that an engine is gone, so that no push waits for it."""
        for worker in self.workers.workers:
            worker.tell("disconnect", name)

    def release(self, version: int) -> None:
        """Say that no engine will load this version again."""
        self.workers.workers[0].tell("release", version)

    async def export(self, folder: str) -> None:
        """Copy the model; it is written into the folder, in Hugging Face format, while the ranks go on."""
        self._folders.add(folder)
        await self._call("export", folder)

    async def snapshot(self, folder: str) -> None:
        """Copy the training state of all ranks; they write it into the folder while they go on."""
        self._folders.add(folder)
        await self._call("snapshot", folder)

    async def written(self) -> None:
        """Wait until the exports and snapshots so far are on the disk, as long as it takes while bytes move. Raises
        `WritingStuck` if nothing did on one rank for the time that a call may take."""
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
        """Move the states of all ranks to their hosts' memory, for another role on the same devices."""
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
        """What does not use the model of the ranks, and so need not wait for what does."""
        return await self.workers.call_all(method, *args, timeout=self._call_timeout_seconds)


class BaseOfTrainer:
    """The model that a trainer of adapters began with, as a reference: no second copy of it is anywhere."""

    def __init__(self, trainer: TrainerGroup) -> None:
        self._trainer = trainer

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """As of a `TrainerGroup` of the base alone."""
        return await self._trainer.base_log_probs(batch, temperature)
