"""The process of one trainer rank (or of one rank of a forward-only role).

All ranks of a role get the same calls in the same order. Weights leave a trainer in two steps: `gather` copies them
aside and returns, so that training may go on; `send` takes their checksums and hands them over from another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from roll.algorithms.metrics import mean_over_updates
from roll.configs.schema import WorkerConfig
from roll.data.records import SampleBatch
from roll.data.seeds import derive_seed
from roll.distributed.publishers import build_publisher
from roll.distributed.transports.base import TransportSpec
from roll.distributed.transports.engine_push import PushTarget
from roll.distributed.weights import Publication
from roll.distributed.worker import Worker
from roll.strategies.train import build_train_strategy
from roll.strategies.train.base import TrainStrategy
from roll.strategies.train.checkpoint import ModelKind
from roll.strategies.train.microbatches import MicroBatchLimits
from roll.strategies.train.setup import TrainerSetup
from roll.strategies.train.sharded_state import SavedState, write_state
from roll.strategies.train.step import Objective


@dataclass(frozen=True)
class TrainerSpec:
    """What a trainer process needs to build its strategy."""

    config: WorkerConfig
    model_path: str
    total_optimizer_steps: int
    kind: ModelKind
    forward_only: bool
    seed: int
    transport: TransportSpec
    restore_from: Path | None = None
    """Folder of a training state to go on from."""


@dataclass(frozen=True)
class TrainPlan:
    """How one training step uses its batch."""

    step: int
    epochs: int
    optimizer_batch_size: int
    """Samples per optimizer step."""
    temperature: float


class TrainWorker(Worker):
    """Wraps a `TrainStrategy`."""

    _strategy: TrainStrategy
    _writing: list[asyncio.Task[object]]
    """What is on its way to the disk."""

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
        setup = TrainerSetup(
            model_path=spec.model_path,
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            master_address=master_address,
            master_port=master_port,
            device=self.identity.place.device,
            model_args=config.model_args,
            training_args=config.training_args,
            total_optimizer_steps=spec.total_optimizer_steps,
            train_limits=MicroBatchLimits(
                config.max_tokens_per_microbatch_in_train if config.use_dynamic_batching_in_train else None,
                config.training_args.per_device_train_batch_size,
                config.use_sequence_packing,
            ),
            infer_limits=MicroBatchLimits(
                config.max_tokens_per_microbatch_in_infer if config.use_dynamic_batching_in_infer else None,
                config.infer_batch_size,
                config.use_sequence_packing,
            ),
            kind=spec.kind,
            forward_only=spec.forward_only,
            seed=spec.seed,
            strategy_config=config.strategy_args.strategy_config,
        )
        self._strategy = build_train_strategy(config.strategy_args.strategy_name, setup)
        self._strategy.initialize()
        if spec.restore_from is not None:
            self._strategy.restore(SavedState(spec.restore_from))

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray | None:
        """Log-probabilities of the batch's tokens; from rank 0 only."""
        values = await self.in_thread(self._strategy.log_probs, batch, temperature)
        return values if self.identity.rank == 0 else None

    async def base_log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray | None:
        """The same without the adapters that the trainer trains; from rank 0 only."""
        values = await self.in_thread(self._strategy.base_log_probs, batch, temperature)
        return values if self.identity.rank == 0 else None

    async def values(self, batch: SampleBatch) -> np.ndarray | None:
        """A critic's values of the batch's tokens; from rank 0 only."""
        values = await self.in_thread(self._strategy.values, batch)
        return values if self.identity.rank == 0 else None

    async def train(self, batch: SampleBatch, objective: Objective, plan: TrainPlan) -> dict[str, float]:
        """All optimizer steps of one training step; metrics as by `mean_over_updates`."""
        return await self.in_thread(self._train, batch, objective, plan)

    def _train(self, batch: SampleBatch, objective: Objective, plan: TrainPlan) -> dict[str, float]:
        results = [
            self._strategy.train_step(batch.select(rows), objective, plan.temperature)
            for rows in optimizer_batches(len(batch), plan, self._seed)
        ]
        return mean_over_updates(results)

    async def gather(self, version: int, half: int, dtype: str, bucket_bytes: int) -> None:
        """Copy the weights into a half of the publication's memory, in the engine's dtype."""
        await self.in_thread(self._gather, version, half, dtype, bucket_bytes)

    def _gather(self, version: int, half: int, dtype: str, bucket_bytes: int) -> None:
        weights = self._strategy.named_weights()
        self._publisher.gather(version, half, weights, getattr(torch, dtype), bucket_bytes)

    async def send(self, version: int) -> Publication:
        """Hand the gathered weights of a version over, beside training. Rank 0 only."""
        return await asyncio.to_thread(self._publisher.send, version)

    async def push(self, version: int, target: PushTarget) -> None:
        """Put a version into one engine, which is paused. All ranks."""
        await asyncio.to_thread(self._publisher.push, version, target)

    async def disconnect(self, name: str) -> None:
        """An engine is gone; a push that waits for it ends."""
        await asyncio.to_thread(self._publisher.disconnect, name)

    async def release(self, version: int) -> None:
        """No engine will load this version again. Rank 0 only."""
        await asyncio.to_thread(self._publisher.release, version)

    async def export(self, folder: str) -> None:
        """Copy the model; rank 0 begins to write it into the folder beside training, in Hugging Face format."""
        export = await self.in_thread(self._strategy.export)
        if export is not None:
            self._write(export.write, folder)

    async def snapshot(self, folder: str) -> None:
        """Copy this rank's training state, and begin to write it into the folder beside training."""
        snapshot = await self.in_thread(self._strategy.snapshot)
        self._write(write_state, Path(folder), self.identity.rank, snapshot)

    async def written(self) -> None:
        """Wait until all of that is on the disk. Raises `OSError` if it could not be written."""
        waited_for = list(self._writing)
        await asyncio.gather(*waited_for)
        self._writing = [task for task in self._writing if task not in waited_for]

    def _write(self, work: Callable[..., object], *arguments: object) -> None:
        self._writing.append(asyncio.create_task(asyncio.to_thread(work, *arguments)))

    async def offload_states(self) -> None:
        """Move what is on the device to the host's memory."""
        await self.in_thread(self._strategy.offload_states)

    async def load_states(self) -> None:
        """Undo `offload_states`."""
        await self.in_thread(self._strategy.load_states)


def optimizer_batches(samples: int, plan: TrainPlan, seed: int) -> list[np.ndarray]:
    """Rows of each optimizer step, all epochs. One step per epoch keeps the order; several are shuffled."""
    batches: list[np.ndarray] = []
    size = plan.optimizer_batch_size
    for epoch in range(plan.epochs):
        rows = np.arange(samples)
        if size < samples:
            rows = np.random.default_rng(derive_seed(seed, "optimizer", plan.step, epoch)).permutation(samples)
        batches += [rows[start : start + size] for start in range(0, samples, size)]
    return batches
