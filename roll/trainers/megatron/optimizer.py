"""Gradients and AdamW of megatron-core, with the semantics that all trainers here share.

The reported norm is the one before clipping. An update whose gradient is not finite is skipped. Weight decay spares
vectors. With bfloat16 the optimizer holds float32 weights, which the distributed optimizer splits over data-parallel
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from roll.configs.roles import TrainingArguments
from roll.trainers.megatron.facts import MegatronOptions


def wrap_for_gradients(
    chunks: Sequence[GPTModel], config: TransformerConfig, options: MegatronOptions
) -> list[DistributedDataParallel]:
    """Wrap model chunks so that data-parallel ranks sum float32 gradients once for all micro-batches of a step."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap_grad_reduce,
        use_distributed_optimizer=options.use_distributed_optimizer,
    )
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    config.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    config.finalize_model_grads_func = _sum_gradients
    return wrapped


def _sum_gradients(chunks: list[DistributedDataParallel], _: torch.Tensor | None = None, **settings: object) -> None:
    """Reduce gradients with megatron-core, without dividing by a number of tokens: losses are already normalised."""
    finalize_model_grads(chunks, None, **settings)


@dataclass(frozen=True)
class Master:
    """The float32 weight that the optimizer updates for a parameter, or this rank's part of it."""

    tensor: Tensor
    start: int
    """Offset in the flattened parameter."""
    optimizer: torch.optim.Optimizer


class Updater:
    """One optimizer over the model chunks of a rank."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        arguments: TrainingArguments,
        options: MegatronOptions,
        dtype: torch.dtype,
    ) -> None:
        """Build the optimizer. Collective."""
        self._chunks = list(chunks)
        self._weight_decay = arguments.weight_decay
        self._keeps_masters = dtype is torch.bfloat16
        self._shares_out = options.use_distributed_optimizer
        self._optimizer: MegatronOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=arguments.learning_rate,
                weight_decay=arguments.weight_decay,
                adam_beta1=arguments.adam_beta1,
                adam_beta2=arguments.adam_beta2,
                adam_eps=arguments.adam_epsilon,
                clip_grad=arguments.max_grad_norm,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=options.use_distributed_optimizer,
            ),
            self._chunks,
            use_gloo_process_groups=False,
        )
        self._masters = dict(self._find_masters())
        self.updates = 0
        """Number of updates; skipped steps do not count."""

    def full_state(self, parameter: nn.Parameter, kind: str, group: dist.ProcessGroup) -> Tensor:
        """Return a parameter's float32 weight, or a moment of it, in the parameter's shape.

        Moments exist after the first update. Collective over ``group``, the ranks that split the parameter's state.
        """
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        master = self._masters.get(parameter)
        if master is not None:
            value = master.tensor if kind == "weight" else master.optimizer.state[master.tensor][kind]
            full[master.start : master.start + value.numel()] = value.detach().flatten()
        if self._shares_out and group.size() > 1:
            dist.all_reduce(full, group=group)
        return full.view(parameter.shape)

    @torch.no_grad()
    def set_state(self, parameter: nn.Parameter, kind: str, full: Tensor) -> None:
        """Store a tensor from `full_state` in this rank's part of the state; a weight also in the model."""
        if kind == "weight":
            parameter.copy_(full)
        master = self._masters.get(parameter)
        if master is None:
            return
        part = full.flatten()[master.start : master.start + master.tensor.numel()].view_as(master.tensor)
        if kind == "weight":
            master.tensor.copy_(part)
        else:
            master.optimizer.state[master.tensor][kind] = part.to(master.tensor.device, torch.float32, copy=True)

    def set_updates(self, updates: int) -> None:
        """Declare that the moments are those after this number of updates."""
        self.updates = updates
        for master in self._masters.values():
            if isinstance(master.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                master.optimizer.state[master.tensor]["step"] = torch.tensor(float(updates))
                continue
            for group in master.optimizer.param_groups:  # Adam of Transformer Engine counts for a whole group.
                group["step"] = updates

    def _find_masters(self) -> Iterator[tuple[nn.Parameter, Master]]:
        for part in self._optimizer.chained_optimizers:
            if isinstance(part, DistributedOptimizer):
                yield from _shared_out_masters(part)
        if self._shares_out:
            return
        owners = {
            id(tensor): part.optimizer
            for part in self._optimizer.chained_optimizers
            for group in part.param_groups
            for tensor in group["params"]
        }
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                tensor = parameter.main_param if self._keeps_masters else parameter
                yield parameter, Master(tensor, 0, owners[id(tensor)])

    def clear(self) -> None:
        """Clear the gradients of the last step."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def update(self, learning_rate: float, nothing_to_learn: bool) -> tuple[float, bool]:
        """Step unless the gradient is not finite or there is nothing to learn. Collective.

        Returns the norm before clipping, and True if the step was skipped.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        skipped = nothing_to_learn or not math.isfinite(norm)
        if not skipped:
            self._optimizer.step()
            self.updates += 1
        return norm, skipped

    def reload_weights(self) -> None:
        """Copy the model's weights, which were replaced, to the optimizer's float32 weights."""
        self._optimizer.reload_model_params()

    def move_states(self, device: torch.device) -> None:
        """Move optimizer state, and the float32 weights that exist beside bfloat16 ones."""
        for _, optimizer_state in self._optimizer.state.items():  # no dictionary: it has nothing else
            for name, value in optimizer_state.items():
                # Step counters are scalars that AdamW keeps on the CPU.
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    optimizer_state[name] = value.to(device)
        if self._keeps_masters:
            for group in self._optimizer.param_groups:
                for master in group["params"]:
                    master.data = master.data.to(device)


def _shared_out_masters(optimizer: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Master]]:
    """Yield the parameters that this rank has a part of, with their masters."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    group, order = optimizer.model_param_group_index_map[parameter]
                    tensor = optimizer.param_groups[group]["params"][order]
                    yield parameter, Master(tensor, ranges["param"].start, optimizer.optimizer)


def free_buffers(chunks: Sequence[DistributedDataParallel]) -> None:
    """Drop the gradients, and move weights in buffers of the distributed optimizer to the CPU."""
    for buffer in _buffers(chunks):
        buffer.offload_to_cpu()


def restore_buffers(chunks: Sequence[DistributedDataParallel]) -> None:
    """Undo `free_buffers`."""
    for buffer in _buffers(chunks):
        buffer.reload_from_cpu()


def _buffers(chunks: Sequence[DistributedDataParallel]) -> list[Any]:
    return [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
