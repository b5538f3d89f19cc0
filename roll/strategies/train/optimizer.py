"""AdamW and its learning-rate schedule, from training arguments.

Weight decay spares biases, norms and other vectors. The learning rate is a pure function of the number of optimizer
steps taken. No step is wasted at rate 0: warm-up reaches the peak at its last step, and decay ends one step after the
last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll.configs.derived import warmup_steps_of
from roll.configs.schema import TrainingArguments


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
