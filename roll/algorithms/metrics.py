"""Training metrics (losses, critics, staleness, mismatch with the engine), as sums over micro-batches and ranks.

Parts of a batch contribute sums and maxima only. Ratios of sums (means, effective sample size) and quantiles are
computed once, at the end, so a metric does not depend on how the batch was split. Every part of a batch has the same
names in the same order. The sums are float64: a ratio of e^40 is precise enough; a ratio of e^2000 makes chi2 infinite
and the effective sample size 0. Nothing becomes NaN unless a log-probability was NaN.

The log-probabilities of trainer and engine differ by rounding, or because of a bug, even for the same weights. This is
not off-policy data, and corrections are not meant for it; the metrics ``mismatch/...`` measure it on tokens that were
sampled with the trainer's current weights. Quantiles come from a histogram of the absolute difference with logarithmic
bins, 20 per decade from 1e-8 to 100 nats. They are reported as the geometric middle of their bin, at most 6 % off;
below 1e-8 as 0 (float32 does not resolve it), above 100 as the largest difference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.aggregation import keep

TRAINED_TOKENS, TRAINED_SEQUENCES = "trained/tokens", "trained/sequences"
"""Names of the sums that are the divisors of the loss."""


@dataclass
class PartMetrics:
    """Contribution of a part of a batch to its metrics, without gradient. All parts have the same names, in order."""

    sums: dict[str, Tensor]
    """Name -> sum over the part: 0-d, or 1-d for histogram counts."""
    maxima: dict[str, Tensor]
    """Name -> maximum over the part, 0-d."""
    metrics_of: Callable[[dict[str, Any], dict[str, float]], dict[str, float]]
    """Function that returns the metrics, given the whole batch's sums and maxima by name."""

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return two float64 vectors: the entries to sum over parts, and the entries to take the maximum of."""
        sums = torch.cat([value.double().reshape(-1) for value in self.sums.values()])
        return sums, torch.stack([value.double() for value in self.maxima.values()])

    def named(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return the whole batch's sums by name, given the sum of all parts' vectors."""
        named: dict[str, Any] = {}
        start = 0
        for name, value in self.sums.items():
            named[name] = sums[start : start + len(value)] if value.dim() else sums[start]
            start += value.numel()
        return named

    def from_vectors(self, sums: Sequence[float], maxima: Sequence[float], divisor: float = 1.0) -> dict[str, float]:
        """Return the whole batch's metrics, given the sum and the maximum of all parts' vectors.

        ``divisor`` divides the losses (names ``total/...``), if they were not normalised before.
        """
        named = self.named(sums)
        if divisor != 1.0:
            named |= {name: value / divisor for name, value in named.items() if name.startswith("total/")}
        return self.metrics_of(named, dict(zip(self.maxima, maxima, strict=True)))


def combine(parts: Sequence[PartMetrics]) -> tuple[Tensor, Tensor]:
    """Return the sum of the parts' vectors of sums, and the maximum of their vectors of maxima."""
    vectors = [part.vectors() for part in parts]
    return torch.stack([sums for sums, _ in vectors]).sum(0), torch.stack([maxima for _, maxima in vectors]).amax(0)


@torch.no_grad()
def policy_metrics(
    totals: Mapping[str, Tensor],
    token_metrics: Mapping[str, Tensor],
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    buckets: Mapping[str, Tensor],
    mismatch_mask: Tensor | None = None,
    trained: Tensor | None = None,
    shares: Tensor | None = None,
) -> PartMetrics:
    """Return the metrics of a policy for one part of a batch.

    ``totals`` are 0-d contributions to losses by name, already normalised over the whole batch. All other tensors are
    ``[batch, seq]`` with at least one entry. ``token_metrics`` are per-token values by name. ``logprobs`` are those of
    the current policy, ``behaviour_logprobs`` those recorded at sampling. ``buckets`` are the `lag_buckets` of the
    response mask. ``mismatch_mask`` (bool) marks the response tokens that were sampled with the weights that computed
    ``logprobs``; without it, the mismatch is not measured. ``trained`` (bool) marks the trained tokens; default: the
    response mask. ``shares``: see `trained_counts`. Entries outside the masks are never read. The ratio is not clamped,
    so that an overflow is visible.

    Metrics of the whole batch: the totals; the means of the token metrics; ``ratio_max`` and ``ratio_mean``; ``ess``,
    ``kl`` (k3), ``k1`` and ``chi2``, and per lag ``lag_<n>/...``, as in `off_policy_metrics`; and ``mismatch/...``, as
    in `mismatch_metrics`, if measured.
    """
    response_mask = buckets[""]
    trained = response_mask if trained is None else trained
    log_ratio = keep(logprobs.double(), response_mask) - keep(behaviour_logprobs.double(), response_mask)
    sums = {
        **{f"total/{name}": value.detach() for name, value in totals.items()},
        **trained_counts(trained, shares),
        **{f"token/{name}": keep(value.double(), response_mask).sum() for name, value in token_metrics.items()},
        **{f"off_policy/{name}": value for name, value in off_policy_sums(log_ratio, buckets).items()},
    }
    maxima = {"ratio_max": keep(log_ratio.exp(), response_mask).amax()}
    if mismatch_mask is not None:
        sums["mismatch"], maxima["mismatch"] = mismatch_sums(log_ratio, mismatch_mask & response_mask)
    return PartMetrics(sums, maxima, _policy_metrics_of)


def trained_counts(trained: Tensor, shares: Tensor | None = None) -> dict[str, Tensor]:
    """Return the number of trained tokens, and of sequences with at least one. ``trained``: bool ``[batch, seq]``.

    ``shares`` ``[batch]``: the fraction of its sequence that each row is; None: each row is a whole sequence.
    """
    sequences = trained.any(-1)
    return {
        TRAINED_TOKENS: trained.sum(),
        TRAINED_SEQUENCES: sequences.sum() if shares is None else keep(shares.double(), sequences).sum(),
    }


def _policy_metrics_of(sums: dict[str, Any], maxima: dict[str, float]) -> dict[str, float]:
    def named(kind: str) -> dict[str, float]:
        return {name.removeprefix(kind): value for name, value in sums.items() if name.startswith(kind)}

    off_policy = named("off_policy/")
    distances = off_policy_metrics(off_policy)
    tokens = max(off_policy["tokens"], 1.0)
    return {
        **named("total/"),
        **{name: value / tokens for name, value in named("token/").items()},
        "ratio_mean": off_policy["ratio"] / tokens,
        "kl": distances.pop("k3"),
        **distances,
        "ratio_max": maxima["ratio_max"],
        **(mismatch_metrics(sums["mismatch"], maxima["mismatch"]) if "mismatch" in sums else {}),
    }


def mean_over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a training step's optimizer steps.

    Values are means over the optimizer steps; ``ratio_max`` and ``error_max`` are maxima. Metrics per lag are weighted
    by the lag's share of tokens, which may be 0 in some steps. ``mismatch/...`` is that of the first optimizer step,
    because only before that can trainer and engine have the same weights.
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


BINS_PER_DECADE = 20
SMALLEST_DECADE, LARGEST_DECADE = -8, 2
_DECADES = LARGEST_DECADE - SMALLEST_DECADE
MISMATCH_SUMS = 3 + _DECADES * BINS_PER_DECADE + 2
"""Number of entries of `mismatch_sums`: the sums of the difference, its absolute value and its square; then the
histogram counts, including one bin below and one above the range."""
QUANTILES = {"p50": 0.5, "p99": 0.99}


@torch.no_grad()
def mismatch_sums(difference: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return a batch part's sums for `mismatch_metrics`, float64 ``[MISMATCH_SUMS]``, and the largest absolute
    difference, 0-d.

    ``difference`` = log-probability of the trainer - that of the engine, in nats; ``mask`` (bool) marks the tokens to
    measure; both ``[batch, seq]``. Entries outside the mask are never read. NaN counts as infinite in the histogram,
    and stays NaN in the sums.
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
    """Return the metrics ``mismatch/...`` (nats per token) from the `mismatch_sums` and maximum of a whole batch.

    ``mean`` and ``std`` of the difference; ``abs_mean``, ``p50``, ``p99`` and ``max`` of its absolute value; and
    ``tokens``, the number of measured tokens. If that is 0, only ``tokens`` is returned.
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
    """Return the geometric middle of the bin in which the cumulative count reaches ``rank``."""
    position = next(index for index, reached in enumerate(itertools.accumulate(counts)) if reached >= rank)
    if position == 0:
        return 0.0
    if position == len(counts) - 1:
        return largest
    return min(10.0 ** (SMALLEST_DECADE + (position - 0.5) / BINS_PER_DECADE), largest)


def lag_buckets(
    mask: Tensor, lags: Tensor | None = None, max_lag: int | None = None, capped: bool = False
) -> dict[str, Tensor]:
    """Split ``mask`` (bool ``[batch, seq]``) by lag. Return metric prefix -> mask; the empty prefix has all of it.

    ``lags``, int ``[batch, seq]``, is the training step minus the token's version. Prefix ``lag_<n>/`` has the tokens
    of lag n, from 0 to ``max_lag``; the last one includes all older tokens. With ``capped`` (older tokens may occur),
    the last prefix is ``lag_<n>+/``. Prefixes depend only on ``max_lag`` and ``capped``, never on the tokens. Without
    ``max_lag``, only the empty prefix is returned. ``ValueError`` if ``max_lag`` is negative, or given without
    ``lags``.
    """
    if max_lag is None:
        return {"": mask}
    if lags is None or max_lag < 0:
        raise ValueError(f"metrics per lag need lags and a max_lag of at least 0, not {max_lag}")
    buckets = {f"lag_{lag}/": mask & (lags == lag) for lag in range(max_lag)}
    return {"": mask} | buckets | {f"lag_{max_lag}{'+' if capped else ''}/": mask & (lags >= max_lag)}


@torch.no_grad()
def off_policy_sums(log_ratio: Tensor, buckets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch part's sums for `off_policy_metrics`, for each of the `lag_buckets`: name -> 0-d float64.

    ``log_ratio`` ``[batch, seq]`` = log-probability of the current policy - that of the behaviour policy, in nats.
    """
    log_ratio = log_ratio.double()
    values = {
        "tokens": torch.ones_like(log_ratio),
        "ratio": log_ratio.exp(),
        "ratio_squared": (2 * log_ratio).exp(),
        "k1": -log_ratio,
        "k3": torch.expm1(log_ratio) - log_ratio,
    }
    return {
        prefix + name: keep(value, bucket).sum() for prefix, bucket in buckets.items() for name, value in values.items()
    }


def off_policy_metrics(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return the off-policy metrics from the `off_policy_sums` of a whole batch.

    With rho the ratio current / behaviour of a token sampled from the behaviour policy mu:

    - ``ess``: effective sample size (sum rho)^2 / (n sum rho^2), as a fraction of the n tokens, in [0, 1] (Kong 1992);
    - ``k1``: mean of -log rho, and ``k3``: mean of rho - 1 - log rho, at least 0: both estimate KL(mu || current) in
      nats per token (J. Schulman, "Approximating KL divergence", 2020);
    - ``chi2``: mean of rho^2, minus 1: estimates the chi-squared divergence of the current policy from mu.

    ``lag_<n>/...`` are the same metrics for the tokens of one lag, and their ``share`` of all tokens. Lags without
    tokens are left out. Without any token all values are 0.
    """
    plain = {name: float(value) for name, value in sums.items()}
    metrics: dict[str, float] = {}
    for prefix in [name.removesuffix("tokens") for name in plain if name.endswith("tokens")]:
        tokens = plain[f"{prefix}tokens"]
        if prefix and not tokens:
            continue
        ratio, squared = plain[f"{prefix}ratio"], plain[f"{prefix}ratio_squared"]
        metrics |= {
            f"{prefix}ess": _effective_sample_size(tokens, ratio, squared),
            f"{prefix}k1": plain[f"{prefix}k1"] / max(tokens, 1.0),
            f"{prefix}k3": plain[f"{prefix}k3"] / max(tokens, 1.0),
            f"{prefix}chi2": squared / tokens - 1 if tokens else 0.0,
        }
        if prefix:
            metrics[f"{prefix}share"] = tokens / plain["tokens"]
    return metrics


def _effective_sample_size(tokens: float, ratio: float, squared: float) -> float:
    if not tokens or squared == 0 or math.isinf(squared):
        return 0.0
    # In this order no intermediate result overflows; rounding may exceed 1.
    return min(ratio / tokens * (ratio / squared), 1.0)


@torch.no_grad()
def value_metrics(
    loss: Tensor, values: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor, shares: Tensor | None = None
) -> PartMetrics:
    """Return the metrics of a critic for one part of a batch.

    ``values``, ``returns``, ``clipped`` (1 where the gradient is clipped) and ``mask`` (bool) are ``[batch, seq]``;
    ``shares``: see `trained_counts`. Entries outside the mask are never read.

    Metrics of the whole batch: ``loss``; means over tokens of ``value`` and ``return``; ``error_max``, the largest
    absolute error; ``clip_fraction``; and ``explained_variance``, 1 - Var(return - value) / Var(return): 1 for a
    perfect critic, 0 for a constant one, and 0 if all returns are equal.
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
    sums = {
        "total/loss": loss.detach(),
        **trained_counts(mask, shares),
        **{name: term.sum() for name, term in terms.items()},
    }
    return PartMetrics(sums, {"error_max": error.abs().amax()}, _value_metrics_of)


def supervised_metrics(loss: Tensor, logprobs: Tensor, entropy: Tensor, mask: Tensor) -> PartMetrics:
    """Return the metrics of supervised fine-tuning for one part of a batch.

    ``logprobs``, ``entropy`` and ``mask`` (bool) are ``[batch, seq]``. Entries outside the mask are never read.

    Metrics of the whole batch: ``loss``; ``cross_entropy`` and ``entropy``, means over the trained tokens in nats;
    ``error_max``, the largest cross-entropy of a token; and ``tokens``, the number of trained tokens.
    """
    surprise = -keep(logprobs.detach().double(), mask)
    sums = {
        "total/loss": loss.detach(),
        **trained_counts(mask),
        "cross_entropy": surprise.sum(),
        "entropy": keep(entropy.detach().double(), mask).sum(),
    }
    return PartMetrics(sums, {"error_max": surprise.amax()}, _supervised_metrics_of)


def _supervised_metrics_of(sums: dict[str, Any], maxima: dict[str, float]) -> dict[str, float]:
    tokens = sums[TRAINED_TOKENS]
    means = {name: sums[name] / max(tokens, 1.0) for name in ("cross_entropy", "entropy")}
    return {"loss": sums["total/loss"], **means, **maxima, "tokens": tokens}


def _value_metrics_of(sums: dict[str, Any], maxima: dict[str, float]) -> dict[str, float]:
    mean = {name: value / max(sums["tokens"], 1.0) for name, value in sums.items()}
    spread = mean["return_squared"] - mean["return"] ** 2
    unexplained = mean["error_squared"] - mean["error"] ** 2
    return {
        "loss": sums["total/loss"],
        "value": mean["value"],
        "return": mean["return"],
        "error_max": maxima["error_max"],
        "clip_fraction": mean["clipped"],
        "explained_variance": 1.0 - unexplained / spread if spread > 1e-12 else 0.0,
    }
