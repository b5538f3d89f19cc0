"""From the scores of a batch to its advantages: the place where reward shaping meets the estimator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from roll.algorithms.advantages import AdvantageEstimator, estimate_advantages
from roll.algorithms.kl import KLController, token_kl
from roll.algorithms.moments import RunningMoments
from roll.algorithms.reward_shaping import RewardShaping, shape_rewards
from roll.pipeline.batch import TrainingBatch


@dataclass(frozen=True)
class AdvantageSettings:
    """How advantages are estimated. The controller and the moments remember what they saw."""

    estimator: AdvantageEstimator
    shaping: RewardShaping
    reward_moments: RunningMoments
    whitened: bool
    advantage_clip: float | None
    kl_controller: KLController | None
    """Weight of the KL penalty in the token rewards; None: no penalty."""
    kl_estimator: str


def add_advantages(batch: TrainingBatch, settings: AdvantageSettings) -> dict[str, float]:
    """Shape the rewards and fill ``advantages`` (float32 ``[total_tokens]``) into the batch; samples that shaping
    leaves out leave the loss mask. Returns metrics over the sampled tokens."""
    data = batch.data
    metrics = _shape(batch, settings)
    mask = torch.from_numpy(data.padded("response_mask", fill=False))
    penalty = settings.kl_controller
    logprobs = torch.from_numpy(data.padded("behaviour_logprobs")) if penalty else None
    reference = torch.from_numpy(data.padded("reference_logprobs")) if penalty else None
    baselines = [group.baseline_score for group in batch.groups for _ in group.samples]
    padded = estimate_advantages(
        settings.estimator,
        torch.from_numpy(data.per_sample["rewards"]),
        mask,
        batch.group_of_sample,
        logprobs=logprobs,
        reference_logprobs=reference,
        kl_coef=penalty.coef if penalty else 0.0,
        kl_estimator=settings.kl_estimator,
        whitened=settings.whitened,
        clip=settings.advantage_clip,
        baseline_rewards=None if None in baselines else torch.tensor(baselines, dtype=torch.float32),
    ).numpy()
    if penalty:
        divergence = token_kl(logprobs, reference, mask, settings.kl_estimator).sum(-1).mean().item()
        metrics |= {"kl_penalty/coef": penalty.coef, "kl_penalty/nats_per_response": divergence}
        penalty.update(divergence, len(data))
    inside = np.arange(padded.shape[1])[None, :] < data.lengths[:, None]
    data.tokens["advantages"] = np.ascontiguousarray(padded[inside], dtype=np.float32)
    sampled = padded[mask.numpy()]
    if not sampled.size:
        return metrics
    return metrics | {
        "advantage/mean": float(sampled.mean()),
        "advantage/std": float(sampled.std()),
        "advantage/max": float(sampled.max()),
        "advantage/min": float(sampled.min()),
    }


def _shape(batch: TrainingBatch, settings: AdvantageSettings) -> dict[str, float]:
    """From scores to rewards; samples left out of training leave the loss mask."""
    data, samples = batch.data, batch.samples
    shaped = shape_rewards(
        torch.from_numpy(data.per_sample["scores"]),
        torch.from_numpy(batch.group_of_sample),
        torch.tensor([sample.response_tokens for sample in samples]),
        torch.tensor([sample.finish_reason == "length" for sample in samples]),
        settings.shaping,
        settings.reward_moments,
    )
    data.per_sample["rewards"] = shaped.rewards.float().numpy()
    for sample, reward in zip(samples, shaped.rewards.tolist(), strict=True):
        sample.reward = reward
    if not shaped.keep.all():
        batch.leave_out(np.repeat(shaped.keep.numpy(), data.lengths))
    return {f"reward/{name}": value for name, value in shaped.metrics.items()}
