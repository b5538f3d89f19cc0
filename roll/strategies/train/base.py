"""The interface of every trainer, one object per rank.

A call is collective: all ranks make it with the same batch, each computes its share, and the result is the same as that
of one rank with all samples. Losses are normalised over the whole batch of the call, so neither the number of ranks nor
the split into micro-batches changes the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from roll.data.records import SampleBatch

if TYPE_CHECKING:
    import torch

    from roll.strategies.train.export import ModelExport
    from roll.strategies.train.sharded_state import SavedState, StateSnapshot
    from roll.strategies.train.step import Objective


class ForwardStrategy(Protocol):
    """One rank of a forward-only role such as the reference: all calls that such a role receives."""

    def initialize(self) -> None:
        """Join the process group, load and shard the model; a trainer also builds its optimizer and schedule."""

    def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return the log-probability of each token given those before it, at ``temperature``.

        Returns float32 ``[total_tokens]`` in the order of the batch, on every rank; 0 at the first token of a sample.
        """

    def offload_states(self) -> None:
        """Move weights, gradients and optimizer state off the device."""

    def load_states(self) -> None:
        """Undo `offload_states`."""

    def shutdown(self) -> None:
        """Leave the process group."""


class TrainStrategy(ForwardStrategy, Protocol):
    """One rank of a trainer. Every trainer can drive a forward-only role as well."""

    def base_log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return `log_probs` of the base model without the adapters (LoRA) that are trained on it. Trainers of adapters
        only."""

    def values(self, batch: SampleBatch) -> np.ndarray:
        """Return the value before each token. Critics only.

        Returns float32 ``[total_tokens]`` in the order of the batch, on every rank; 0 at the first token of a sample.
        """

    def train_step(self, batch: SampleBatch, objective: Objective, temperature: float) -> dict[str, float]:
        """Take one optimizer step on the samples of ``batch``, with the loss normalised over all of them.

        Returns metrics (means over the batch, equal on all ranks), among them ``loss``, ``grad_norm`` and
        ``learning_rate``.
        """

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors in Hugging Face names, tied ones once. Collective. A tensor is valid until the next one is
        drawn."""

    def export(self) -> ModelExport | None:
        """Return a copy of the model on the CPU of rank 0, None on other ranks. Collective.

        The copy can be written in Hugging Face format while training continues.
        """

    def load(self, path: str) -> None:
        """Load an export into the running model. Collective."""

    def snapshot(self) -> StateSnapshot:
        """Copy this rank's part of the training state (weights, optimizer, schedule) to memory of its own.
        Collective."""

    def restore(self, state: SavedState) -> None:
        """Resume from a snapshot, taken by any number of ranks of this trainer. Collective.

        Raises `UnfitState` if the snapshot is not of this model.
        """
