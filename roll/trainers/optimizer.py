"""AdamW and its learning-rate schedule, and one rank among the others: its device and its process group.

Weight decay spares biases, norms and other vectors. The learning rate is a pure function of the number of optimizer
steps taken. No step is wasted at rate 0: warm-up reaches the peak at its last step, and decay ends one step after the
last. A collective that gets no answer fails after a configured time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll.configs.derived import warmup_steps_of
from roll.configs.roles import TrainingArguments
from roll.trainers.base import TrainerSetup


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


def pick_device(setup: TrainerSetup) -> torch.device:
    """Return the device of this rank, and make it the current one on GPUs."""
    if setup.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", setup.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


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


def joined_over_ranks(values: np.ndarray) -> np.ndarray:
    """Join the ``values`` of all ranks. Each rank has zeros where another one computed. Collective; changes its
    argument.

    An element is non-zero on one rank only, so this sum keeps every bit.
    """
    shared = torch.from_numpy(values)
    dist.all_reduce(shared)
    return shared.numpy()
