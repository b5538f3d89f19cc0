"""The difference between trainer and engine on the same tokens under the same weights, as sums that add up.

Two implementations of the same model differ by rounding, or by a mistake. Neither is off-policy data, and no correction
is meant for it. Quantiles come from counts in fixed logarithmic bins of the absolute difference, 20 a decade from 1e-8
to 100 nats: a quantile is reported as the geometric middle of its bin, at most 6 % off. Less than 1e-8 is reported as 0
(float32 does not resolve it), more than 100 as the largest difference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from roll.algorithms.masking import keep

BINS_PER_DECADE = 20
SMALLEST_DECADE, LARGEST_DECADE = -8, 2
_DECADES = LARGEST_DECADE - SMALLEST_DECADE
MISMATCH_SUMS = 3 + _DECADES * BINS_PER_DECADE + 2
"""Number of entries of `mismatch_sums`: the sums of the difference, its absolute value and its square; then the counts
of all bins, with one below and one above the range."""
QUANTILES = {"p50": 0.5, "p99": 0.99}


@torch.no_grad()
def mismatch_sums(difference: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums that add up over parts of a batch, and the largest absolute difference, which takes the maximum.

    The sums are float64 ``[MISMATCH_SUMS]``, the largest difference is 0-d. ``difference`` = log trainer - log engine
    in nats and ``mask`` (bool, the tokens that count) are ``[batch, seq]``. Entries outside the mask are never read.
    NaN counts as infinite in the bins, and stays visible in the sums.
    """
    difference = keep(difference.double(), mask)
    absolute = difference.abs()
    exponents = torch.arange(_DECADES * BINS_PER_DECADE + 1, dtype=torch.float64, device=difference.device)
    edges = 10.0 ** (SMALLEST_DECADE + exponents / BINS_PER_DECADE)
    bins = torch.bucketize(absolute.nan_to_num(nan=math.inf), edges, right=True)
    counts = torch.zeros(len(edges) + 1, dtype=torch.float64, device=difference.device)
    counts.scatter_add_(0, bins.flatten(), mask.double().flatten())
    sums = torch.stack([difference.sum(), absolute.sum(), difference.square().sum()])
    return torch.cat([sums, counts]), absolute.amax()


def mismatch_metrics(sums: Sequence[float], largest: float) -> dict[str, float]:
    """Turn the sums of a whole batch into ``mismatch/...``, in nats per token.

    ``mean`` and ``std`` of the difference; ``abs_mean``, ``p50``, ``p99`` and ``max`` of its absolute value;
    ``tokens``. Without a token only ``tokens`` is returned: nothing was measured.
    """
    total, absolute_total, squares, *counts = sums
    tokens = sum(counts)
    if not tokens:
        return {"mismatch/tokens": 0.0}
    mean = total / tokens
    return {
        "mismatch/mean": mean,
        "mismatch/abs_mean": absolute_total / tokens,
        "mismatch/std": math.sqrt(max(squares / tokens - mean * mean, 0.0)) if math.isfinite(squares) else math.nan,
        **{f"mismatch/{name}": _quantile(counts, share * tokens, largest) for name, share in QUANTILES.items()},
        "mismatch/max": largest,
        "mismatch/tokens": tokens,
    }


def _quantile(counts: Sequence[float], rank: float, largest: float) -> float:
    """Return the middle of the bin in which the running count reaches ``rank``."""
    position = next(index for index, reached in enumerate(itertools.accumulate(counts)) if reached >= rank)
    if position == 0:
        return 0.0
    if position == len(counts) - 1:
        return largest
    return min(10.0 ** (SMALLEST_DECADE + (position - 0.5) / BINS_PER_DECADE), largest)
