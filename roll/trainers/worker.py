"""The worker processes of a trainer or forward-only role, one per rank, and `TrainerGroup`, the driver's handle on all.

A batch is put into the object store once; every rank reads it from there and takes its share. Collective calls are
serialised, so all ranks receive them in the same order, whichever task makes them. A weight update leaves the trainer
in two steps: `gather` copies the weights, after which training may continue; `send` computes their checksums and hands
them to the transport in a thread.

The time a checkpoint takes to reach the disk depends on its size and on a possibly shared file system, so no fixed
timeout fits. Waiting fails only without progress, measured by file size, allocated blocks and synced bytes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
import torch

from roll.algorithms.metrics import mean_over_updates
from roll.check.memory_parts import GIB, ModelShape, ShapeUnknown, find_shape
from roll.data.records import SampleBatch, derive_seed
from roll.runtime.usage import Usage, cpu_seconds, device_name, memory_in_use
from roll.runtime.workers import Worker, WorkerGroup, WritingStuck
from roll.tracking.files import sync_file
from roll.tracking.status import Attention
from roll.trainers.base import TrainerSetup, build_forward_strategy, build_trainer
from roll.trainers.state import SavedState, state_file, write_state
from roll.trainers.step import Objective
from roll.weights.buckets import HeldWeights, manifest, tensor_checksum, views
from roll.weights.publisher import Offer, Publication, PushTarget, build_publisher, check_weights
from roll.weights.transports import TRANSPORTS, TransportSpec, WeightReceiver

if TYPE_CHECKING:
    from roll.trainers.trainer import ForwardStrategy, TrainStrategy

LOOK_SECONDS = 30.0
"""Maximum seconds between two progress checks of a write. Its completion is noticed at once."""


Result = TypeVar("Result")
HELD_TENSORS = 8
"""Approximate number of tensors that a forward-only role reads back for verification after loading a version."""


@dataclass(frozen=True)
class TrainerSpec:
    """Arguments for building a trainer or forward-only role in its worker processes."""

    setup: TrainerSetup
    """Arguments common to all ranks; each fills in its rank, device and the rendezvous address."""
    transport: TransportSpec | None
    """Weight transport between this role and others; None if it neither sends nor receives weights."""
    restore_from: Path | None = None
    """Folder of the training state to resume from."""


@dataclass(frozen=True)
class TrainPlan:
    """Use of a batch by one training step."""

    step: int
    epochs: int
    optimizer_batch_size: int
    """Samples per optimizer step."""
    temperature: float
    """Sampling temperature at which log-probabilities are computed."""


class TrainWorker(Worker):
    """Worker process of one rank. Runs a `TrainStrategy`, or a `ForwardStrategy` for a forward-only role."""

    _setup: TrainerSetup
    _strategy: ForwardStrategy
    _trainer: TrainStrategy
    """The same object as ``_strategy``; set only for a role that trains."""
    _base: dict[str, int] | None = None
    """Checksums of the base model, if only adapters are sent to engines."""
    _writing: list[Writing]
    """Writes in progress, oldest first."""
    _used: Usage
    """Work of finished calls since the last report."""
    _shape: ModelShape | None
    """Sizes of the model; None if they are unknown."""

    async def start(self, spec: TrainerSpec, master_address: str, master_port: int) -> None:
        """Join the other ranks and load the model."""
        self._writing, self._used, self._shape = [], Usage(), shape_of(spec.setup)
        me = self.identity
        host = (await self.describe())["host"]
        if spec.transport is not None:
            self._publisher = build_publisher(spec.transport, rank=me.rank, host=host)
            self._transport, self._content = spec.transport.name, spec.transport.content
        self._setup = replace(
            spec.setup,
            rank=me.rank,
            world_size=me.world_size,
            master_address=master_address,
            master_port=master_port,
            device=me.place.device,
        )
        await self.in_thread(self._start, spec.restore_from)

    def _start(self, restore_from: Path | None) -> None:
        self.set_threads()
        setup, chosen = self._setup, self._setup.config.strategy_args
        if setup.forward_only:
            self._strategy = build_forward_strategy(chosen.strategy_name, setup, chosen.strategy_cls)
        else:
            self._strategy = self._trainer = build_trainer(chosen.strategy_name, setup, chosen.strategy_cls)
        self._strategy.initialize()
        if restore_from is not None:
            self._trainer.restore(SavedState(restore_from))

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray | None:
        """Return log-probabilities of the batch's tokens on rank 0, None elsewhere."""
        return await self._forward(self._strategy.log_probs, batch, temperature)

    async def base_log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray | None:
        """Return the log-probabilities without the trained adapters on rank 0, None elsewhere."""
        return await self._forward(self._trainer.base_log_probs, batch, temperature)

    async def step_means(self, batch: SampleBatch) -> np.ndarray | None:
        """Return the means of the batch's denoising steps on rank 0, None elsewhere."""
        return await self._forward(self._strategy.step_means, batch)

    async def base_step_means(self, batch: SampleBatch) -> np.ndarray | None:
        """Return the means without the trained adapters on rank 0, None elsewhere."""
        return await self._forward(self._trainer.base_step_means, batch)

    async def values(self, batch: SampleBatch) -> np.ndarray | None:
        """Return a critic's values of the batch's tokens on rank 0, None elsewhere."""
        return await self._forward(self._trainer.values, batch)

    async def _forward(self, work: Callable[..., np.ndarray], batch: SampleBatch, *args: object) -> np.ndarray | None:
        """Do work without gradients. Return the result on rank 0, None elsewhere: all ranks have the same one."""
        values = await self._counted(batch, 1, work, batch, *args)
        return values if self.identity.rank == 0 else None

    async def train(self, batch: SampleBatch, objective: Objective, plan: TrainPlan) -> dict[str, float]:
        """Take all optimizer steps of one training step. Return their metrics, combined by `mean_over_updates`."""

        def train() -> dict[str, float]:
            updates = [
                self._trainer.train_step(batch.select(rows), objective, plan.temperature)
                for rows in optimizer_batches(len(batch), plan, self._setup.seed)
            ]
            return mean_over_updates(updates)

        return await self._counted(batch, plan.epochs * self._passes, train)

    async def train_part(
        self, batch: SampleBatch, objective: Objective, temperature: float, completes: bool
    ) -> tuple[dict[str, float], np.ndarray | None]:
        """Train on a part of a batch; see `TrainStrategy.train_part`. Log-probabilities are returned on rank 0 only."""

        def train() -> tuple[dict[str, float], np.ndarray | None]:
            return self._trainer.train_part(batch, objective, temperature, completes=completes)

        metrics, logprobs = await self._counted(batch, self._passes, train)
        return metrics, logprobs if self.identity.rank == 0 else None

    @property
    def _passes(self) -> int:
        """Forward passes that a pass with gradients is worth; frozen weights have no gradients of their own."""
        return 2 if self._setup.trains_adapters else 3

    async def _counted(self, batch: SampleBatch, passes: float, work: Callable[..., Result], *args: object) -> Result:
        """Do work in the thread, and count its seconds and the operations of so many forward passes."""

        def timed() -> tuple[Result, Usage]:
            self._strategy.used = Usage()
            began = time.perf_counter()
            result = work(*args)
            return result, replace(self._strategy.used, seconds=time.perf_counter() - began)

        result, done = await self.in_thread(timed)
        used = self._used
        used.seconds += done.seconds
        used.optimizer_seconds += done.optimizer_seconds
        used.micro_batches += done.micro_batches
        if passes == 1:
            used.forward_seconds += done.seconds
        if self._shape is not None:
            lengths = batch.lengths.astype(np.float64)
            used.operations += passes * self._shape.forward_operations(lengths.sum(), (lengths**2).sum())
        return result

    async def usage(self) -> Usage:
        """Return what finished calls of this rank have computed since the last report, and its memory."""
        used, self._used = self._used, Usage()
        return replace(
            used, cpu_seconds=cpu_seconds(), process_id=os.getpid(), device=device_name(), memory=memory_in_use()
        )

    async def gather(self, version: int, buffer: int, dtype: str, bucket_bytes: int) -> None:
        """Copy the weights, cast to the engine's dtype, into weight-update buffer number ``buffer``."""

        def gather() -> None:
            weights, uncast = self._trainer.published(self._content, getattr(torch, dtype))
            self._publisher.gather(version, buffer, weights, getattr(torch, dtype), bucket_bytes, uncast)
            if self._content == "adapter" and self._base is None:
                self._base = self._trainer.base_checksums(getattr(torch, dtype))

        await self.in_thread(gather)

    async def send(self, version: int) -> Publication:
        """Hand the gathered weights of a version to the transport while training continues. Rank 0 only."""
        return replace(await asyncio.to_thread(self._publisher.send, version), base=self._base)

    async def load_weights(self, publication: Publication) -> None:
        """Replace the weights of a forward-only role by a version that the trainer has sent. Call on all ranks.

        The received bytes are verified against the trainer's checksums; afterwards a sample of tensors is read back
        from the model and verified again. Raises `WeightsDiffer` or `WeightMismatch` naming the tensor.
        """
        await self.in_thread(self._load, publication)

    def _load(self, publication: Publication) -> None:
        parameter_count, checksums, dtypes = 0, dict[str, int | None](), dict[str, torch.dtype]()

        def received() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal parameter_count
            for bucket in self._receiver.receive(publication.handles, publication.version):
                count, found = manifest([bucket])
                parameter_count += count
                checksums.update(found)
                self._check(publication, found)
                for name, tensor in views(bucket):
                    dtypes[name] = tensor.dtype
                    yield name, tensor

        self._strategy.load_weights(received())
        check_weights(self.identity.name, publication, HeldWeights(publication.version, parameter_count, checksums))
        names = list(publication.checksums)
        # A different sample each time, but the same on all ranks, because reading parameters is collective.
        step = max(1, len(names) // HELD_TENSORS)
        sample = names[publication.version % step :: step]
        held = self._strategy.held_weights(sample)
        # A parameter kept in a higher precision holds the received values exactly, so casting it back is lossless.
        self._check(publication, {name: tensor_checksum(tensor.to(dtypes[name])) for name, tensor in held})

    def _check(self, publication: Publication, found: dict[str, int]) -> None:
        """Compare the given checksums with the publication's. Raises `WeightsDiffer`."""
        if any(publication.checksums.get(name) != checksum for name, checksum in found.items()):
            held = HeldWeights(publication.version, publication.parameter_count, {**publication.checksums, **found})
            check_weights(self.identity.name, publication, held)

    @cached_property
    def _receiver(self) -> WeightReceiver:
        return TRANSPORTS[self._transport].receiver()

    async def offer(self, version: int) -> Offer:
        """Return handles to this rank's copy of a version, for an engine that shares its device. Call on all ranks."""
        return self._publisher.offer(version)

    async def push(self, version: int, target: PushTarget, offers: list[Offer]) -> None:
        """Push a version into one paused engine. Rank 0 only."""
        await asyncio.to_thread(self._publisher.push, version, target, offers)

    async def disconnect(self, name: str) -> None:
        """Close the connection to a dead engine. This also ends a push that is waiting for it."""
        await asyncio.to_thread(self._publisher.disconnect, name)

    async def release(self, version: int) -> None:
        """Free the copy of a version that no engine will load again. Rank 0 only."""
        await asyncio.to_thread(self._publisher.release, version)

    async def export(self, folder: str) -> None:
        """Copy the model; rank 0 writes it into the folder in Hugging Face format while training continues."""
        export = await self.in_thread(self._trainer.export)
        if export is None:
            return

        def write(synced: Synced) -> None:
            export.write(folder)
            for path in Path(folder).rglob("*"):
                if path.is_file():
                    sync_file(path, synced)

        self._writing.append(Writing(folder, Path(folder), write))

    async def snapshot(self, folder: str) -> None:
        """Copy this rank's training state, and write it into the folder in the background."""
        snapshot = await self.in_thread(self._trainer.snapshot)
        rank, parent = self.identity.rank, Path(folder)
        path = state_file(parent, rank)
        self._writing.append(Writing(folder, path, lambda synced: write_state(parent, rank, snapshot, synced)))

    async def written(self, folders: Collection[str], seconds: float) -> list[WritingProgress]:
        """Wait up to ``seconds`` for this rank's exports and snapshots into these folders to be on disk.

        Returns the progress of the unfinished ones. Raises `OSError` if a file could not be written.
        """
        asked_for = [writing for writing in self._writing if writing.folder in folders]
        if asked_for:
            tasks = [writing.task for writing in asked_for]
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        over = [writing for writing in asked_for if writing.task.done()]
        for writing in over:
            writing.task.result()
        self._writing = [writing for writing in self._writing if writing not in over]
        return await asyncio.to_thread(lambda: [writing.progress() for writing in asked_for if writing not in over])

    async def offload_states(self) -> None:
        """Move weights and optimizer state to host memory."""
        await self.in_thread(self._strategy.offload_states)

    async def load_states(self) -> None:
        """Move weights and optimizer state back to the device."""
        await self.in_thread(self._strategy.load_states)


def shape_of(setup: TrainerSetup) -> ModelShape | None:
    """Return the sizes of the model; None if they are unknown, or it is one of pictures."""
    if setup.pictures is not None:
        return None
    try:
        return replace(find_shape(setup.model_path), value_head=setup.kind == "value")
    except ShapeUnknown:
        return None


def optimizer_batches(samples: int, plan: TrainPlan, seed: int) -> list[np.ndarray]:
    """Return the sample indices of each optimizer step, over all epochs. Samples are shuffled if an epoch has several
    steps."""
    batches: list[np.ndarray] = []
    size = plan.optimizer_batch_size
    for epoch in range(plan.epochs):
        rows = np.arange(samples)
        if size < samples:
            rows = np.random.default_rng(derive_seed(seed, "optimizer", plan.step, epoch)).permutation(samples)
        batches += [rows[start : start + size] for start in range(0, samples, size)]
    return batches


Synced = Callable[[int], None]
"""Callback that receives the number of additional bytes that have reached the disk."""


@dataclass(frozen=True)
class WritingProgress:
    """Progress of an unfinished write. Two readings are equal if no progress was made between them."""

    path: str
    """The file being written, or a folder over whose files the sizes are summed."""
    size: int
    """File size in bytes."""
    allocated: int
    """Bytes of allocated disk blocks."""
    synced: int
    """Bytes that have been synced to disk."""

    def __str__(self) -> str:
        return f"{self.path} has {self.size / GIB:.3f} GiB, {self.synced / GIB:.3f} of them on the disk"


class Writing:
    """A background write in its own thread."""

    def __init__(self, folder: str, path: Path, work: Callable[[Synced], object]) -> None:
        """Start ``work``, which writes to ``path`` and reports synced bytes. ``folder`` is the folder that the caller
        asked to write into."""
        self.folder = folder
        self._path = path
        self._synced = 0
        self.task = asyncio.create_task(asyncio.to_thread(work, self._count))

    def progress(self) -> WritingProgress:
        """Return the write's current progress."""
        size = allocated = 0
        for file in self._path.iterdir() if self._path.is_dir() else (self._path,):
            with suppress(FileNotFoundError, NotADirectoryError):  # not created yet, or renamed in the meantime
                facts = file.stat()
                if S_ISREG(facts.st_mode):
                    size, allocated = size + facts.st_size, allocated + 512 * facts.st_blocks
        return WritingProgress(str(self._path), size, allocated, self._synced)

    def _count(self, synced: int) -> None:
        self._synced += synced


async def _stored(batch: SampleBatch) -> Any:
    """Copy a batch into the object store, in a thread since a large one takes long, and return the reference.

    Fields that are added meanwhile, such as by a stage beside this one, are left out.
    """
    return await asyncio.to_thread(ray.put, replace(batch, tokens={**batch.tokens}, per_sample={**batch.per_sample}))


class TrainerGroup:
    """All ranks of one trainer or forward-only role, called as one object from the driver."""

    def __init__(self, workers: WorkerGroup, *, start_timeout_seconds: float, call_timeout_seconds: float) -> None:
        self.workers = workers
        self._start_timeout_seconds = start_timeout_seconds
        self._call_timeout_seconds = call_timeout_seconds
        self._together = asyncio.Lock()
        self._folders: set[str] = set()
        """Folders into which exports and snapshots are being written."""
        self.unwritten: list[list[WritingProgress]] = []
        """Per rank: progress of the writes that were unfinished at the last check."""

    async def start(self, spec: TrainerSpec) -> None:
        """Connect the ranks in a process group and load the model on each."""
        first = self.workers.workers[0]
        await self.workers.call_all("start", spec, first.host, first.port, timeout=self._start_timeout_seconds)

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return float32 ``[total_tokens]``: the log-probability of each token under the role's model."""
        return await self.forward("log_probs", batch, temperature)

    async def step_means(self, batch: SampleBatch) -> np.ndarray:
        """Return float32 ``[samples, steps, ...]``: the mean of each denoising step of the pictures."""
        return await self.forward("step_means", batch)

    async def values(self, batch: SampleBatch) -> np.ndarray:
        """Return float32 ``[total_tokens]``: the critic's value of the state before each token."""
        return await self.forward("values", batch)

    async def forward(self, method: str, batch: SampleBatch, *args: object) -> np.ndarray:
        """Return the result of one of `TrainWorker`'s methods without gradients."""
        (found, *_) = await self._call(method, await _stored(batch), *args)
        # Arrays from the object store are read-only; the caller gets a writable copy. A large one takes long.
        return await asyncio.to_thread(np.array, found)

    async def train(self, batch: SampleBatch, objective: Objective, plan: TrainPlan) -> dict[str, float]:
        """Run one training step and return the metrics of rank 0 (equal on all ranks)."""
        return (await self._call("train", await _stored(batch), objective, plan))[0]

    async def train_part(
        self, batch: SampleBatch, objective: Objective, plan: TrainPlan, *, completes: bool
    ) -> tuple[dict[str, float], np.ndarray | None]:
        """Train on a part of a batch; the last part ``completes`` the step. See `TrainStrategy.train_part`."""
        return (await self._call("train_part", await _stored(batch), objective, plan.temperature, completes))[0]

    async def usage(self) -> list[Usage]:
        """Return what each rank has computed since the last call, and its memory."""
        return await self._call_beside("usage")

    async def gather(self, version: int, buffer: int, dtype: str, bucket_bytes: int) -> None:
        """Copy the weights of all ranks into weight-update buffer number ``buffer``; see `TrainWorker.gather`."""
        await self._call("gather", version, buffer, dtype, bucket_bytes)

    async def send(self, version: int) -> Publication:
        """Hand the gathered weights of a version to the transport while training continues."""
        return await self.workers.workers[0].call("send", version, timeout=self._call_timeout_seconds)

    async def load_weights(self, publication: Publication) -> None:
        """Replace the weights of a forward-only role by a version, and verify them; see `TrainWorker.load_weights`."""
        await self._call("load_weights", publication)

    async def push(self, version: int, target: PushTarget) -> None:
        """Push a version into one paused engine while training continues."""
        offers = await self._call_beside("offer", version)
        await self.workers.workers[0].call("push", version, target, offers, timeout=self._call_timeout_seconds)

    def disconnect(self, name: str) -> None:
        """Close rank 0's connection to a dead engine, so that no push waits for it. Does not wait for the result."""
        self.workers.workers[0].tell("disconnect", name)

    def release(self, version: int) -> None:
        """Free rank 0's copy of a version that no engine will load again. Does not wait for the result."""
        self.workers.workers[0].tell("release", version)

    async def export(self, folder: str) -> None:
        """Copy the model, and write it into the folder in Hugging Face format in the background."""
        self._folders.add(folder)
        await self._call("export", folder)

    async def snapshot(self, folder: str) -> None:
        """Copy the training state of all ranks, and write it into the folder in the background."""
        self._folders.add(folder)
        await self._call("snapshot", folder)

    async def written(self) -> None:
        """Wait until all exports and snapshots started so far are on disk, as long as they make progress.

        Raises `WritingStuck` if a rank made no progress for longer than the call timeout.
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
        """Move weights and optimizer state of all ranks to host memory, to free the devices for another role."""
        await self._call("offload_states")

    async def load_states(self) -> None:
        """Move weights and optimizer state of all ranks back to the devices."""
        await self._call("load_states")

    async def watch(self) -> None:
        """Run until a rank dies, then raise `WorkerDied`."""
        await self.workers.watch()

    async def _call(self, method: str, *args: object) -> list[Any]:
        async with self._together:
            return await self._call_beside(method, *args)

    async def _call_beside(self, method: str, *args: object) -> list[Any]:
        """Call all ranks at once, without waiting for running calls. For methods that do not use the model."""
        return await self.workers.call_all(method, *args, timeout=self._call_timeout_seconds)


class BaseOfTrainer:
    """The base model of a LoRA trainer, used as reference or teacher without a second copy of it."""

    def __init__(self, trainer: TrainerGroup) -> None:
        self._trainer = trainer

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return the base model's log-probabilities; see `TrainerGroup.log_probs`."""
        return await self._trainer.forward("base_log_probs", batch, temperature)

    async def step_means(self, batch: SampleBatch) -> np.ndarray:
        """Return the base model's means of denoising steps; see `TrainerGroup.step_means`."""
        return await self._trainer.forward("base_step_means", batch)
