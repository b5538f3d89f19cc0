"""Conversion of a batch's scores to advantages: reward shaping, then the estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll.algorithms.advantages import AdvantageEstimator, estimate_advantages, shape_advantages
from roll.algorithms.kl import KLController, token_kl
from roll.algorithms.moments import RunningMoments
from roll.algorithms.reward_shaping import RewardShaping, shape_rewards
from roll.pipeline.batch import TrainingBatch


@dataclass(frozen=True)
class AdvantageSettings:
    """Settings of the advantage estimation. The KL controller and the reward moments keep state between batches."""

    estimator: AdvantageEstimator
    shaping: RewardShaping
    reward_moments: RunningMoments
    whitened: bool
    advantage_clip: float | None
    kl_controller: KLController | None
    """Controller of the weight of the KL penalty in the token rewards; None: no penalty."""
    kl_estimator: str
    episode_weight: float = 1.0
    """Weight of an episode's (or a response's) shaped reward, at its last token."""
    turn_weight: float = 0.0
    """Weight of the rewards of turns, at the last token of each."""

    def memory(self) -> dict[str, Any]:
        """Return the state that a checkpoint must keep."""
        controller = {} if self.kl_controller is None else self.kl_controller.state()
        return {"reward_moments": self.reward_moments.state(), "kl_controller": controller}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Restore the state that `memory` returned. Keys that it lacks are left as they are."""
        if "reward_moments" in memory:
            self.reward_moments.restore(memory["reward_moments"])
        if self.kl_controller is not None and memory.get("kl_controller"):
            self.kl_controller.restore(memory["kl_controller"])


def add_advantages(batch: TrainingBatch, settings: AdvantageSettings) -> dict[str, float]:
    """Shape the rewards and fill ``advantages`` (float32 ``[total_tokens]``) into the batch.

    Samples that shaping leaves out also leave the loss mask. Returns metrics over the sampled tokens. Raises
    `ValueError` if turn rewards have a weight but the samples record no turns.
    """
    metrics = _shape(batch, settings)
    # Estimators see whole episodes, although an episode may reach the trainer as several samples.
    data = batch.data.joined([len(parts) for parts in batch.episodes])
    mask = torch.from_numpy(data.padded("response_mask", fill=False))
    penalty = settings.kl_controller
    logprobs = torch.from_numpy(data.padded("behaviour_logprobs")) if penalty else None
    reference = torch.from_numpy(data.padded("reference_logprobs")) if penalty else None
    baselines = [group.baseline_score for group in batch.groups for _ in group.episodes]
    in_turns = "turns" in data.tokens
    if settings.turn_weight and not in_turns:
        raise ValueError(
            "the samples record no turns, so rewards of turns cannot be credited: let the environment manager fill "
            "`turns` and `turn_rewards`, or set `step_reward_weight: 0` and `episode_reward_weight: 1`"
        )
    turns = torch.from_numpy(data.padded("turns", fill=-1)) if in_turns else None
    values = torch.from_numpy(data.padded("values")) if settings.estimator.traits.needs_values else None
    estimated = estimate_advantages(
        settings.estimator,
        settings.episode_weight * torch.from_numpy(data.per_sample["rewards"]),
        mask,
        batch.group_of_episode,
        logprobs=logprobs,
        reference_logprobs=reference,
        kl_coef=penalty.coef if penalty else 0.0,
        kl_estimator=settings.kl_estimator,
        values=values,
        baseline_rewards=None if None in baselines else torch.tensor(baselines, dtype=torch.float32),
        turn_rewards=settings.turn_weight * torch.from_numpy(data.padded("turn_rewards"))
        if settings.turn_weight
        else None,
        turns=turns,
        states=None if turns is None else _states(turns, torch.from_numpy(data.padded("turn_states", fill=-1))),
    )
    padded = shape_advantages(estimated, mask, settings.whitened, settings.advantage_clip).numpy()
    if penalty and logprobs is not None and reference is not None:
        divergence = token_kl(logprobs, reference, mask, settings.kl_estimator).sum(-1).mean().item()
        metrics |= {"kl_penalty/coef": penalty.coef, "kl_penalty/nats_per_response": divergence}
        penalty.update(divergence, len(data))
    inside = np.arange(padded.shape[1])[None, :] < data.lengths[:, None]
    data.tokens["advantages"] = np.ascontiguousarray(padded[inside], dtype=np.float32)
    if values is not None:
        returns = torch.where(mask, estimated + values, 0.0).numpy()
        data.tokens["returns"] = np.ascontiguousarray(returns[inside], dtype=np.float32)
        data.tokens["old_values"] = data.tokens["values"]
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
    """Turn scores (and the penalties of turns) into rewards. Episodes left out of training leave the loss mask."""
    data, episodes = batch.data, batch.episodes
    parts = [len(samples) for samples in episodes]
    shaped = shape_rewards(
        torch.tensor([samples[0].score for samples in episodes], dtype=torch.float32),
        torch.from_numpy(batch.group_of_episode),
        torch.tensor([sum(sample.response_tokens for sample in samples) for samples in episodes]),
        torch.tensor([any(sample.finish_reason == "length" for sample in samples) for samples in episodes]),
        settings.shaping,
        settings.reward_moments,
        tags=torch.from_numpy(batch.tag_of_episode),
        penalties=torch.tensor([samples[0].reward - samples[0].score for samples in episodes], dtype=torch.float32),
    )
    data.per_sample["rewards"] = np.repeat(shaped.rewards.float().numpy(), parts)
    for samples, reward in zip(episodes, shaped.rewards.tolist(), strict=True):
        for sample in samples:
            sample.reward = reward
    if not shaped.keep.all():
        batch.leave_out(np.repeat(np.repeat(shaped.keep.numpy(), parts), data.lengths))
    return {f"reward/{name}": value for name, value in shaped.metrics.items()}


def _states(turns: torch.Tensor, token_states: torch.Tensor) -> torch.Tensor:
    """Return the state of each turn, int64 ``[batch, turns]``, from those of its tokens ``[batch, seq]``; -1: none."""
    number = int(turns.max()) + 1 if turns.numel() else 0
    states = token_states.new_full((len(turns), number + 1), -1)
    return states.scatter(1, torch.where(turns < 0, number, turns).long(), token_states)[:, :number]
