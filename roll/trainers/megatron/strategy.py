"""`megatron_train`: one rank of a megatron-core trainer with tensor, pipeline, expert and data parallelism.

The data-parallel size is the number of ranks divided by tensor- times pipeline- times context-parallel size;
data-parallel ranks split the samples, context-parallel ranks the positions of the same samples. Gradients are float32.
With bfloat16, the optimizer holds float32 master weights, which the distributed optimizer shards over data- and
context-parallel ranks. megatron-core's process groups are global to the process, so a process can hold only one trainer
at a time. Only the last pipeline stage has logits and thus results. All ranks must run equally many micro-batches,
because pipeline stages and experts exchange tensors in each.

Saved training states are independent of the parallel layout: float32 weights and moments are stored as slices of the
Hugging Face model's tensors, so a rank of any layout, or of another trainer, finds its share by name. Saving gathers
one parameter at a time, over the ranks that shard its optimizer state.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from roll.algorithms.metrics import PartMetrics
from roll.configs.plugins import made
from roll.configs.roles import TrainingArguments
from roll.data.records import SampleBatch
from roll.trainers.base import MicroBatchLimits, TrainerSetup
from roll.trainers.megatron.context import OwnTargets, own_input
from roll.trainers.megatron.facts import check_layout, read_facts
from roll.trainers.megatron.model import (
    build_chunks,
    packed_arguments,
    parallel_logprobs_and_entropy,
    transformer_config,
    uses_transformer_engine,
)
from roll.trainers.megatron.routing import ExpertReplay
from roll.trainers.megatron.weights import ModelWeights, hugging_face_model
from roll.trainers.options import MegatronOptions
from roll.trainers.state import (
    MOMENTS,
    CheckpointFiles,
    Part,
    SavedState,
    StateSnapshot,
    checkpoint_folder,
    common_updates,
    own_share,
)
from roll.trainers.step import (
    MicroBatch,
    TrainingStep,
    plan_micro_batches,
)
from roll.trainers.trainer import TrainStrategy, move_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

UNUSED_WIDTH = 1
"""Placeholder for micro-batch sizes: required arguments of the schedule, unused with variable sequence lengths."""


def wrap_for_gradients(
    chunks: Sequence[GPTModel], config: TransformerConfig, options: MegatronOptions
) -> list[DistributedDataParallel]:
    """Wrap model chunks in megatron-core's DDP, which sums float32 gradients over ranks once per optimizer step."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap_grad_reduce,
        use_distributed_optimizer=options.use_distributed_optimizer,
    )
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]

    def sum_gradients(chunks: list[DistributedDataParallel], _: Tensor | None = None, **settings: object) -> None:
        # No token count to divide by: losses are already normalised.
        finalize_model_grads(chunks, None, **settings)

    config.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    config.finalize_model_grads_func = sum_gradients
    return wrapped


@contextmanager
def unsynchronised(wrapped: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Within the block, accumulate gradients on each rank without the final reduction over ranks."""
    config = wrapped[0].config
    no_sync, finalize = config.no_sync_func, config.finalize_model_grads_func
    config.no_sync_func = nullcontext if len(wrapped) == 1 else [nullcontext for _ in wrapped]
    config.finalize_model_grads_func = None
    try:
        with ExitStack() as stack:
            for chunk in wrapped:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        config.no_sync_func, config.finalize_model_grads_func = no_sync, finalize


@dataclass(frozen=True)
class Master:
    """The float32 master weight of a parameter (this rank's shard of it, with a distributed optimizer)."""

    tensor: Tensor
    start: int
    """Offset of the shard in the flattened parameter."""
    optimizer: torch.optim.Optimizer


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    arguments: TrainingArguments,
    options: MegatronOptions,
    dtype: torch.dtype,
) -> MegatronOptimizer:
    """Return megatron-core's optimizer for the model chunks of this rank. Collective."""
    config = OptimizerConfig(
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
    )
    return get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)


class Masters:
    """The float32 master weights and moments of this rank, whole or sharded."""

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        chunks: Sequence[DistributedDataParallel],
        *,
        are_parameters: bool,
        split: bool,
    ) -> None:
        """``are_parameters``: the model's own parameters are the masters, because they are float32. ``split``: a
        distributed optimizer shards the masters."""
        parts = optimizer.chained_optimizers
        self._split = split
        if split:
            distributed = (part for part in parts if isinstance(part, DistributedOptimizer))
            self._masters = dict(itertools.chain.from_iterable(map(_shared_out_masters, distributed)))
            return
        owners = {
            id(tensor): part.optimizer for part in parts for group in part.param_groups for tensor in group["params"]
        }
        tensors = {
            parameter: parameter if are_parameters else parameter.main_param
            for chunk in chunks
            for parameter in chunk.parameters()
        }
        self._masters = {parameter: Master(tensor, 0, owners[id(tensor)]) for parameter, tensor in tensors.items()}

    def full_state(self, parameter: nn.Parameter, kind: str, group: dist.ProcessGroup) -> Tensor:
        """Return a parameter's full float32 weight or moment (``kind``), in the parameter's shape.

        Moments exist after the first update. Collective over ``group``, the ranks that shard the parameter's state.
        """
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        master = self._masters.get(parameter)
        if master is not None:
            value = master.tensor if kind == "weight" else master.optimizer.state[master.tensor][kind]
            full[master.start : master.start + value.numel()] = value.detach().flatten()
        if self._split and group.size() > 1:
            dist.all_reduce(full, group=group)
        return full.view(parameter.shape)

    @torch.no_grad()
    def set_state(self, parameter: nn.Parameter, kind: str, full: Tensor) -> None:
        """Write a full tensor, as `full_state` returns it, into this rank's state; a weight also into the model."""
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
        """Set the optimizer's step count, on which Adam's bias correction depends."""
        for master in self._masters.values():
            if isinstance(master.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                master.optimizer.state[master.tensor]["step"] = torch.tensor(float(updates))
                continue
            for group in master.optimizer.param_groups:  # Transformer Engine's Adam: one count per group.
                group["step"] = updates


def _shared_out_masters(optimizer: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Master]]:
    """Yield the parameters of which this rank has a shard, with their masters."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    group, order = optimizer.model_param_group_index_map[parameter]
                    tensor = optimizer.param_groups[group]["params"][order]
                    yield parameter, Master(tensor, ranges["param"].start, optimizer.optimizer)


class MegatronTrainStrategy(TrainStrategy):
    """One rank of the Megatron trainer; see `TrainStrategy` for the contract of each method."""

    optimizer: MegatronOptimizer

    def __init__(self, setup: TrainerSetup) -> None:
        super().__init__(setup)
        self.options = made("megatron_train", MegatronOptions, setup.strategy_config, "strategy_config")

    def initialize(self) -> None:
        """Check the parallel layout, then load this rank's share of the model; see `TrainStrategy`.

        Raises ``ValueError`` for an unsupported model or layout, before any weight is read.
        """
        setup = self.setup
        self.facts = read_facts(setup.model_path, setup.model_args.trust_remote_code, setup.kind)
        check_layout(self.facts, self.options, setup.world_size, forward_only=setup.forward_only)
        self.join_ranks(self.options.process_group_timeout_seconds)
        wanted = setup.config.use_sequence_packing
        padded = uses_transformer_engine(self.options, self.device) if wanted == "auto" else not wanted
        if padded and wanted:
            logger.info("use_sequence_packing: auto computes padded rows with Transformer Engine's layers")
        self.setup = replace(setup, packed=not padded)
        self._split_ranks()
        model_parallel_cuda_manual_seed(setup.seed)
        dtype = getattr(torch, setup.model_args.dtype)
        config = transformer_config(self.facts, self.options, dtype, self.device)
        self.chunks = build_chunks(self.facts, config, self.device)
        self.replay: ExpertReplay | None = None
        if setup.replays_routing:
            if not self.facts.experts:
                raise ValueError(f"router_replay: {setup.model_path} has no experts that a router chooses")
            splits = self.options.sequence_parallel
            self.replay = ExpertReplay(self.chunks, self.device, splits_positions=splits)
        self.weights = ModelWeights(self.chunks, self.facts)
        self.weights.fill(CheckpointFiles(checkpoint_folder(setup.model_path)))
        if setup.forward_only:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
                chunk.eval()
            return
        self.wrapped = wrap_for_gradients(self.chunks, config, self.options)
        self.optimizer = build_optimizer(self.wrapped, setup.training_args, self.options, dtype)
        self.keeps_masters = dtype is torch.bfloat16
        split = self.options.use_distributed_optimizer
        self.masters = Masters(self.optimizer, self.wrapped, are_parameters=not self.keeps_masters, split=split)
        self.updates = 0
        self.start_schedule()

    def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        def logprobs(micro_batch: MicroBatch, logits: Tensor, **_: object) -> Tensor:
            return self._logprobs_and_entropy(micro_batch, logits, temperature)[0]

        return self._for_each_token(batch, lambda parts: self._run(parts, logprobs, forward_only=True))

    def values(self, batch: SampleBatch) -> np.ndarray:
        return self._for_each_token(batch, lambda parts: self._run(parts, _values, forward_only=True))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights: with bfloat16, the model's weights rather than the masters. See `TrainStrategy`."""
        return self.weights.stream()

    def _plain_model(self) -> PreTrainedModel:
        return hugging_face_model(self.setup)

    def load(self, path: str) -> None:
        there = read_facts(path, self.setup.model_args.trust_remote_code, self.setup.kind)
        found, own = ({**vars(facts), **facts.layers, "layers": None} for facts in (there, self.facts))
        differences = [
            f"{name} is {found.get(name)} there, {own.get(name)} here"
            for name in own | found
            if found.get(name) != own.get(name)
        ]
        if differences:
            raise ValueError(f"the model in {path} is another one: {'; '.join(differences)}")
        self.weights.fill(CheckpointFiles(checkpoint_folder(path)))
        if not self.setup.forward_only:
            self.optimizer.reload_model_params()

    def snapshot(self) -> StateSnapshot:
        updates = dict.fromkeys(self.weights.names, self.updates) if self.updates else {}
        facts = {"optimizer_steps": self.optimizer_steps, "updates": updates}
        return StateSnapshot(list(self._state_parts()), facts, self.setup.world_size)

    def _state_parts(self) -> Iterator[Part]:
        for own in self.weights.parameters:
            copies = self.weights.copies(own)
            for kind in _kinds(self.updates):
                full = self.masters.full_state(own.parameter, kind, copies.group)
                for piece, tensor in zip(self.weights.pieces(own), self.weights.split(own, full), strict=True):
                    part = Part(f"{kind}/{piece.name}", tensor, piece.whole_shape, piece.offsets)
                    yield own_share(part, copies.number, copies.count)

    def restore(self, state: SavedState) -> None:
        state.require_weights(self.weights.names)
        self.updates = common_updates(state)
        for own in self.weights.parameters_and_copies:
            for kind in _kinds(self.updates):
                parts = []
                for piece in self.weights.pieces(own):
                    name = f"{kind}/{piece.name}"
                    state.require_shape(name, piece.whole_shape)
                    parts.append(state.read(name, piece.offsets, piece.shape))
                self.masters.set_state(own.parameter, kind, self.weights.join(own, parts))
        if self.updates:
            self.masters.set_updates(self.updates)
        self.optimizer_steps = state.facts["optimizer_steps"]

    def shutdown(self) -> None:
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
        super().shutdown()

    def _split_ranks(self) -> None:
        options = self.options
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=options.tensor_model_parallel_size,
            pipeline_model_parallel_size=options.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=options.virtual_pipeline_model_parallel_size,
            context_parallel_size=options.context_parallel_size,
            expert_model_parallel_size=options.expert_model_parallel_size,
            expert_tensor_parallel_size=options.expert_tensor_size if self.facts.experts else None,
            distributed_timeout_minutes=max(1, round(options.process_group_timeout_seconds / 60)),
            create_gloo_process_groups=False,
        )

    def _rows(self, batch: SampleBatch, limits: MicroBatchLimits) -> list[list[int]]:
        """Return this rank's micro-batches. All ranks that hold parts of the same copy of the model get the same ones.

        The interleaved schedule needs a multiple of the number of stages, so empty micro-batches are added.
        """
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        # The padding of samples in packed rows counts, or many short ones would exceed the memory.
        padding = -batch.lengths % self.options.sample_multiple if limits.packed else 0
        rows = plan_micro_batches(batch.lengths + padding, ranks, limits)[rank]
        group = self.options.pipeline_model_parallel_size if self.options.model_chunks > 1 else 1
        return rows + [[] for _ in range(-len(rows) % group)]

    def _accumulate(self, step: TrainingStep, rows: Sequence[Sequence[int]], temperature: float) -> list[PartMetrics]:
        def loss(micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, PartMetrics]:
            if self.facts.kind == "value":
                outputs: tuple[Tensor, ...] = (_values(micro_batch, output),)
            else:
                outputs = self._logprobs_and_entropy(micro_batch, output, temperature, step.needs_entropy_gradient)
            value, metrics = step.loss(micro_batch, *outputs)
            return value, torch.zeros((), dtype=torch.int, device=value.device), metrics

        if step.is_first:
            for chunk in self.wrapped:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        with nullcontext() if step.is_last else unsynchronised(self.wrapped):
            micro_batches = step.micro_batches(rows, self.device, self.setup.train_limits.packed)
            return self._run(micro_batches, loss, forward_only=False)

    def _joined(
        self, join: Callable[[dist.ProcessGroup | None], tuple[dict[str, float], float]]
    ) -> tuple[dict[str, float], float]:
        """Join on the last pipeline stage, which alone has results, and broadcast to the others."""
        stages = parallel_state.get_pipeline_model_parallel_group()
        joined: list[tuple[dict[str, float], float]] = [({}, 1.0)]
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            joined = [join(parallel_state.get_data_parallel_group())]
        if stages.size() > 1:
            dist.broadcast_object_list(joined, group=stages, group_src=stages.size() - 1, device=self.device)
        return joined[0]

    def _shared(self, values: np.ndarray) -> np.ndarray:
        # Tensor- and context-parallel ranks have the same results; the sum over ranks must include only one of them.
        is_first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        return super()._shared(values if is_first else np.zeros_like(values))

    def _routing_counts(self) -> np.ndarray:
        return super()._shared(np.zeros(2) if self.replay is None else self.replay.take_counts())

    def _divide_gradients(self, divisor: float) -> None:
        for chunk in self.wrapped:
            chunk.scale_gradients(1 / divisor)

    def _run(self, parts: Iterable[MicroBatch], result: Callable[..., Any], forward_only: bool) -> list[Any]:
        """Run all micro-batches. Return their results on the last pipeline stage, [] elsewhere. Collective."""
        multiple, sample_multiple = self.options.width_multiple, self.options.sample_multiple
        micro_batches = [each.widened(multiple, sample_multiple) for each in parts]
        chunks = self.chunks if self.setup.forward_only else self.wrapped
        several = len(chunks) > 1
        if self.replay is not None:
            self.replay.begin(learns=not forward_only)
        iterators = [iter(micro_batches) for _ in chunks]
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward, result),
            data_iterator=iterators if several else iterators[0],
            model=chunks if several else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=UNUSED_WIDTH,
            micro_batch_size=UNUSED_WIDTH,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward(
        self, result: Callable[..., Any], micro_batches: Iterator[MicroBatch], chunk: nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(micro_batches)
        ids = own_input(micro_batch, parallel_state.get_context_parallel_group())
        packed = packed_arguments(micro_batch.packing, self.options)
        # Attention is causal and padding is on the right, so neither a mask nor positions are needed.
        with nullcontext() if self.replay is None else self.replay.forward(micro_batch):
            output = chunk(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=packed)
        return output, partial(result, micro_batch)

    def _logprobs_and_entropy(
        self, micro_batch: MicroBatch, logits: Tensor, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        own = OwnTargets.of(micro_batch, parallel_state.get_context_parallel_group())
        results = parallel_logprobs_and_entropy(
            logits[:, own.positions], own.targets, temperature, self.facts.vocabulary, group, entropy_gradient
        )
        logprobs, entropy = (micro_batch.by_sample(own.gathered(values)) for values in results)
        return logprobs, entropy

    def _update(self, nothing_to_learn: bool) -> tuple[float, bool]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.setup.training_args.weight_decay * group["wd_mult"]
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        updates = not nothing_to_learn and math.isfinite(norm)
        if updates:
            self.optimizer.step()
        self.updates += updates
        return norm, updates

    def _move_states(self, device: torch.device) -> None:
        """Move weights and optimizer state. Gradients are discarded."""
        trains = not self.setup.forward_only
        if trains:
            move_states((state for _, state in self.optimizer.state.items()), device)  # it has no method for this
            for group in self.optimizer.param_groups if self.keeps_masters else ():
                for master in group["params"]:
                    master.data = master.data.to(device)
            for chunk in self.wrapped:
                # These buffers hold the gradients and, with a distributed optimizer, the weights.
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    buffer.offload_to_cpu() if device.type == "cpu" else buffer.reload_from_cpu()
        if not (trains and self.options.use_distributed_optimizer):
            for chunk in self.chunks:
                chunk.to(device)


def _kinds(updates: int) -> tuple[str, ...]:
    """Return the kinds of tensors in a training state. Moments exist from the first update on."""
    return ("weight", *MOMENTS) if updates else ("weight",)


def _values(micro_batch: MicroBatch, output: Tensor, **_: object) -> Tensor:
    """Return the value of the state before each target, float32 ``[rows, kept]``."""
    own = OwnTargets.of(micro_batch, parallel_state.get_context_parallel_group())
    return micro_batch.by_sample(own.gathered(output[:, own.positions, 0].float()))
