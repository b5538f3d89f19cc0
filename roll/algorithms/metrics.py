"""Metrics of a loss that add up exactly over micro-batches and ranks.

Only sums and maxima are exchanged. Ratios of sums (means, effective sample size) and quantiles are computed once, at
the end, so a metric does not depend on how the batch was split. Every part of a batch has the same names in the same
order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from roll.algorithms.masking import keep
from roll.algorithms.mismatch import MISMATCH_SUMS, mismatch_metrics, mismatch_sums
from roll.algorithms.off_policy_metrics import off_policy_metrics, off_policy_sums


@dataclass
class LossMetrics:
    """Metrics of one part of a batch: 0-d tensors by name, without gradient."""

    totals: dict[str, Tensor]
    """Contributions that are already normalised over the whole batch: their sum is the metric."""
    token_sums: dict[str, Tensor]
    """Sums over response tokens: the metric is the mean."""
    off_policy: dict[str, Tensor]
    """Sums of `off_policy_sums`, including the number of response tokens."""
    maxima: dict[str, Tensor]
    mismatch: tuple[Tensor, Tensor] | None = None
    """The result of `mismatch_sums`; None if it is not measured."""

    def names(self) -> tuple[list[str], list[str]]:
        """Return the names in the order of `vectors`, without the entries of the mismatch."""
        sums = [*self.totals, *self.token_sums, *(f"off_policy/{name}" for name in self.off_policy)]
        return sums, list(self.maxima)

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return float64 vectors of the entries to sum and of the entries to maximise; the mismatch comes last."""
        sums = torch.stack(
            [value.double() for value in (*self.totals.values(), *self.token_sums.values(), *self.off_policy.values())]
        )
        maxima = torch.stack([value.double() for value in self.maxima.values()])
        if self.mismatch is None:
            return sums, maxima
        mismatch, largest = self.mismatch
        return torch.cat([sums, mismatch]), torch.cat([maxima, largest[None]])

    def from_vectors(self, sums: Sequence[float], maxima: Sequence[float]) -> dict[str, float]:
        """Return the metrics of the whole batch from the combined vectors of all its parts.

        Besides the totals, token means and maxima: ``ratio_mean``, ``ess``, ``kl`` (k3), ``k1``, ``chi2``, and per lag
        ``lag_<n>/...`` as in `off_policy_metrics`; ``mismatch/...`` as in `mismatch_metrics` if it was measured.
        """
        mismatch = {}
        if self.mismatch is not None:
            mismatch = mismatch_metrics(sums[-MISMATCH_SUMS:], maxima[-1])
            sums, maxima = sums[:-MISMATCH_SUMS], maxima[:-1]
        sum_names, maximum_names = self.names()
        combined = dict(zip(sum_names, sums, strict=True))
        off_policy = {name: combined[f"off_policy/{name}"] for name in self.off_policy}
        distances = off_policy_metrics(off_policy)
        tokens = max(off_policy["tokens"], 1.0)
        return {
            **{name: combined[name] for name in self.totals},
            **{name: combined[name] / tokens for name in self.token_sums},
            "ratio_mean": off_policy["ratio"] / tokens,
            "kl": distances.pop("k3"),
            **distances,
            **dict(zip(maximum_names, maxima, strict=True)),
            **mismatch,
        }


@torch.no_grad()
def policy_metrics(
    totals: Mapping[str, Tensor],
    token_metrics: Mapping[str, Tensor],
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    response_mask: Tensor,
    lags: Tensor | None = None,
    max_lag: int | None = None,
    capped: bool = False,
    mismatch_mask: Tensor | None = None,
) -> LossMetrics:
    """Return the metrics of one part of a batch.

    ``totals`` are 0-d contributions. ``token_metrics`` by name, the log-probabilities of the current and the behaviour
    policy, ``response_mask`` (bool) and ``lags`` (int) are ``[batch, seq]``, with at least one entry. ``lags``,
    ``max_lag`` and ``capped`` are those of `off_policy_sums`. ``mismatch_mask`` (bool) marks the response tokens that
    were sampled with the very weights of ``logprobs``; None: the mismatch is not measured. Entries outside the masks
    are never read. The ratio is not clamped: an overflow must be visible.
    """
    log_ratio = keep(logprobs.double(), response_mask) - keep(behaviour_logprobs.double(), response_mask)
    return LossMetrics(
        totals={name: value.detach() for name, value in totals.items()},
        token_sums={name: keep(value.double(), response_mask).sum() for name, value in token_metrics.items()},
        off_policy=off_policy_sums(log_ratio, response_mask, lags, max_lag, capped),
        maxima={"ratio_max": keep(log_ratio.exp(), response_mask).amax()},
        mismatch=None if mismatch_mask is None else mismatch_sums(log_ratio, mismatch_mask & response_mask),
    )


def mean_over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several optimizer steps into those of one training step.

    Values are means over the steps; ``ratio_max`` and ``error_max`` are the largest. Metrics of one lag are weighted by
    the share of that lag, which a step may not have. ``mismatch/...`` is that of the first step: only before it can the
    trainer have the same weights as the engine.
    """
    names = dict.fromkeys(name for update in updates for name in update if not name.startswith("mismatch/"))
    first = {name: value for name, value in updates[0].items() if name.startswith("mismatch/")}
    return {name: _over_updates(name, updates) for name in names} | first


def _over_updates(name: str, updates: Sequence[Mapping[str, float]]) -> float:
    if name in ("ratio_max", "error_max"):
        return max(update[name] for update in updates)
    lag, _, measure = name.rpartition("/")
    if not lag or measure == "share":
        return sum(update.get(name, 0.0) for update in updates) / len(updates)
    shares = [update.get(f"{lag}/share", 0.0) for update in updates]
    values = [share * update[name] for share, update in zip(shares, updates, strict=True) if share > 0]
    return sum(values) / sum(shares)


class PartMetrics(Protocol):
    """Sums and maxima over a part of a batch: `LossMetrics`, or the metrics of a critic."""

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return the entries to sum over parts and the entries to maximise, both 1-d."""


def combine(parts: Sequence[PartMetrics]) -> tuple[Tensor, Tensor]:
    """Combine the vectors of several parts of a batch into those of one."""
    vectors = [part.vectors() for part in parts]
    return torch.stack([sums for sums, _ in vectors]).sum(0), torch.stack([maxima for _, maxima in vectors]).amax(0)
