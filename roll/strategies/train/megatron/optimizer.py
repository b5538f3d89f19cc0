"""Gradients and AdamW of megatron-core, with the meaning that every trainer here gives them.

The norm is that before clipping; an update whose gradient is not finite is skipped; weight decay spares vectors. With
bfloat16 the optimizer holds float32 weights, shared out over data-parallel ranks by the distributed optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from roll.configs.schema import TrainingArguments
from roll.strategies.train.megatron_options import MegatronOptions


def wrap_for_gradients(
    chunks: Sequence[GPTModel], config: TransformerConfig, options: MegatronOptions
) -> list[DistributedDataParallel]:
    """Model chunks with float32 gradients that data-parallel ranks add up, once for all micro-batches of a step."""
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
    """megatron-core's reduction, without its division by a number of tokens: losses are normalised already."""
    finalize_model_grads(chunks, None, **settings)


class Updater:
    """One optimizer over the model chunks of a rank."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        arguments: TrainingArguments,
        options: MegatronOptions,
        dtype: torch.dtype,
    ) -> None:
        """Collective."""
        self._chunks = list(chunks)
        self._weight_decay = arguments.weight_decay
        self._keeps_masters = dtype is torch.bfloat16
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

    def clear(self) -> None:
        """Forget the gradients of the last step."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def update(self, learning_rate: float, nothing_to_learn: bool) -> tuple[float, bool]:
        """Step unless the gradient is not finite or there is nothing to learn: norm before clipping, and whether the
        step was skipped. Collective."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        skipped = nothing_to_learn or not math.isfinite(norm)
        if not skipped:
            self._optimizer.step()
        return norm, skipped

    def reload_weights(self) -> None:
        """The model's weights were replaced: take them over into the optimizer's float32 ones."""
        self._optimizer.reload_model_params()

    def move_states(self, device: torch.device) -> None:
        """Optimizer state, and the float32 weights that stand beside bfloat16 ones."""
        for optimizer_state in self._optimizer.state.values():
            for name, value in optimizer_state.items():
                # Step counters are scalars that AdamW keeps on the CPU.
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    optimizer_state[name] = value.to(device)
        if self._keeps_masters:
            for group in self._optimizer.param_groups:
                for master in group["params"]:
                    master.data = master.data.to(device)


def free_buffers(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gradients are dropped; weights that lie in one piece for the distributed optimizer go to the CPU."""
    for buffer in _buffers(chunks):
        buffer.offload_to_cpu()


def restore_buffers(chunks: Sequence[DistributedDataParallel]) -> None:
    """Undo `free_buffers`."""
    for buffer in _buffers(chunks):
        buffer.reload_from_cpu()


def _buffers(chunks: Sequence[DistributedDataParallel]) -> list:
    return [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
