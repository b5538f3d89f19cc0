"""The distance between the sampling policy and the trained policy, from sums that add up over any split of the batch.

Every metric here is a function of a few sums over tokens. Micro-batches and ranks add their sums, and the ratios are
computed once. The sums are float64: a ratio of e^40 is exact enough. A ratio of e^2000 makes chi2 infinite and the
effective sample size 0. Nothing becomes NaN unless a log-probability was NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from roll.algorithms.masking import keep


@torch.no_grad()
def off_policy_sums(
    log_ratio: Tensor,
    mask: Tensor,
    lags: Tensor | None = None,
    max_lag: int | None = None,
    capped: bool = False,
) -> dict[str, Tensor]:
    """Return 0-d float64 sums over the tokens of ``mask`` by name, without gradient, and with ``max_lag`` also per lag.

    ``log_ratio`` = log current - log behaviour, in nats, and ``mask`` (bool) are ``[batch, seq]``. ``lags`` int
    ``[batch, seq]`` is the training step minus the version of the token. There is a bucket for each lag from 0 to
    ``max_lag``; the last also takes all older tokens. Set ``capped`` if older tokens may occur: it names the last
    bucket ``lag_<n>+``. The names depend only on ``max_lag`` and ``capped``, never on the tokens. ``ValueError`` if
    ``max_lag`` is negative, or given without ``lags``.
    """
    log_ratio = log_ratio.double()
    values = {
        "tokens": torch.ones_like(log_ratio),
        "ratio": log_ratio.exp(),
        "ratio_squared": (2 * log_ratio).exp(),
        "k1": -log_ratio,
        "k3": torch.expm1(log_ratio) - log_ratio,
    }
    buckets = {"": mask} | ({} if max_lag is None else lag_buckets(mask, lags, max_lag, capped))
    return {
        prefix + name: keep(value, bucket).sum() for prefix, bucket in buckets.items() for name, value in values.items()
    }


def off_policy_metrics(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Turn the sums of a whole batch (`off_policy_sums`, added up) into its metrics.

    With rho the ratio current / behaviour of a token that the behaviour policy mu sampled:

    - ``ess``: (sum rho)^2 / (n sum rho^2), the effective sample size as a share of n tokens, in [0, 1] (Kong 1992);
    - ``k1``: mean of -log rho, and ``k3``: mean of rho - 1 - log rho, at least 0: both estimate KL(mu || current) in
      nats per token (J. Schulman, "Approximating KL divergence", 2020);
    - ``chi2``: mean of rho^2, minus 1: estimates the chi-squared divergence of the current policy from mu.

    ``lag_<n>/...`` has the same metrics for the tokens of one lag, and their ``share`` of all tokens. A lag without
    tokens is left out. Without any token all values are 0.
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


def lag_buckets(mask: Tensor, lags: Tensor | None, max_lag: int, capped: bool) -> dict[str, Tensor]:
    """Split ``mask`` by lag into bool ``[batch, seq]`` masks under ``lag_<n>/``; see `off_policy_sums`."""
    if lags is None or max_lag < 0:
        raise ValueError(f"metrics per lag need lags and a max_lag of at least 0, not {max_lag}")
    buckets = {f"lag_{lag}/": mask & (lags == lag) for lag in range(max_lag)}
    return buckets | {f"lag_{max_lag}{'+' if capped else ''}/": mask & (lags >= max_lag)}


def _effective_sample_size(tokens: float, ratio: float, squared: float) -> float:
    if not tokens or squared == 0 or math.isinf(squared):
        return 0.0
    # In this order no intermediate result overflows; only rounding can lead above 1.
    return min(ratio / tokens * (ratio / squared), 1.0)
