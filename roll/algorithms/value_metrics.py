"""Metrics of a critic that add up exactly over micro-batches and ranks, like `LossMetrics` for a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.masking import keep

_SUMS = ("tokens", "value", "return", "return_squared", "error", "error_squared", "clipped")


@dataclass
class ValueMetrics:
    """Sums over the trained tokens of some rows, 0-d, float64, without gradient."""

    loss: Tensor
    """Contribution to the loss of the whole batch."""
    sums: dict[str, Tensor]
    largest_error: Tensor

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return the entries to sum over parts, and the entries to maximise."""
        return torch.stack([self.loss, *(self.sums[name] for name in _SUMS)]), self.largest_error[None]

    def from_vectors(self, sums: Sequence[float], maxima: Sequence[float]) -> dict[str, float]:
        """Return the metrics of the whole batch from the combined vectors of all its parts.

        ``loss``; means over tokens of ``value`` and ``return``; ``error_max``, the largest absolute error;
        ``clip_fraction``; and ``explained_variance``: 1 - Var(return - value) / Var(return), which is 1 for a perfect
        critic, 0 for one that knows the mean only, and 0 if returns do not vary.
        """
        loss, *rest = sums
        found = dict(zip(_SUMS, rest, strict=True))
        tokens = max(found["tokens"], 1.0)
        mean = {name: found[name] / tokens for name in _SUMS}
        spread = mean["return_squared"] - mean["return"] ** 2
        unexplained = mean["error_squared"] - mean["error"] ** 2
        return {
            "loss": loss,
            "value": mean["value"],
            "return": mean["return"],
            "error_max": maxima[0],
            "clip_fraction": mean["clipped"],
            "explained_variance": 1.0 - unexplained / spread if spread > 1e-12 else 0.0,
        }


@torch.no_grad()
def value_metrics(
    loss: Tensor, values: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor
) -> ValueMetrics:
    """Return the metrics of one part of a batch.

    ``values``, ``returns``, ``clipped`` (1 where the gradient is cut) and ``mask`` (bool) are ``[batch, seq]``. Entries
    outside the mask are never read.
    """
    predicted, wanted = (keep(tensor.double(), mask) for tensor in (values, returns))
    error = wanted - predicted
    terms = {
        "tokens": mask.double(),
        "value": predicted,
        "return": wanted,
        "return_squared": wanted.square(),
        "error": error,
        "error_squared": error.square(),
        "clipped": keep(clipped.double(), mask),
    }
    return ValueMetrics(loss.detach().double(), {name: term.sum() for name, term in terms.items()}, error.abs().amax())
