"""What all trainers share: a rank's device and process group, AdamW and its schedule, the course of a training step.

Weight decay spares biases, norms and other vectors. The learning rate is a pure function of the number of optimizer
steps taken. No step is wasted at rate 0: warm-up reaches the peak at its last step, and decay ends one step after the
last. A collective that gets no answer fails after a configured time.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll.configs.derived import warmup_steps_of
from roll.configs.roles import TrainingArguments
from roll.data.records import SampleBatch
from roll.trainers.base import ForwardStrategy, MicroBatchLimits, TrainerSetup, TrainStrategy
from roll.trainers.model import HfForward, ModelExport, build_export
from roll.trainers.step import (
    MicroBatch,
    Objective,
    TrainingStep,
    plan_micro_batches,
    results_by_token,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.trainers.state import SavedState, StateSnapshot


def build_optimizer(parameters: Iterable[nn.Parameter], arguments: TrainingArguments) -> torch.optim.AdamW:
    """Return AdamW (arXiv 1711.05101) over the trainable parameters, in one group with decay and one without."""
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
    )


def learning_rate_schedule(arguments: TrainingArguments, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the optimizer step s = 0, 1, ... of ``total_steps``.

    In a warm-up over w steps the rate is (s + 1) / w of the peak. After it, the rate is 1 (``constant``), 1 - x
    (``linear``) or (1 + cos(pi x)) / 2 (``cosine``) of the peak, with x = (s - w) / (total - w). It stays at its end
    value after the last step.
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
    """Scale all gradients to a global norm of at most ``max_norm`` (0: leave them unchanged). Return the norm before
    it, 0-d.

    Gradients may be sharded; the norm is that of the whole model, equal on all ranks. A norm that is not finite leaves
    gradients unfit for use, and the caller must not step.
    """
    owners = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in owners if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(owners, max_norm, norm)
    return norm


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the moments of all parameters. Step counters stay: they are scalars that AdamW keeps on the CPU."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0:
                state[name] = value.to(device)


def join_process_group(setup: TrainerSetup, timeout_seconds: float) -> None:
    """Join the process group of all ranks. Collective. ``timeout_seconds`` is the longest wait in a collective."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo",
        init_method=setup.rendezvous,
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def leave_process_group() -> None:
    """Leave the process group. Do nothing in a process that is in none."""
    if dist.is_initialized():
        dist.destroy_process_group()


class ForwardRank(ForwardStrategy):
    """One rank of a role that computes log-probabilities. Hugging Face models have `model` and `forward`."""

    model: PreTrainedModel
    forward: HfForward

    def __init__(self, setup: TrainerSetup) -> None:
        self.setup = setup

    @abstractmethod
    def initialize(self) -> None: ...

    def join_ranks(self, timeout_seconds: float) -> None:
        """Seed torch, take this rank's device and join the process group. Collective."""
        torch.manual_seed(self.setup.seed)
        self.device = torch.device("cpu")
        if self.setup.device == "cuda":
            self.device = torch.device("cuda", self.setup.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        join_process_group(self.setup, timeout_seconds)

    def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        def logprobs(micro_batches: Iterator[MicroBatch]) -> Iterator[Tensor]:
            return (self.forward.logprobs(micro_batch, temperature) for micro_batch in micro_batches)

        return self._for_each_token(batch, logprobs)

    def offload_states(self) -> None:
        if self._states_move:
            self._move_states(torch.device("cpu"))
            torch.cuda.empty_cache()

    def load_states(self) -> None:
        if self._states_move:
            self._move_states(self.device)

    def shutdown(self) -> None:
        leave_process_group()

    def _rows(self, batch: SampleBatch, limits: MicroBatchLimits) -> list[list[int]]:
        """Return this rank's micro-batches."""
        return plan_micro_batches(batch.lengths, self.setup.world_size, limits)[self.setup.rank]

    def _for_each_token(
        self, batch: SampleBatch, compute: Callable[[Iterator[MicroBatch]], Iterable[Tensor]]
    ) -> np.ndarray:
        """Return `results_by_token` of all ranks' samples. Collective."""
        limits = self.setup.infer_limits
        values = results_by_token(batch, self._rows(batch, limits), self.device, limits.packed, compute)
        # Each token is non-zero on one rank only, so this sum keeps every bit.
        shared = torch.from_numpy(values)
        dist.all_reduce(shared)
        return shared.numpy()

    @property
    def _states_move(self) -> bool:
        """True if `offload_states` has something to move: never on a CPU."""
        return self.setup.device == "cuda"

    def _move_states(self, device: torch.device) -> None:
        self.model.to(device)


class TrainerRank(ForwardRank, TrainStrategy):
    """One rank of a trainer, which may drive a forward-only role as well.

    A subclass loads the model, accumulates gradients and updates. Choosing the tokens that count, normalising the loss,
    the schedule and the accounting are here. An update whose gradient is not finite is skipped and reported, so weights
    never become NaN. Dropout is off, so training sees the distribution that generation sampled from.
    """

    optimizer: torch.optim.Optimizer

    def start_schedule(self) -> None:
        """Begin to count optimizer steps, for the learning rate."""
        self.learning_rate = learning_rate_schedule(self.setup.training_args, self.setup.total_optimizer_steps)
        self.optimizer_steps = 0

    def base_log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        raise RuntimeError("this trainer has no adapters: its weights are not those it began with")

    def values(self, batch: SampleBatch) -> np.ndarray:
        return self._for_each_token(batch, lambda micro_batches: map(self.forward.values, micro_batches))

    def train_step(self, batch: SampleBatch, objective: Objective, temperature: float) -> dict[str, float]:
        if self.setup.forward_only:
            raise RuntimeError("this role is forward-only; it has no optimizer")
        step = TrainingStep.of(batch, objective)
        metrics = self._accumulate(step, self._rows(batch, self.setup.train_limits), temperature)
        learning_rate = self.learning_rate(self.optimizer_steps)
        grad_norm, updated = self._update(learning_rate, nothing_to_learn=step.is_empty)
        self.optimizer_steps += 1
        return {
            **metrics,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "skipped_updates": float(not updated),
        }

    def export(self) -> ModelExport | None:
        copies = {}
        for name, weight in self.named_weights():
            if self.setup.rank == 0:
                copies[name] = weight.to("cpu", copy=True)
        return build_export(self._plain_model(), copies, self.setup) if self.setup.rank == 0 else None

    # Inherited from a protocol they would do nothing, and a run would go on without its weights or its state.
    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, Tensor]]: ...

    @abstractmethod
    def load(self, path: str) -> None: ...

    @abstractmethod
    def snapshot(self) -> StateSnapshot: ...

    @abstractmethod
    def restore(self, state: SavedState) -> None: ...

    def _plain_model(self) -> PreTrainedModel:
        """Return a model of the class and configuration that an export has."""
        return self.model

    @abstractmethod
    def _accumulate(self, step: TrainingStep, rows: Sequence[Sequence[int]], temperature: float) -> dict[str, float]:
        """Add up the gradients of the micro-batches ``rows``, and return the metrics of the batch. Collective."""

    @abstractmethod
    def _update(self, learning_rate: float, nothing_to_learn: bool) -> tuple[float, bool]:
        """Clip; step unless the gradient is not finite or no token was trained on; clear the gradients. Collective.

        Returns the norm before clipping, and True if the weights were updated.
        """

    def _move_states(self, device: torch.device) -> None:
        super()._move_states(device)
        if not self.setup.forward_only:
            move_state(self.optimizer, device)
