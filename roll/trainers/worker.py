"""The process of one trainer rank (or of one rank of a forward-only role), and its writes in the background.

All ranks of a role get the same calls in the same order. Weights leave a trainer in two steps: `gather` copies them and
returns, so that training may continue; `send` takes their checksums and hands them over from another thread.

The time a checkpoint takes to reach the disk depends on its size and on a file system that others use too, so no fixed
deadline fits. A waiting caller checks for movement instead: bytes in the file, allocated disk blocks, and bytes known
to be on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

import numpy as np
import torch

from roll.algorithms.metrics import mean_over_updates
from roll.check.memory_parts import GIB
from roll.configs.roles import WorkerConfig
from roll.data.records import SampleBatch, derive_seed
from roll.runtime.actors import Worker
from roll.tracking.files import sync_file
from roll.trainers.base import (
    ForwardStrategy,
    ModelKind,
    TrainStrategy,
    build_forward_strategy,
    build_trainer,
    trainer_setup,
)
from roll.trainers.model import ModelExport
from roll.trainers.state import SavedState, state_file, write_state
from roll.trainers.step import Objective
from roll.weights.publisher import Publication, PushTarget, build_publisher
from roll.weights.transports import TransportSpec


@dataclass(frozen=True)
class TrainerSpec:
    """Everything a trainer process needs to build its strategy."""

    config: WorkerConfig
    model_path: str
    total_optimizer_steps: int
    kind: ModelKind
    forward_only: bool
    seed: int
    transport: TransportSpec
    restore_from: Path | None = None
    """Folder of the training state to resume from."""


@dataclass(frozen=True)
class TrainPlan:
    """Settings for the use of a batch in one training step."""

    step: int
    epochs: int
    optimizer_batch_size: int
    """Samples per optimizer step."""
    temperature: float


class TrainWorker(Worker):
    """Worker of one trainer rank: runs a `TrainStrategy`, or a `ForwardStrategy` for a role that does not learn."""

    _strategy: ForwardStrategy
    _trainer: TrainStrategy
    """The same object as ``_strategy``; only set for a role that learns."""
    _writing: list[Writing]
    """Writes in progress, oldest first."""

    async def start(self, spec: TrainerSpec, master_address: str, master_port: int) -> None:
        """Join the other ranks and load the model."""
        self._seed = spec.seed
        self._writing = []
        host = (await self.describe())["host"]
        self._publisher = build_publisher(spec.transport, rank=self.identity.rank, host=host)
        await self.in_thread(self._start, spec, master_address, master_port)

    def _start(self, spec: TrainerSpec, master_address: str, master_port: int) -> None:
        self.set_threads()
        config = spec.config
        setup = trainer_setup(
            config,
            model_path=spec.model_path,
            total_optimizer_steps=spec.total_optimizer_steps,
            seed=spec.seed,
            kind=spec.kind,
            forward_only=spec.forward_only,
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            master_address=master_address,
            master_port=master_port,
            device=self.identity.place.device,
        )
        name, own = config.strategy_args.strategy_name, config.strategy_args.strategy_cls
        if spec.forward_only:
            self._strategy = build_forward_strategy(name, setup, own)
        else:
            self._strategy = self._trainer = build_trainer(name, setup, own)
        self._strategy.initialize()
        if spec.restore_from is not None:
            self._trainer.restore(SavedState(spec.restore_from))

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray | None:
        """Return log-probabilities of the batch's tokens on rank 0, None elsewhere."""
        values = await self.in_thread(self._strategy.log_probs, batch, temperature)
        return values if self.identity.rank == 0 else None

    async def base_log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray | None:
        """Return the log-probabilities without the trained adapters on rank 0, None elsewhere."""
        values = await self.in_thread(self._trainer.base_log_probs, batch, temperature)
        return values if self.identity.rank == 0 else None

    async def values(self, batch: SampleBatch) -> np.ndarray | None:
        """Return a critic's values of the batch's tokens on rank 0, None elsewhere."""
        values = await self.in_thread(self._trainer.values, batch)
        return values if self.identity.rank == 0 else None

    async def train(self, batch: SampleBatch, objective: Objective, plan: TrainPlan) -> dict[str, float]:
        """Run all optimizer steps of one training step; metrics as `mean_over_updates` returns them."""
        return await self.in_thread(self._train, batch, objective, plan)

    def _train(self, batch: SampleBatch, objective: Objective, plan: TrainPlan) -> dict[str, float]:
        results = [
            self._trainer.train_step(batch.select(rows), objective, plan.temperature)
            for rows in optimizer_batches(len(batch), plan, self._seed)
        ]
        return mean_over_updates(results)

    async def gather(self, version: int, buffer: int, dtype: str, bucket_bytes: int) -> None:
        """Copy the weights into a buffer of the weight update, in the engine's dtype."""
        await self.in_thread(self._gather, version, buffer, dtype, bucket_bytes)

    def _gather(self, version: int, buffer: int, dtype: str, bucket_bytes: int) -> None:
        weights = self._trainer.named_weights()
        self._publisher.gather(version, buffer, weights, getattr(torch, dtype), bucket_bytes)

    async def send(self, version: int) -> Publication:
        """Hand over the gathered weights of a version while training continues. Rank 0 only."""
        return await asyncio.to_thread(self._publisher.send, version)

    async def push(self, version: int, target: PushTarget) -> None:
        """Push a version into one paused engine. All ranks."""
        await asyncio.to_thread(self._publisher.push, version, target)

    async def disconnect(self, name: str) -> None:
        """Close the connection to a dead engine, which ends a push that waits for it."""
        await asyncio.to_thread(self._publisher.disconnect, name)

    async def release(self, version: int) -> None:
        """Release a version that no engine will load again. Rank 0 only."""
        await asyncio.to_thread(self._publisher.release, version)

    async def export(self, folder: str) -> None:
        """Copy the model. Rank 0 then writes it into the folder in Hugging Face format while training continues."""
        export = await self.in_thread(self._trainer.export)
        if export is not None:
            self._writing.append(Writing(folder, Path(folder), lambda synced: _write_export(export, folder, synced)))

    async def snapshot(self, folder: str) -> None:
        """Copy this rank's training state, and write it into the folder while training continues."""
        snapshot = await self.in_thread(self._trainer.snapshot)
        rank, parent = self.identity.rank, Path(folder)
        path = state_file(parent, rank)
        self._writing.append(Writing(folder, path, lambda synced: write_state(parent, rank, snapshot, synced)))

    async def written(self, folders: Collection[str], seconds: float) -> list[WritingProgress]:
        """Wait at most ``seconds`` until the exports and snapshots into these folders are on the disk.

        Returns the progress of those that are not. Raises `OSError` if one could not be written.
        """
        asked_for = [writing for writing in self._writing if writing.folder in folders]
        if asked_for:
            tasks = [writing.task for writing in asked_for]
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        unfinished = []
        for writing in asked_for:
            if writing.task.done():
                writing.task.result()
                self._writing = [other for other in self._writing if other is not writing]
            else:
                unfinished.append(writing)
        return await asyncio.to_thread(lambda: [writing.progress() for writing in unfinished])

    async def offload_states(self) -> None:
        """Move the device's tensors to host memory."""
        await self.in_thread(self._strategy.offload_states)

    async def load_states(self) -> None:
        """Undo `offload_states`."""
        await self.in_thread(self._strategy.load_states)


def _write_export(export: ModelExport, folder: str, synced: Synced) -> None:
    export.write(folder)
    for path in Path(folder).iterdir():
        if path.is_file():
            sync_file(path, synced)


def optimizer_batches(samples: int, plan: TrainPlan, seed: int) -> list[np.ndarray]:
    """Return the rows of each optimizer step, for all epochs. One step per epoch keeps the order; several shuffle."""
    batches: list[np.ndarray] = []
    size = plan.optimizer_batch_size
    for epoch in range(plan.epochs):
        rows = np.arange(samples)
        if size < samples:
            rows = np.random.default_rng(derive_seed(seed, "optimizer", plan.step, epoch)).permutation(samples)
        batches += [rows[start : start + size] for start in range(0, samples, size)]
    return batches


Synced = Callable[[int], None]
"""Callback that receives how many more bytes have reached the disk."""


@dataclass(frozen=True)
class WritingProgress:
    """Progress of a write that is not complete. Two looks are equal if nothing moved between them."""

    path: str
    """A file, or a folder whose files are summed."""
    size: int
    """Size in bytes."""
    allocated: int
    """Bytes of the allocated disk blocks."""
    synced: int
    """Bytes known to be on the disk."""

    def __str__(self) -> str:
        return f"{self.path} has {self.size / GIB:.3f} GiB, {self.synced / GIB:.3f} of them on the disk"


class Writing:
    """A write in progress, in its own thread."""

    def __init__(self, folder: str, path: Path, work: Callable[[Synced], object]) -> None:
        """Start ``work``, which writes to ``path`` and reports synced bytes. ``folder`` is the one the caller named."""
        self.folder = folder
        self._path = path
        self._synced = 0
        self.task = asyncio.create_task(asyncio.to_thread(work, self._count))

    def progress(self) -> WritingProgress:
        """Return the current progress."""
        size = allocated = 0
        for file in self._path.iterdir() if self._path.is_dir() else (self._path,):
            with suppress(FileNotFoundError, NotADirectoryError):  # not created yet, or renamed in the meantime
                facts = file.stat()
                if S_ISREG(facts.st_mode):
                    size, allocated = size + facts.st_size, allocated + 512 * facts.st_blocks
        return WritingProgress(str(self._path), size, allocated, self._synced)

    def _count(self, synced: int) -> None:
        self._synced += synced
