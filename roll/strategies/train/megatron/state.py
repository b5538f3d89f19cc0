"""Training state of `megatron_train`: float32 weights and moments, as parts of tensors of the Hugging Face model.

The state is independent of the layout in which it was saved: each rank of another layout, or of any other trainer,
finds its share by name. One parameter is gathered at a time, over the ranks that split its optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from roll.strategies.train.megatron.optimizer import Updater
from roll.strategies.train.megatron.weights import ModelWeights, Piece
from roll.strategies.train.sharded_state import MOMENTS, Part, SavedState, common_updates, own_share


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
