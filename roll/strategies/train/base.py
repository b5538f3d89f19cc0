"""What every trainer offers, one object per rank.

A call is collective: all ranks make it with the same batch, each computes its share, and the result is that of one
rank with all samples. Losses are normalised over the whole batch handed in, so neither the number of ranks nor the
split into micro-batches changes the gradient.
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
    """One rank of a forward-only role such as the reference: all that such a role is asked for."""

    def initialize(self) -> None:
        """Join the process group, load and shard the model; of a trainer, build optimizer and schedule."""

    def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Log-probabilities of each token given those before it, at ``temperature``.

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
        """Of a trainer of adapters (LoRA): `log_probs` of the model that they are trained on, without them."""

    def values(self, batch: SampleBatch) -> np.ndarray:
        """Of a critic: the value before each token.

        Returns float32 ``[total_tokens]`` in the order of the batch, on every rank; 0 at the first token of a sample.
        """

    def train_step(self, batch: SampleBatch, objective: Objective, temperature: float) -> dict[str, float]:
        """One optimizer step on the samples of ``batch``, the loss normalised over all of them. Returns metrics
        (means over the batch, equal on all ranks), among them ``loss``, ``grad_norm`` and ``learning_rate``."""

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors in Hugging Face names, tied ones once. Collective; a tensor is valid until the next one."""

    def export(self) -> ModelExport | None:
        """A copy of the model on the CPU of rank 0, to be written in Hugging Face format while training goes on; None
        on other ranks. Collective."""

    def load(self, path: str) -> None:
        """Load such an export into the running model. Collective."""

    def snapshot(self) -> StateSnapshot:
        """This rank's part of all that training needs to go on (weights, optimizer, schedule), copied to memory of its
        own. Collective."""

    def restore(self, state: SavedState) -> None:
        """Go on where a snapshot was taken, by however many ranks of this trainer. Collective. Raises `UnfitState` if
        it is not of this model."""
