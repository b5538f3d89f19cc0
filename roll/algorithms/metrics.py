"""Metrics of a loss that add up exactly over micro-batches and ranks.

Only sums and maxima travel; ratios of sums (means, effective sample size) are taken once, at the end, so a metric does
not depend on how the batch was split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LossMetrics:
    """0-d tensors by name, all without gradient."""

    totals: dict[str, Tensor]
    """Contributions that are already normalised over the whole batch: they add up to the metric."""
    token_sums: dict[str, Tensor]
    """Sums over response tokens: the metric is the mean. Always has ``tokens``, ``ratio_mean``, ``ratio_squared``."""
    maxima: dict[str, Tensor]

    def names(self) -> tuple[list[str], list[str]]:
        """Names in the order of `vectors`."""
        return [*self.totals, *self.token_sums], list(self.maxima)

    def vectors(self) -> tuple[Tensor, Tensor]:
        """float64 vectors: what adds up over parts, and what takes the maximum."""
        sums = [value.double() for value in (*self.totals.values(), *self.token_sums.values())]
        return torch.stack(sums), torch.stack([value.double() for value in self.maxima.values()])

    def from_vectors(self, sums: Sequence[float], maxima: Sequence[float]) -> dict[str, float]:
        """The metrics of the whole batch from the vectors of all its parts, combined."""
        sum_names, maximum_names = self.names()
        combined = dict(zip(sum_names, sums, strict=True))
        token_means = {name: combined[name] / max(combined["tokens"], 1.0) for name in self.token_sums}
        squared = token_means.pop("ratio_squared")
        token_means.pop("tokens")
        return {
            **{name: combined[name] for name in self.totals},
            **token_means,
            "ess": token_means["ratio_mean"] ** 2 / squared if squared > 0 else 0.0,
            **dict(zip(maximum_names, maxima, strict=True)),
        }


def combine(parts: Sequence[LossMetrics]) -> tuple[Tensor, Tensor]:
    """The vectors of several parts of a batch as those of one."""
    vectors = [part.vectors() for part in parts]
    return torch.stack([sums for sums, _ in vectors]).sum(0), torch.stack([maxima for _, maxima in vectors]).amax(0)
