"""The process of one trainer rank (or of one rank of a forward-only role).

All ranks of a role get the same calls in the same order. Weights leave a trainer in two steps: `gather` copies them
into the transport's memory and returns, so that training may go on; `send` takes their checksums and hands them over
from another thread.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from roll.algorithms.metrics import mean_over_updates
from roll.algorithms.objective import PolicyObjective
from roll.configs.schema import WorkerConfig
from roll.data.records import SampleBatch
from roll.data.seeds import derive_seed
from roll.distributed.transports import TRANSPORTS
from roll.distributed.transports.base import TransportSpec
from roll.distributed.weights import Publication
from roll.distributed.worker import Worker
from roll.strategies.infer.base import WeightBucket
from roll.strategies.train import build_train_strategy
from roll.strategies.train.base import TrainStrategy
from roll.strategies.weights import manifest, pack_buckets


@dataclass(frozen=True)
class TrainerSpec:
    """What a trainer process needs to build its strategy."""

    config: WorkerConfig
    model_path: str
    total_optimizer_steps: int
    forward_only: bool
    seed: int
    transport: TransportSpec


@dataclass(frozen=True)
class TrainPlan:
    """How one training step uses its batch."""

    step: int
    epochs: int
    optimizer_batch_size: int
    """Samples per optimizer step."""
    temperature: float


@dataclass(frozen=True)
class Gathered:
    """Weights copied out of the trainer, waiting to be sent."""

    half: int
    buckets: list[WeightBucket]
    seconds: float


class TrainWorker(Worker):
    """Wraps a `TrainStrategy`."""

    _strategy: TrainStrategy

    async def start(self, spec: TrainerSpec, master_address: str, master_port: int) -> None:
        """Join the other ranks and load the model."""
        self._seed = spec.seed
        self._gathered: dict[int, Gathered] = {}
        self._sender = TRANSPORTS[spec.transport.name].sender(spec.transport)
        await self.in_thread(self._start, spec, master_address, master_port)

    def _start(self, spec: TrainerSpec, master_address: str, master_port: int) -> None:
        self.set_threads()
        config = spec.config
        self._strategy = build_train_strategy(
            config.strategy_args.strategy_name,
            spec.model_path,
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            master_address=master_address,
            master_port=master_port,
            device=self.identity.place.device,
            model_args=config.model_args,
            training_args=config.training_args,
            total_optimizer_steps=spec.total_optimizer_steps,
            max_tokens_per_micro_batch_train=(
                config.max_tokens_per_microbatch_in_train if config.use_dynamic_batching_in_train else None
            ),
            micro_batch_size_train=config.training_args.per_device_train_batch_size,
            max_tokens_per_micro_batch_infer=(
                config.max_tokens_per_microbatch_in_infer if config.use_dynamic_batching_in_infer else None
            ),
            micro_batch_size_infer=config.infer_batch_size,
            forward_only=spec.forward_only,
            seed=spec.seed,
            strategy_config=config.strategy_args.strategy_config,
        )
        self._strategy.initialize()

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray | None:
        """Log-probabilities of the batch's tokens; from rank 0 only."""
        values = await self.in_thread(self._strategy.log_probs, batch, temperature)
        return values if self.identity.rank == 0 else None

    async def train(self, batch: SampleBatch, objective: PolicyObjective, plan: TrainPlan) -> dict[str, float]:
        """All optimizer steps of one training step; metrics as by `mean_over_updates`."""
        return await self.in_thread(self._train, batch, objective, plan)

    def _train(self, batch: SampleBatch, objective: PolicyObjective, plan: TrainPlan) -> dict[str, float]:
        results = [
            self._strategy.train_step(batch.select(rows), objective, plan.temperature)
            for rows in optimizer_batches(len(batch), plan, self._seed)
        ]
        return mean_over_updates(results)

    async def gather(self, version: int, half: int, dtype: str, bucket_bytes: int) -> None:
        """Copy the weights into a half of the transport's memory, in the engine's dtype (on rank 0; the other ranks
        join the collective)."""
        await self.in_thread(self._gather, version, half, dtype, bucket_bytes)

    def _gather(self, version: int, half: int, dtype: str, bucket_bytes: int) -> None:
        started = time.perf_counter()
        weights = self._strategy.named_weights()
        if self.identity.rank != 0:
            for _ in weights:
                pass
            return
        self._sender.begin(half)
        allocate = partial(self._sender.allocate, half)
        buckets = list(pack_buckets(weights, bucket_bytes, float_dtype=getattr(torch, dtype), allocate=allocate))
        self._gathered[version] = Gathered(half, buckets, time.perf_counter() - started)

    async def send(self, version: int) -> Publication:
        """Hand the gathered weights of a version to the transport, beside training. Rank 0 only."""
        return await asyncio.to_thread(self._send, version)

    def _send(self, version: int) -> Publication:
        started = time.perf_counter()
        gathered = self._gathered.pop(version)
        parameter_count, checksums = manifest(gathered.buckets)
        handles = self._sender.send(gathered.half, version, gathered.buckets)
        return Publication(
            version=version,
            handles=handles,
            parameter_count=parameter_count,
            checksums=checksums,
            total_bytes=sum(bucket.data.nbytes for bucket in gathered.buckets),
            seconds={"gather": gathered.seconds, "send": time.perf_counter() - started},
        )

    async def release(self, version: int) -> None:
        """No engine will load this version again. Rank 0 only."""
        await asyncio.to_thread(self._sender.release, version)

    async def save(self, path: str) -> None:
        """Export the model in Hugging Face format."""
        await self.in_thread(self._strategy.save, path)

    async def offload_states(self) -> None:
        await self.in_thread(self._strategy.offload_states)

    async def load_states(self) -> None:
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
