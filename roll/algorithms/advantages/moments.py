"""Means and deviations, of the groups of a batch and of all values seen so far.

Deviations are unbiased (n - 1), and 0 for fewer than two values. Equal values have exactly themselves as mean and
exactly 0 as deviation: a remainder of 1e-17, divided by a small deviation, would become an advantage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Groups = Tensor | np.ndarray | Sequence[int]
"""Group number of each sample ``[batch]``; any integers, in any order."""


def group_tensor(groups: Groups, like: Tensor) -> Tensor:
    """Return ``groups`` as int64 ``[batch]`` on the device of ``like``, whose first dimension is the batch.

    ``ValueError`` if the sizes differ.
    """
    numbers = torch.as_tensor(groups, dtype=torch.int64, device=like.device)
    if numbers.shape != like.shape[:1]:
        raise ValueError(f"groups must be [batch] = [{like.shape[0]}], not {list(numbers.shape)}")
    return numbers


def group_sizes(groups: Tensor) -> Tensor:
    """Count the members of each value's group: int64 ``[values]`` from int64 ``[values]``."""
    _, index, sizes = groups.unique(return_inverse=True, return_counts=True)
    return sizes[index]


def group_range(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value of each value's group, ``[values]`` each; ``groups`` is int64."""
    names, index = groups.unique(return_inverse=True)
    empty = values.new_zeros(len(names))
    lowest = empty.scatter_reduce(0, index, values, "amin", include_self=False)
    highest = empty.scatter_reduce(0, index, values, "amax", include_self=False)
    return lowest[index], highest[index]


def group_mean(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean of each value's group, ``[values]``; weighted if ``weights`` (above 0, same shape) are given."""
    names, index = groups.unique(return_inverse=True)
    weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    empty = values.new_zeros(len(names))
    mean = empty.index_add(0, index, weights * values) / empty.index_add(0, index, weights)
    lowest, highest = group_range(values, groups)
    return mean[index].clamp(lowest, highest)


def group_deviation(values: Tensor, groups: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each value's group, ``[values]``; 0 in a group of one."""
    squared = (values - group_mean(values, groups)).square()
    sizes = group_sizes(groups)
    return (group_mean(squared, groups) * sizes / (sizes - 1).clamp(min=1)).sqrt()


@dataclass
class RunningMoments:
    """Mean and deviation of all values so far, numerically stable."""

    count: int = 0
    """Values seen."""
    mean: float = 0.0
    squared_deviations: float = 0.0
    """Sum of (value - mean)^2 over all values seen."""

    @property
    def deviation(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return math.sqrt(self.squared_deviations / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Tensor) -> None:
        """Merge a batch of any shape (Chan, Golub and LeVeque 1979).

        ``ValueError`` if a value is not finite: it would corrupt every later result.
        """
        flat = values.detach().double().flatten()
        if not flat.isfinite().all():
            raise ValueError("running moments take finite values only; the batch holds NaN or infinity")
        if not len(flat):
            return
        mean = float(flat.mean().clamp(flat.min(), flat.max()))
        total = self.count + len(flat)
        difference = mean - self.mean
        own = float((flat - mean).square().sum())
        self.squared_deviations += own + difference**2 * self.count * len(flat) / total
        self.mean = self.mean + difference * len(flat) / total if self.count else mean
        self.count = total

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint must keep, as plain values."""
        return {"count": self.count, "mean": self.mean, "squared_deviations": self.squared_deviations}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume from what `state_dict` returned. ``ValueError`` if it is incomplete or impossible."""
        wanted = ("count", "mean", "squared_deviations")
        values = {name: state.get(name, math.nan) for name in wanted}
        if not all(map(math.isfinite, values.values())) or values["count"] < 0 or values["squared_deviations"] < 0:
            raise ValueError(f"the state of running moments needs finite {', '.join(wanted)}, not {dict(state)}")
        self.count = int(values["count"])
        self.mean = float(values["mean"])
        self.squared_deviations = float(values["squared_deviations"])
