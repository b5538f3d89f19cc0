"""One optimizer step's share of the batch, independent of any engine: which tokens count, and the loss's divisors.

Both are decided once for the whole batch and equal on all ranks, so a trainer only has to run its micro-batches and add
up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms.aggregation import LossNormalizers
from roll.algorithms.metrics import LossMetrics, combine
from roll.algorithms.objective import PolicyObjective
from roll.algorithms.value_metrics import ValueMetrics
from roll.algorithms.value_objective import ValueObjective
from roll.data.records import SampleBatch
from roll.strategies.train.microbatches import MicroBatch, build_micro_batch, predicted_tokens

Objective = PolicyObjective | ValueObjective
StepMetrics = LossMetrics | ValueMetrics


@dataclass(frozen=True)
class TrainingStep:
    """An objective and the batch that it is computed on."""

    batch: SampleBatch
    objective: Objective
    fields: list[str]
    """Names of per-token fields that micro-batches carry."""
    wanted: np.ndarray
    """bool ``[total_tokens]``: response tokens that some position predicts."""
    normalizers: LossNormalizers

    @classmethod
    def of(cls, batch: SampleBatch, objective: Objective) -> TrainingStep:
        """Return the step that trains ``objective`` on response tokens; if the batch has a ``loss_mask``, only on those
        in it.

        Raises ``ValueError`` if the batch lacks a field.
        """
        fields = _training_fields(batch, objective)
        wanted = batch.tokens["response_mask"].astype(bool) & predicted_tokens(batch)
        trained = wanted & batch.tokens["loss_mask"] if "loss_mask" in fields else wanted
        owner = np.repeat(np.arange(len(batch)), batch.lengths)
        normalizers = objective.normalizers(np.bincount(owner[trained], minlength=len(batch)).tolist())
        return cls(batch, objective, fields, wanted, normalizers)

    @property
    def is_empty(self) -> bool:
        """True if no token is left to train on: an update would be momentum and weight decay only."""
        return self.normalizers.tokens == 0

    @property
    def needs_entropy_gradient(self) -> bool:
        """True if the entropy is trained on, not only a metric. A value model has none."""
        return not isinstance(self.objective, ValueObjective) and self.objective.needs_entropy_gradient

    def micro_batches(
        self, rows: Sequence[Sequence[int]], device: torch.device, packed: bool = False
    ) -> Iterator[MicroBatch]:
        """Yield a micro-batch for each list of rows, made when it is asked for."""
        for part in rows:
            yield build_micro_batch(
                self.batch, part, self.wanted, self.fields, device, self.objective.sample_fields, packed
            )

    def loss(self, micro_batch: MicroBatch, *outputs: Tensor) -> tuple[Tensor, StepMetrics]:
        """Return a micro-batch's contribution to the loss of the batch (0-d, with gradient) and to its metrics.

        ``outputs`` are the model's results for the targets, in the order in which the objective takes them.
        """
        fields = micro_batch.fields
        about = (micro_batch.mask, self.normalizers, fields, fields.get("loss_mask"))
        if isinstance(self.objective, ValueObjective):
            (values,) = outputs
            return self.objective(values, *about)
        logprobs, entropy = outputs
        return self.objective(logprobs, entropy, *about)


def combined_metrics(parts: Sequence[StepMetrics], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Return metrics of the batch from the parts of all ranks that split it (default: all ranks). Collective."""
    sums, maxima = (vector.cpu() for vector in combine(parts))
    dist.all_reduce(sums, group=group)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    return parts[0].from_vectors(sums.tolist(), maxima.tolist())


def _training_fields(batch: SampleBatch, objective: Objective) -> list[str]:
    """Return names of the per-token fields that the objective reads. Raise ``ValueError`` if the batch lacks one."""
    fields = list(objective.token_fields)
    missing = [name for name in ["token_ids", "response_mask", *fields] if name not in batch.tokens]
    missing += [name for name in objective.sample_fields if name not in batch.per_sample]
    if missing:
        there = ", ".join(sorted([*batch.tokens, *batch.per_sample]))
        raise ValueError(f"the batch lacks {', '.join(missing)}; it has {there}")
    return [*fields, "loss_mask"] if "loss_mask" in batch.tokens else fields
