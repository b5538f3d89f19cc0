"""From the scores of a batch to its advantages: the place where reward shaping meets the estimator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from roll.algorithms.advantages import AdvantageEstimator, estimate_advantages
from roll.pipeline.batch import TrainingBatch


@dataclass(frozen=True)
class AdvantageSettings:
    """How advantages are estimated."""

    estimator: AdvantageEstimator
    whitened: bool
    kl_coef: float | None
    """Weight of the KL penalty in the token rewards; None: no penalty."""
    kl_estimator: str


def add_advantages(batch: TrainingBatch, settings: AdvantageSettings) -> dict[str, float]:
    """Fill ``advantages`` (float32 ``[total_tokens]``) into the batch. Returns metrics over the sampled tokens."""
    data = batch.data
    mask = data.padded("response_mask", fill=False)
    penalised = settings.kl_coef is not None
    padded = estimate_advantages(
        settings.estimator,
        torch.from_numpy(data.per_sample["rewards"]),
        torch.from_numpy(mask),
        batch.group_of_sample,
        logprobs=torch.from_numpy(data.padded("behaviour_logprobs")) if penalised else None,
        reference_logprobs=torch.from_numpy(data.padded("reference_logprobs")) if penalised else None,
        kl_coef=settings.kl_coef or 0.0,
        kl_estimator=settings.kl_estimator,
        whitened=settings.whitened,
    ).numpy()
    inside = np.arange(padded.shape[1])[None, :] < data.lengths[:, None]
    data.tokens["advantages"] = np.ascontiguousarray(padded[inside], dtype=np.float32)
    sampled = padded[mask]
    if not sampled.size:
        return {}
    return {
        "advantage/mean": float(sampled.mean()),
        "advantage/std": float(sampled.std()),
        "advantage/max": float(sampled.max()),
        "advantage/min": float(sampled.min()),
    }
