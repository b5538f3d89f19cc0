"""Forward and backward passes over micro-batches, by the pipeline schedule of megatron-core.

Only the last pipeline stage has logits, split over its tensor-parallel ranks, so only that stage has results. All ranks
must run equally many micro-batches, because pipelines and experts exchange tensors in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from roll.strategies.train.megatron.facts import ModelFacts
from roll.strategies.train.megatron.vocabulary import CHUNK_ELEMENTS, parallel_logprobs_and_entropy
from roll.strategies.train.microbatches import MicroBatch
from roll.strategies.train.step import StepMetrics, TrainingStep

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
    ) -> list[StepMetrics]:
        """Sum the gradients of all micro-batches of all ranks. Return metrics on the last stage, nothing on others."""

        def loss(micro_batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, StepMetrics]:
            if self._kind == "value":
                outputs: tuple[Tensor, ...] = (_values(micro_batch, logits),)
            else:
                outputs = self._logprobs_and_entropy(
                    micro_batch, logits, temperature, step.needs_entropy_gradient
                )
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
