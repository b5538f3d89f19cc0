"""The trainer interface (one object per rank), and what all trainers share: AdamW, its schedule, the training step.

Calls are collective: all ranks pass the same batch, each computes its share, and the result is the same as that of a
single rank with all samples. Losses are normalised over the whole batch of the call, so neither the number of ranks nor
the split into micro-batches changes the gradient.

Weight decay is not applied to biases, norms and other vectors. The learning rate is a pure function of the number of
optimizer steps taken. No step has rate 0: warm-up reaches the peak at its last step, and decay would reach its end
value one step after the last. A collective that hangs fails after a configured timeout.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll.algorithms.metrics import PartMetrics
from roll.configs.derived import warmup_steps_of
from roll.configs.plugins import made
from roll.configs.roles import TrainingArguments
from roll.data.records import ROUTED, SampleBatch
from roll.runtime.usage import Usage
from roll.trainers.base import MicroBatchLimits, TrainerSetup
from roll.trainers.model import HfForward, ModelExport, OutputHead, build_export, forward_pass, prepare_model
from roll.trainers.options import HfReplicaOptions
from roll.trainers.step import (
    MicroBatch,
    Objective,
    TrainingStep,
    build_micro_batch,
    combined_metrics,
    combined_sums,
    plan_micro_batches,
    predicted_tokens,
    results_by_token,
)
from roll.weights.adapters import base_checksums
from roll.weights.buckets import WeightContent, WeightMismatch
from roll.weights.checkpoint_names import CheckpointNames

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.trainers.pictures import PictureExport, PictureForward
    from roll.trainers.state import SavedState, StateSnapshot


def build_optimizer(
    parameters: Iterable[nn.Parameter], arguments: TrainingArguments, fused: bool = False
) -> torch.optim.AdamW:
    """Return AdamW (arXiv 1711.05101) over the trainable parameters: one group with weight decay, one without.

    ``fused``: compute each update in one kernel, without temporary tensors of the size of the weights. Step counters
    are then on the parameters' device.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": arguments.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fused=fused,
    )


def learning_rate_schedule(arguments: TrainingArguments, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the optimizer step s = 0, 1, ... of ``total_steps``.

    During a warm-up of w steps, the rate is (s + 1) / w of the peak. Afterwards it is 1 (``constant``), 1 - x
    (``linear``) or (1 + cos(pi x)) / 2 (``cosine``) of the peak, with x = (s - w) / (total - w). It keeps its end value
    after the last step.
    """
    warmup = warmup_steps_of(arguments, total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if arguments.lr_scheduler_type == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - progress if arguments.lr_scheduler_type == "linear" else (1.0 + math.cos(math.pi * progress)) / 2

    return lambda step: arguments.learning_rate * factor(step)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip gradients to a global norm of at most ``max_norm`` (0: no clipping). Return the norm before clipping, 0-d.

    Gradients may be sharded; the norm is that of the whole model and equal on all ranks. If it is not finite, the
    gradients are unusable and the caller must skip the optimizer step.
    """
    owners = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in owners if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(owners, max_norm, norm)
    return norm


def divide_gradients(parameters: Iterable[nn.Parameter], divisor: float) -> None:
    """Divide the gradients in place. They may be sharded."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(divisor)


def move_states(states: Iterable[dict[str, Any]], device: torch.device) -> None:
    """Move optimizer moments to ``device``. Step counters, which are scalars, stay where AdamW keeps them."""
    for state in states:
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0:
                state[name] = value.to(device)


def join_process_group(setup: TrainerSetup, timeout_seconds: float) -> None:
    """Join the process group of all ranks. Collective. ``timeout_seconds`` limits the wait in each later collective."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo",
        init_method=f"tcp://{setup.master_address}:{setup.master_port}",
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def leave_process_group() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class ForwardStrategy(ABC):
    """One rank of a forward-only role, such as the reference.

    `model` and `forward` are set by the strategies that run Hugging Face models.
    """

    model: PreTrainedModel
    forward: HfForward | PictureForward

    def __init__(self, setup: TrainerSetup) -> None:
        self.setup = setup
        self.used = Usage()
        """Optimizer steps and micro-batches of the current call; its caller clears it."""

    @abstractmethod
    def initialize(self) -> None:
        """Join the process group, load and shard the model; in a trainer, also build the optimizer and schedule."""

    def join_ranks(self, timeout_seconds: float) -> None:
        """Seed torch, select this rank's device and join the process group. Collective."""
        torch.manual_seed(self.setup.seed)
        self.device = torch.device("cpu")
        if self.setup.device == "cuda":
            self.device = torch.device("cuda", self.setup.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        join_process_group(self.setup, timeout_seconds)

    def load_model(
        self, gradient_checkpointing: bool = False, mapped: bool = False
    ) -> tuple[PreTrainedModel, OutputHead | None]:
        """Return the model and its head (`prepare_model`); from here on `setup` says if samples are packed."""
        prepared = prepare_model(self.setup, gradient_checkpointing, mapped)
        self.setup = replace(self.setup, packed=prepared.packed)
        return prepared.model, prepared.head

    def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return the log-probability of each token given the preceding ones, at ``temperature``. Collective.

        Returns float32 ``[total_tokens]`` in the order of the batch, on every rank; 0 at the first token of a sample.
        """

        def logprobs(micro_batches: Iterator[MicroBatch]) -> Iterator[Tensor]:
            return (self.forward.logprobs(micro_batch, temperature) for micro_batch in micro_batches)

        return self._for_each_token(batch, logprobs)

    def step_means(self, batch: SampleBatch) -> np.ndarray:
        """Return the mean of each recorded denoising step's Gaussian; models of pictures only. Collective.

        Returns float32 ``[samples, steps, ...]`` in the shape of the latents, on every rank.
        """
        found = np.zeros_like(batch.per_sample["latents"][:, 1:])
        wanted, limits = predicted_tokens(batch), self.setup.infer_limits
        for rows in self._rows(batch, limits):
            micro_batch = build_micro_batch(batch, rows, wanted, (), self.device)
            with torch.no_grad():
                means = self.forward.means(micro_batch).cpu().numpy()
            if rows:
                found[rows] = means
        return self._shared(found)

    @cached_property
    def checkpoint_names(self) -> CheckpointNames:
        """Checkpoint names of the model's parameters, which weight updates use."""
        return CheckpointNames.like(self._plain_model())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights by those of a weight update: full tensors under their checkpoint names. Collective.

        Buffers take the dtype of the received tensors. Raises `WeightMismatch` naming the tensor, if one is missing or
        unknown, has another shape, or would lose precision in the model's dtype. The model must not be used after that.
        """
        parameters, buffers = self._own_tensors()
        for name, weight in self.checkpoint_names.parameters(weights):
            parameter = parameters.get(name)
            if parameter is None:
                buffers[name].data = weight.to(buffers[name].device, copy=True)
                continue
            if torch.promote_types(parameter.dtype, weight.dtype) != parameter.dtype:
                raise WeightMismatch(f"tensor {name!r} is {parameter.dtype} in the model, {weight.dtype} as published")
            with torch.no_grad():
                self._write(parameter, weight)

    def held_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's current values of the tensors with these checkpoint names, on every rank. Collective.

        Each is a view, valid until the next one is requested.
        """
        wanted, (parameters, buffers) = set(names), self._own_tensors()
        owners = {self.checkpoint_names.parts[name].parameter for name in wanted}
        whole = (
            (name, self._read(tensor) if name in parameters else tensor)
            for name, tensor in {**parameters, **buffers}.items()
            if name in owners
        )
        return ((name, held) for name, held in self.checkpoint_names.of(whole) if name in wanted)

    def _own_tensors(self) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """Return what a weight update replaces, by name in the model: (possibly sharded) parameters, and buffers."""
        buffers = {name: self.model.get_buffer(name) for name in self.checkpoint_names.buffers}
        return dict(self.model.named_parameters()), buffers

    def _plain_model(self) -> PreTrainedModel:
        """Return a Hugging Face model with the class and configuration of an export."""
        return self.model

    def _write(self, parameter: Tensor, weight: Tensor) -> None:
        """Copy a full weight into a parameter, or this rank's shard of it."""
        parameter.copy_(weight)

    def _read(self, parameter: Tensor) -> Tensor:
        """Return the full (unsharded) parameter in its dtype. Collective."""
        return parameter.detach()

    def offload_states(self) -> None:
        """Move weights and optimizer state to host memory; gradients do not outlive a step. No-op on a CPU."""
        if self._states_move:
            self._move_states(torch.device("cpu"))
            torch.cuda.empty_cache()

    def load_states(self) -> None:
        """Move weights and optimizer state back to the device."""
        if self._states_move:
            self._move_states(self.device)

    def shutdown(self) -> None:
        """Leave the process group."""
        leave_process_group()

    def _rows(self, batch: SampleBatch, limits: MicroBatchLimits) -> list[list[int]]:
        """Return this rank's micro-batches."""
        return plan_micro_batches(batch.lengths, self.setup.world_size, limits)[self.setup.rank]

    def _for_each_token(
        self, batch: SampleBatch, compute: Callable[[Iterator[MicroBatch]], Iterable[Tensor]]
    ) -> np.ndarray:
        """Return `results_by_token` of all ranks' samples. Collective."""
        limits = self.setup.infer_limits
        return self._shared(results_by_token(batch, self._rows(batch, limits), self.device, limits.packed, compute))

    def _shared(self, values: np.ndarray) -> np.ndarray:
        """Combine per-token values over ranks; each rank passes its own tokens' values and 0 elsewhere. Collective."""
        # Each token is non-zero on one rank only, so this sum keeps every bit.
        shared = torch.from_numpy(values)
        dist.all_reduce(shared)
        return shared.numpy()

    @property
    def _states_move(self) -> bool:
        """True if `offload_states` has anything to move; False on a CPU."""
        return self.setup.device == "cuda"

    def _move_states(self, device: torch.device) -> None:
        self.model.to(device)
        self.forward.move(device)


class HfReplicaStrategy(ForwardStrategy):
    """`hf_infer` as reference: an unsharded transformers model on each rank, for forward passes only.

    Ranks split only the samples of a batch. With no shards to gather, a rank waits for the others only when results are
    combined. Log-probabilities equal those of a forward-only `fsdp2_train` within float32 rounding. The price is
    memory: every device holds all weights.
    """

    def __init__(self, setup: TrainerSetup) -> None:
        """Raise ``ValueError`` if the role trains or is not a policy."""
        super().__init__(setup)
        if not setup.forward_only or setup.kind != "policy":
            raise ValueError("hf_infer only computes log-probabilities; a role that learns needs a trainer")
        self.options = made("hf_infer", HfReplicaOptions, setup.strategy_config, "strategy_config")

    def initialize(self) -> None:
        self.join_ranks(self.options.process_group_timeout_seconds)
        model, head = self.load_model()
        self.model = model.to(self.device)
        self.forward = forward_pass(self.setup, self.model, head, self.device)

    def _rows(self, batch: SampleBatch, limits: MicroBatchLimits) -> list[list[int]]:
        # Passes contain no collectives, so ranks may have different numbers of micro-batches.
        return [samples for samples in super()._rows(batch, limits) if samples]


class TrainStrategy(ForwardStrategy):
    """One rank of a trainer. It can also run a forward-only role.

    Subclasses load the model, accumulate gradients and apply updates. This class selects the trained tokens, normalises
    the loss, and keeps the schedule and the metrics. An update whose gradient norm is not finite is skipped and
    reported, so weights never become NaN. Dropout is off, so training sees the distribution that generation sampled
    from.
    """

    optimizer: torch.optim.Optimizer

    def start_schedule(self) -> None:
        """Set up the learning-rate schedule and the step counter."""
        self.learning_rate = learning_rate_schedule(self.setup.training_args, self.setup.total_optimizer_steps)
        self.optimizer_steps = 0
        self._parts: list[PartMetrics] = []
        """Metrics of the parts of the current batch accumulated so far."""
        self._in_parts = False
        """True while a batch is accumulated in parts and its last part has not come."""

    def without_adapters(self) -> AbstractContextManager[None]:
        """Run the base model, without the LoRA adapters, within the block. Raises ``RuntimeError`` without adapters."""
        raise RuntimeError("this trainer has no adapters: its weights are not those it began with")

    def base_log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return `log_probs` of the base model, without the LoRA adapters. Collective."""
        with self.without_adapters():
            return self.log_probs(batch.unrouted(), temperature)

    def base_step_means(self, batch: SampleBatch) -> np.ndarray:
        """Return `step_means` of the base model, without the LoRA adapters. Collective."""
        with self.without_adapters():
            return self.step_means(batch)

    def values(self, batch: SampleBatch) -> np.ndarray:
        """Return the critic's value of the state before each token. Collective; critics only.

        Returns float32 ``[total_tokens]`` in the order of the batch, on every rank; 0 at the first token of a sample.
        """
        return self._for_each_token(batch, lambda micro_batches: map(self.forward.values, micro_batches))

    def train_step(self, batch: SampleBatch, objective: Objective, temperature: float) -> dict[str, float]:
        """Take one optimizer step on the batch, with the loss normalised over the samples of all ranks. Collective.

        Trains on response tokens, restricted to the batch's ``loss_mask`` if it has one. Returns the objective's
        metrics (means over the batch, equal on all ranks), ``grad_norm`` (before clipping), ``learning_rate`` and
        ``skipped_updates`` (1 if the gradient was not finite or there was no token to train on, else 0). Raises
        ``ValueError`` if the batch lacks a field, ``RuntimeError`` on a forward-only role.
        """
        step = self._step(batch, objective)
        parts = self._accumulate(step, self._trained_rows(batch), temperature)
        metrics, _ = self._joined(lambda group: (combined_metrics(parts, group), 1.0))
        return self._finish(metrics, nothing_to_learn=step.is_empty)

    def train_part(
        self, batch: SampleBatch, objective: Objective, temperature: float, *, completes: bool
    ) -> tuple[dict[str, float], np.ndarray | None]:
        """Accumulate the gradients of a part of a batch, of any size. The last part ``completes`` the optimizer step.

        Gradients are divided by the batch's totals after the last part, so the step equals `train_step` on the whole
        batch except for rounding. Returns the metrics of `train_step` (empty before the last part) and, for a one-pass
        objective, the log-probabilities of the part's response tokens, float32 ``[total_tokens]``; otherwise None.
        """
        step = replace(self._step(batch, objective, is_part=True), is_first=not self._in_parts, is_last=completes)
        self._parts += self._accumulate(step, self._trained_rows(batch), temperature)
        self._in_parts = not completes
        logprobs = None if step.first_logprobs is None else self._shared(step.first_logprobs)
        if not completes:
            return {}, logprobs
        parts, self._parts = self._parts, []
        metrics, divisor = self._joined(lambda group: combined_sums(parts, objective, group))
        if divisor:
            self._divide_gradients(divisor)
        return self._finish(metrics, nothing_to_learn=not divisor), logprobs

    def _step(self, batch: SampleBatch, objective: Objective, is_part: bool = False) -> TrainingStep:
        if self.setup.forward_only:
            raise RuntimeError("this role is forward-only; it has no optimizer")
        if self.setup.replays_routing and ROUTED not in batch.tokens:
            raise ValueError(
                "actor_train.router_replay: the samples have no `routed_experts`, which the engine records"
            )
        return TrainingStep.of(batch, objective, is_part)

    def _trained_rows(self, batch: SampleBatch) -> list[list[int]]:
        rows = self._rows(batch, self.setup.train_limits)
        self.used.micro_batches += len(rows)
        return rows

    def _finish(self, metrics: dict[str, float], nothing_to_learn: bool) -> dict[str, float]:
        learning_rate = self.learning_rate(self.optimizer_steps)
        self._set_learning_rate(learning_rate)
        began = time.perf_counter()
        grad_norm, updated = self._update(nothing_to_learn)
        self.used.optimizer_seconds += time.perf_counter() - began
        self.optimizer_steps += 1
        return {
            **metrics,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "skipped_updates": float(not updated),
            **self._routing_metrics(),
        }

    def _routing_metrics(self) -> dict[str, float]:
        """Return with router replay the share of tokens that the model would have sent to other experts, the mean over
        layers, in the passes since the last call. Collective."""
        if not self.setup.replays_routing:
            return {}
        differing, replayed = self._routing_counts()
        return {"routing_mismatch": float(differing / replayed) if replayed else 0.0}

    def _routing_counts(self) -> np.ndarray:
        """Return `RouterReplay.take_counts` over all ranks. Collective."""
        return self._shared(self.forward.routing_counts()) if isinstance(self.forward, HfForward) else np.zeros(2)

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full weight in float32 with its name in the transformers model, on every rank. Collective.

        Tied weights are yielded once, under the first name. Tensors are gathered one at a time. Each may share the
        model's memory and is valid only until the next one is requested: read it, do not keep or change it.
        """

    def published_weights(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Yield the `named_weights` and persistent buffers under their checkpoint names, which engines load.

        A trainer may cast weights to the engine's ``dtype`` before it gathers them. Buffers keep theirs. Collective.
        """
        return self._as_in_checkpoint(self.named_weights())

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the `named_weights` of the base model, without the LoRA adapters. Collective. Raises ``RuntimeError``
        without adapters."""
        raise RuntimeError("this trainer has no adapters: its weights are not those it began with")

    def published_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the LoRA matrices alone, in the format of `roll.weights.adapters`. Each is valid until the next one is
        requested. Collective. Raises ``RuntimeError`` without adapters."""
        raise RuntimeError("this trainer has no adapters that could be published alone")

    def published(
        self, content: WeightContent, dtype: torch.dtype
    ) -> tuple[Iterator[tuple[str, Tensor]], frozenset[str]]:
        """Return the tensors of a weight update, and the names of those that must not be cast to the engine's
        ``dtype``. Collective."""
        if content == "adapter":
            return self.published_adapters(), frozenset()
        return self.published_weights(dtype), self.checkpoint_names.uncast

    def base_checksums(self, dtype: torch.dtype) -> dict[str, int]:
        """Return checkpoint name -> checksum of the `base_weights`, cast to an engine's ``dtype``, and of the buffers.
        Empty except on rank 0. Collective."""
        tensors = self._as_in_checkpoint(self.base_weights())
        if self.setup.rank == 0:
            return base_checksums(tensors, self.checkpoint_names, dtype)
        deque(tensors, maxlen=0)
        return {}

    def _as_in_checkpoint(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights and the model's persistent buffers under their checkpoint names."""
        buffers = ((name, self._plain_model().get_buffer(name)) for name in self.checkpoint_names.buffers)
        return self.checkpoint_names.of(chain(weights, buffers))

    def export(self) -> ModelExport | PictureExport | None:
        """Return a copy of the model on the CPU of rank 0, None on other ranks. Collective.

        The copy can be written in Hugging Face format while training continues.
        """
        copies = {}
        for name, weight in self.named_weights():
            if self.setup.rank == 0:
                copies[name] = weight.to("cpu", copy=True)
        return build_export(self._plain_model(), copies, self.setup) if self.setup.rank == 0 else None

    @abstractmethod
    def load(self, path: str) -> None:
        """Load an exported model's weights into the running model; optimizer state and schedule stay. Collective.

        Raises ``ValueError`` naming the tensor or the difference if the export does not fit the model.
        """

    @abstractmethod
    def snapshot(self) -> StateSnapshot:
        """Return a copy of this rank's part of the training state (weights, optimizer, schedule). Collective."""

    @abstractmethod
    def restore(self, state: SavedState) -> None:
        """Resume from a saved training state, written by any number of ranks of any trainer. Collective.

        Raises `UnfitState` if the state is of another model.
        """

    @abstractmethod
    def _accumulate(self, step: TrainingStep, rows: Sequence[Sequence[int]], temperature: float) -> list[PartMetrics]:
        """Accumulate the gradients of the micro-batches ``rows``, and return their metrics. Collective."""

    @abstractmethod
    def _divide_gradients(self, divisor: float) -> None:
        """Divide the accumulated gradients."""

    def _joined(
        self, join: Callable[[dist.ProcessGroup | None], tuple[dict[str, float], float]]
    ) -> tuple[dict[str, float], float]:
        """Call ``join`` with the process group of the ranks that split the batch (None: all ranks), and return its
        result on every rank. Collective."""
        return join(None)

    def _set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @abstractmethod
    def _update(self, nothing_to_learn: bool) -> tuple[float, bool]:
        """Clip the gradients, take the optimizer step and clear the gradients. Collective.

        The step is skipped if the gradient norm is not finite or ``nothing_to_learn``. Returns the norm before
        clipping, and True if the weights were updated.
        """

    def _move_states(self, device: torch.device) -> None:
        super()._move_states(device)
        if not self.setup.forward_only:
            move_states(self.optimizer.state.values(), device)
