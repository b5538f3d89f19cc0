"""`megatron_train`: one rank of a trainer whose model is split over tensor-, pipeline- and expert-parallel ranks.

Data-parallel ranks split the samples; their number is that of all ranks divided by the tensor- times the
pipeline-parallel size. All semantics are those of `fsdp2_train`: losses are normalised over the whole batch, gradients
are float32, an update that is not finite is skipped, dropout is off. megatron-core keeps its process groups per
process, so a process holds one trainer at a time. Only the last pipeline stage has logits, so only that stage has
results. All ranks must run equally many micro-batches, because pipelines and experts exchange tensors in each.

The training state does not depend on the layout in which it was saved: float32 weights and moments as parts of tensors
of the Hugging Face model, of which each rank of another layout, or of any other trainer, finds its share by name. One
parameter is gathered at a time, over the ranks that split its optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from roll.algorithms.metrics import PartMetrics
from roll.data.records import SampleBatch
from roll.trainers.base import TrainerSetup
from roll.trainers.checkpoint_files import CheckpointFiles, checkpoint_folder
from roll.trainers.megatron.facts import ModelFacts, check_layout, parse_options, read_facts
from roll.trainers.megatron.model import CHUNK_ELEMENTS, build_chunks, parallel_logprobs_and_entropy, transformer_config
from roll.trainers.megatron.optimizer import Updater, free_buffers, restore_buffers, wrap_for_gradients
from roll.trainers.megatron.weights import ModelWeights, Piece, hugging_face_model
from roll.trainers.model import ModelExport, build_export, copied_weights
from roll.trainers.optimizer import join_process_group, learning_rate_schedule, leave_process_group, pick_device
from roll.trainers.state import MOMENTS, Part, SavedState, StateSnapshot, common_updates, own_share
from roll.trainers.step import (
    MicroBatch,
    MicroBatchLimits,
    Objective,
    TrainingStep,
    build_micro_batch,
    combined_metrics,
    plan_micro_batches,
    predicted_tokens,
    scatter_to_tokens,
)

UNUSED_WIDTH = 1
"""Placeholder for the size of a micro-batch. The schedule asks for it, and does not read it if sizes vary."""


class Passes:
    """Runs the model chunks of this rank."""

    def __init__(self, chunks: Sequence[nn.Module], config: TransformerConfig, facts: ModelFacts) -> None:
        self._chunks = list(chunks)
        self._config = config
        self._vocabulary = facts.vocabulary
        self._kind = facts.kind
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.chunk_elements = CHUNK_ELEMENTS
        """Number of a rank's logits that are handled at a time."""

    def logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """Return the log-probabilities ``[rows, kept]`` of each micro-batch on the last stage; nothing on others.
        Collective."""

        def result(micro_batch: MicroBatch, logits: Tensor, **_: object) -> Tensor:
            return self._logprobs_and_entropy(micro_batch, logits, temperature, False)[0]

        with torch.no_grad():
            return self._run(micro_batches, result, forward_only=True)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the values ``[rows, kept]`` of each micro-batch on the last stage; nothing on others. Collective.

        For value models only.
        """

        def result(micro_batch: MicroBatch, output: Tensor, **_: object) -> Tensor:
            return _values(micro_batch, output)

        with torch.no_grad():
            return self._run(micro_batches, result, forward_only=True)

    def accumulate(
        self, step: TrainingStep, micro_batches: Sequence[MicroBatch], temperature: float
    ) -> list[PartMetrics]:
        """Sum the gradients of all micro-batches of all ranks. Return metrics on the last stage, nothing on others."""

        def loss(micro_batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, PartMetrics]:
            if self._kind == "value":
                outputs: tuple[Tensor, ...] = (_values(micro_batch, logits),)
            else:
                outputs = self._logprobs_and_entropy(micro_batch, logits, temperature, step.needs_entropy_gradient)
            value, metrics = step.loss(micro_batch, *outputs)
            return value, torch.zeros((), dtype=torch.int, device=value.device), metrics

        return self._run(micro_batches, loss, forward_only=False)

    def _run(self, micro_batches: Sequence[MicroBatch], result: Callable[..., Any], forward_only: bool) -> list[Any]:
        schedule = get_forward_backward_func()
        iterators = [iter(micro_batches) for _ in self._chunks]
        return schedule(
            forward_step_func=partial(self._forward, result),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
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
        # Attention is causal and padding is on the right, so neither a mask nor positions are needed.
        output = chunk(input_ids=self._input(micro_batch), position_ids=None, attention_mask=None)
        return output, partial(result, micro_batch)

    def _input(self, micro_batch: MicroBatch) -> Tensor:
        """Return the token ids, padded to a multiple of the shares that sequence parallelism splits positions into."""
        ids = micro_batch.input_ids
        shares = self._config.tensor_model_parallel_size if self._config.sequence_parallel else 1
        return functional.pad(ids, (0, -ids.shape[1] % shares))

    def _logprobs_and_entropy(
        self, micro_batch: MicroBatch, logits: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        return parallel_logprobs_and_entropy(
            logits[:, micro_batch.positions],
            micro_batch.targets,
            temperature,
            self._vocabulary,
            self._tensor_group,
            entropy_gradient,
            self.chunk_elements,
        )


def _values(micro_batch: MicroBatch, output: Tensor) -> Tensor:
    """Return float32 ``[rows, kept]``: the value of the state before each target."""
    return output[:, micro_batch.positions, 0].float()


def on_last_stage() -> bool:
    """Return True if this rank has logits."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def from_last_stage(value: dict[str, float] | None, device: torch.device) -> dict[str, float]:
    """Return the last stage's ``value`` on all stages. Collective. Raises ``ValueError`` if the last stage has none."""
    group = parallel_state.get_pipeline_model_parallel_group()
    box = [value]
    if group.size() > 1:
        dist.broadcast_object_list(box, group=group, group_src=group.size() - 1, device=device)
    (last,) = box
    if last is None:
        raise ValueError("the last stage has nothing to tell the others")
    return last


def state_parts(weights: ModelWeights, updater: Updater) -> Iterator[Part]:
    """Yield copies of this rank's part of the state. Collective."""
    for own in weights.parameters:
        copies = weights.copies(own)
        for kind in _kinds(updater.updates):
            full = updater.full_state(own.parameter, kind, copies.group)
            for piece, tensor in zip(weights.pieces(own), weights.split(own, full), strict=True):
                part = Part(f"{kind}/{piece.name}", tensor, piece.whole_shape, piece.offsets)
                yield own_share(part, copies.number, copies.count)


def update_counts(weights: ModelWeights, updater: Updater) -> dict[str, int]:
    """Return how often each weight was updated; empty before the first update."""
    return dict.fromkeys(weights.names, updater.updates) if updater.updates else {}


def restore_state(weights: ModelWeights, updater: Updater, state: SavedState) -> None:
    """Restore weights and optimizer from a state. Raises `UnfitState` if the state is not of this model."""
    state.require_weights(weights.names)
    updates = common_updates(state)
    for own in weights.parameters_and_copies:
        for kind in _kinds(updates):
            parts = [_read(state, kind, piece) for piece in weights.pieces(own)]
            updater.set_state(own.parameter, kind, weights.join(own, parts))
    if updates:
        updater.set_updates(updates)


def _kinds(updates: int) -> tuple[str, ...]:
    return ("weight", *MOMENTS) if updates else ("weight",)


def _read(state: SavedState, kind: str, piece: Piece) -> Tensor:
    name = f"{kind}/{piece.name}"
    state.require_shape(name, piece.whole_shape)
    if 0 in piece.shape:  # nothing but padding
        return torch.empty(piece.shape)
    return state.read(name, piece.offsets, piece.shape)


class MegatronTrainStrategy:
    """One rank of the trainer; see `TrainStrategy` for the contract of each method."""

    def __init__(self, setup: TrainerSetup) -> None:
        self.setup = setup
        self.options = parse_options(setup.strategy_config)

    def initialize(self) -> None:
        """Check the layout, join the process groups, load this rank's share, build optimizer and schedule. Collective.

        Raises ``ValueError`` for an impossible model or layout before any weight is read.
        """
        setup = self.setup
        self.facts = read_facts(setup.model_path, setup.model_args.trust_remote_code, setup.kind)
        check_layout(self.facts, self.options, setup.world_size, forward_only=setup.forward_only)
        self.device = pick_device(setup)
        self._join_groups()
        torch.manual_seed(setup.seed)
        model_parallel_cuda_manual_seed(setup.seed)
        dtype = getattr(torch, setup.model_args.dtype)
        config = transformer_config(self.facts, self.options, dtype, self.device)
        self.chunks = build_chunks(self.facts, config, self.device)
        self.weights = ModelWeights(self.chunks, self.facts)
        self._fill(setup.model_path)
        if setup.forward_only:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
                chunk.eval()
            self.passes = Passes(self.chunks, config, self.facts)
            return
        self.wrapped = wrap_for_gradients(self.chunks, config, self.options)
        self.passes = Passes(self.wrapped, config, self.facts)
        self.updater = Updater(self.wrapped, setup.training_args, self.options, dtype)
        self.learning_rate = learning_rate_schedule(setup.training_args, setup.total_optimizer_steps)
        self.optimizer_steps = 0

    def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return the log-probability of each token given those before it: float32 ``[total_tokens]``, on every rank."""
        return self._for_each_token(batch, lambda parts: self.passes.logprobs(parts, temperature))

    def values(self, batch: SampleBatch) -> np.ndarray:
        """Return the critic's value before each token: float32 ``[total_tokens]``, on every rank."""
        return self._for_each_token(batch, self.passes.values)

    def _for_each_token(
        self, batch: SampleBatch, compute: Callable[[Sequence[MicroBatch]], list[Tensor]]
    ) -> np.ndarray:
        """Return ``compute``'s results for the targets of each micro-batch, at the targets' places. Collective."""
        wanted = predicted_tokens(batch)
        values = np.zeros(len(wanted), dtype=np.float32)
        rows = self._rows(batch, self.setup.infer_limits)
        micro_batches = [build_micro_batch(batch, part, wanted, (), self.device) for part in rows]
        results = compute(micro_batches)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            for part, micro_batch, result in zip(rows, micro_batches, results, strict=bool(results)):
                scatter_to_tokens(result.cpu().numpy(), micro_batch.mask.cpu().numpy(), batch, part, values)
        # Each token is non-zero on one rank only, so this sum keeps every bit.
        shared = torch.from_numpy(values)
        dist.all_reduce(shared)
        return shared.numpy()

    def train_step(self, batch: SampleBatch, objective: Objective, temperature: float) -> dict[str, float]:
        """Take one optimizer step. The loss is normalised over all samples of the batch, on whichever rank they are.

        Trains on response tokens; if the batch has a ``loss_mask``, only on those in it. Returns the objective's
        metrics, ``grad_norm`` (before clipping), ``learning_rate`` and ``skipped_updates`` (1 if the gradient was not
        finite, or no token was left to train on). Raises ``ValueError`` if the batch lacks a field, ``RuntimeError`` on
        a forward-only role.
        """
        if self.setup.forward_only:
            raise RuntimeError("this role is forward-only; it has no optimizer")
        step = TrainingStep.of(batch, objective)
        self.updater.clear()
        micro_batches = list(step.micro_batches(self._rows(batch, self.setup.train_limits), self.device))
        parts = self.passes.accumulate(step, micro_batches, temperature)
        metrics = None
        if on_last_stage():
            metrics = combined_metrics(parts, parallel_state.get_data_parallel_group())
        metrics = from_last_stage(metrics, self.device)
        learning_rate = self.learning_rate(self.optimizer_steps)
        grad_norm, skipped = self.updater.update(learning_rate, nothing_to_learn=step.is_empty)
        self.optimizer_steps += 1
        return {
            **metrics,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "skipped_updates": float(skipped),
        }

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full float32 tensors in the names of the Hugging Face model, tied ones once, on every rank. Collective.

        A tensor is valid until the next one is drawn.
        """
        return self.weights.stream()

    def export(self) -> ModelExport | None:
        """Return weights, configuration and tokenizer; see `TrainStrategy`.

        With bfloat16 the weights are those that the model computes with.
        """
        weights = copied_weights(self.named_weights(), self.setup)
        return None if weights is None else build_export(hugging_face_model(self.setup), weights, self.setup)

    def load(self, path: str) -> None:
        """Load the weights of an export; optimizer state and schedule stay. Collective.

        Raises ``ValueError`` naming the differences if the export does not fit the model.
        """
        found = vars(read_facts(path, self.setup.model_args.trust_remote_code, self.setup.kind))
        differences = [
            f"{name} is {found[name]} there, {value} here" for name, value in vars(self.facts).items()
            if found[name] != value
        ]  # fmt: skip
        if differences:
            raise ValueError(f"the model in {path} is another one: {'; '.join(differences)}")
        self._fill(path)
        if not self.setup.forward_only:
            self.updater.reload_weights()

    def snapshot(self) -> StateSnapshot:
        """Copy this rank's part of each tensor; see `TrainStrategy`."""
        facts = {"optimizer_steps": self.optimizer_steps, "updates": update_counts(self.weights, self.updater)}
        return StateSnapshot(list(state_parts(self.weights, self.updater)), facts, self.setup.world_size)

    def restore(self, state: SavedState) -> None:
        """Resume from a snapshot, which may come from another layout; see `TrainStrategy`."""
        restore_state(self.weights, self.updater, state)
        self.optimizer_steps = state.facts["optimizer_steps"]

    def offload_states(self) -> None:
        """Move weights and optimizer state to the CPU and drop gradients. Nothing to do on a CPU."""
        if self.setup.device == "cuda":
            if not self.setup.forward_only:
                self.updater.move_states(torch.device("cpu"))
                free_buffers(self.wrapped)
            self._move_weights(torch.device("cpu"))
            torch.cuda.empty_cache()

    def load_states(self) -> None:
        """Undo `offload_states`."""
        if self.setup.device == "cuda":
            self._move_weights(self.device)
            if not self.setup.forward_only:
                restore_buffers(self.wrapped)
                self.updater.move_states(self.device)

    def shutdown(self) -> None:
        """Leave the process groups."""
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
        leave_process_group()

    def _join_groups(self) -> None:
        options = self.options
        join_process_group(self.setup, options.process_group_timeout_seconds)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=options.tensor_model_parallel_size,
            pipeline_model_parallel_size=options.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=options.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=options.expert_model_parallel_size,
            expert_tensor_parallel_size=options.expert_tensor_size if self.facts.experts else None,
            distributed_timeout_minutes=max(1, round(options.process_group_timeout_seconds / 60)),
            create_gloo_process_groups=False,
        )

    def _fill(self, path: str) -> None:
        with CheckpointFiles(checkpoint_folder(path)) as files:
            self.weights.fill(files)

    def _rows(self, batch: SampleBatch, limits: MicroBatchLimits) -> list[list[int]]:
        """Return this rank's micro-batches, which all ranks that hold the same copy of the model share.

        The interleaved schedule takes micro-batches in groups of the number of stages, so the list is padded to whole
        groups.
        """
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        rows = plan_micro_batches(batch.lengths, ranks, limits)[rank]
        group = self.options.pipeline_model_parallel_size if self.options.model_chunks > 1 else 1
        return rows + [[] for _ in range(-len(rows) % group)]

    def _move_weights(self, device: torch.device) -> None:
        """Move the weights that are not in buffers of the distributed optimizer."""
        if self.setup.forward_only or not self.options.use_distributed_optimizer:
            for chunk in self.chunks:
                chunk.to(device)
