"""The interface of every trainer, one object per rank, and the arguments from which it is built.

A call is collective: all ranks make it with the same batch, each computes its share, and the result is the same as that
of one rank with all samples. Losses are normalised over the whole batch of the call, so neither the number of ranks nor
the split into micro-batches changes the gradient. The options of `fsdp2_train`, and of `hf_infer` as the reference,
are here and not beside the trainers, so that checking them imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field

from roll.configs.errors import ConfigProblem, problems_of
from roll.configs.plugins import made
from roll.configs.roles import ModelArguments, TrainingArguments, WorkerConfig
from roll.configs.strategies import FORWARD_STRATEGIES, TRAINERS, strategy_class
from roll.data.records import SampleBatch

if TYPE_CHECKING:
    import torch

    from roll.trainers.model import ModelExport
    from roll.trainers.state import SavedState, StateSnapshot
    from roll.trainers.step import Objective


class ForwardStrategy(Protocol):
    """One rank of a forward-only role such as the reference: all calls that such a role receives."""

    def initialize(self) -> None:
        """Join the process group, load and shard the model; a trainer also builds its optimizer and schedule."""

    def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return the log-probability of each token given those before it, at ``temperature``.

        Returns float32 ``[total_tokens]`` in the order of the batch, on every rank; 0 at the first token of a sample.
        """

    def offload_states(self) -> None:
        """Move weights and optimizer state to the CPU (gradients do not outlive a step). Nothing to do on a CPU."""

    def load_states(self) -> None:
        """Undo `offload_states`."""

    def shutdown(self) -> None:
        """Leave the process group."""


class TrainStrategy(ForwardStrategy, Protocol):
    """One rank of a trainer. Every trainer can drive a forward-only role as well."""

    def base_log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return `log_probs` of the base model without the adapters (LoRA) that are trained on it. Trainers of adapters
        only."""

    def values(self, batch: SampleBatch) -> np.ndarray:
        """Return the value before each token. Critics only.

        Returns float32 ``[total_tokens]`` in the order of the batch, on every rank; 0 at the first token of a sample.
        """

    def train_step(self, batch: SampleBatch, objective: Objective, temperature: float) -> dict[str, float]:
        """Take one optimizer step, with the loss normalised over all samples of the batch, on whichever rank they are.

        Trains on response tokens; if the batch has a ``loss_mask``, only on those in it. Returns the objective's
        metrics (means over the batch, equal on all ranks), ``grad_norm`` (before clipping), ``learning_rate`` and
        ``skipped_updates`` (1 if the gradient was not finite, or no token was left to train on). Raises ``ValueError``
        if the batch lacks a field, ``RuntimeError`` on a forward-only role.
        """

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors in Hugging Face names, tied ones once. Collective. A tensor is valid until the next one is
        drawn."""

    def export(self) -> ModelExport | None:
        """Return a copy of the model on the CPU of rank 0, None on other ranks. Collective.

        The copy can be written in Hugging Face format while training continues.
        """

    def load(self, path: str) -> None:
        """Load an export into the running model. Collective."""

    def snapshot(self) -> StateSnapshot:
        """Copy this rank's part of the training state (weights, optimizer, schedule) to memory of its own.
        Collective."""

    def restore(self, state: SavedState) -> None:
        """Resume from a snapshot, taken by any number of ranks of this trainer. Collective.

        Raises `UnfitState` if the snapshot is not of this model.
        """


@dataclass(frozen=True)
class Fsdp2Options:
    """Options of `fsdp2_train`."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass and gather them again for the backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    offload: Literal["none", "cpu"] = "none"
    """Place where weights, gradients and optimizer state are kept and optimizer steps are taken. The device
    computes."""
    process_group_timeout_seconds: Annotated[float, Field(gt=0, lt=math.inf)] = 600.0
    """Longest wait in a collective before it fails."""


def parse_fsdp2_options(strategy_config: dict[str, Any], path: str = "strategy_config") -> Fsdp2Options:
    """Return checked options. Raises `ConfigError` with every unknown key and wrong value."""
    return made("fsdp2_train", Fsdp2Options, strategy_config, path)


def check_fsdp2_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path`` of the configuration; empty if nothing."""
    return problems_of(lambda: parse_fsdp2_options(strategy_config, path))


@dataclass(frozen=True)
class HfReplicaOptions:
    """Options of `hf_infer` as a reference."""

    process_group_timeout_seconds: Annotated[float, Field(gt=0, lt=math.inf)] = 600.0
    """Longest wait of a rank for the results of the others."""


def check_replica_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path`` of the configuration; empty if nothing."""
    return problems_of(lambda: made("hf_infer", HfReplicaOptions, strategy_config, path))


ModelKind = Literal["policy", "value"]


@dataclass(frozen=True)
class MicroBatchLimits:
    """Size limits of a micro-batch."""

    max_tokens: int | None
    """Number of padded tokens, or of real ones if samples are packed; None: no limit."""
    max_samples: int
    """Limit on samples; used only if `max_tokens` is None."""
    packed: bool = False
    """True if samples stand one behind the other in a single row, without padding."""


@dataclass(frozen=True)
class TrainerSetup:
    """One rank of a trainer, or of a forward-only role such as the reference."""

    config: WorkerConfig
    """Configuration of the role."""
    model_path: str
    """Folder or hub name."""
    total_optimizer_steps: int
    """Number of optimizer steps in the whole run, for the learning-rate schedule."""
    seed: int
    kind: ModelKind = "policy"
    """Output of the model for each token: log-probabilities, or a value."""
    forward_only: bool = False
    """True if the role has no optimizer, and weights in the precision of `model_args`."""
    rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    """Port at which the ranks meet, on the host of rank 0."""
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def model_args(self) -> ModelArguments:
        """Arguments of the model's loading."""
        return self.config.model_args

    @property
    def training_args(self) -> TrainingArguments:
        """Optimizer and schedule."""
        return self.config.training_args

    @property
    def strategy_config(self) -> dict[str, Any]:
        """Options of the trainer."""
        return self.config.strategy_args.strategy_config

    @property
    def train_limits(self) -> MicroBatchLimits:
        """Limits for passes with gradients."""
        config = self.config
        tokens = config.max_tokens_per_microbatch_in_train if config.use_dynamic_batching_in_train else None
        return MicroBatchLimits(tokens, self.training_args.per_device_train_batch_size, config.use_sequence_packing)

    @property
    def infer_limits(self) -> MicroBatchLimits:
        """Limits for passes without gradients."""
        config = self.config
        tokens = config.max_tokens_per_microbatch_in_infer if config.use_dynamic_batching_in_infer else None
        return MicroBatchLimits(tokens, config.infer_batch_size, config.use_sequence_packing)

    @property
    def trains_adapters(self) -> bool:
        """True if the weights of the model are frozen and adapters (LoRA) are trained instead."""
        return self.model_args.lora_target is not None and not self.forward_only

    @property
    def rendezvous(self) -> str:
        """Address at which the ranks meet, in the format of `torch.distributed`."""
        return f"tcp://{self.master_address}:{self.master_port}"


def build_trainer(name: str, setup: TrainerSetup, own: str | None = None) -> TrainStrategy:
    """Return one rank of the trainer ``name``, or of its subclass ``own``, not yet initialised."""
    return strategy_class(TRAINERS, name, own)(setup)


def build_forward_strategy(name: str, setup: TrainerSetup, own: str | None = None) -> ForwardStrategy:
    """Return one rank of the strategy ``name``, or of its subclass ``own``, for a forward-only role; not yet
    initialised."""
    return strategy_class(FORWARD_STRATEGIES, name, own)(setup)
