"""The batch of one training step, which the stages of a pipeline fill in as it passes through them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.data.records import Group, Sample, SampleBatch
from roll.distributed.canaries import CanaryScores


class StalenessViolation(AssertionError):
    """A token older than `max_staleness` versions reached a batch, because of a bug in the scheduler. The run stops."""


@dataclass
class TrainingBatch:
    """The groups of one training step.

    ``step`` counts from 0. The step turns policy version ``step`` into version ``step + 1``.
    """

    step: int
    groups: list[Group]
    data: SampleBatch
    metrics: dict[str, float] = field(default_factory=dict)
    gathered: bool = False
    """True if the trainer has set the new weights aside for the weight update."""
    canaries: CanaryScores | None = None
    """The trainer's log-probabilities of the canary sequences at the new weights, if this weight update is checked."""
    memory: dict[str, Any] = field(default_factory=dict)
    """State of the advantage estimation after this batch, for a checkpoint."""

    @classmethod
    def from_groups(cls, step: int, groups: list[Group]) -> TrainingBatch:
        """Return the batch of training step ``step`` (from 0).

        The lag of each token is the number of versions that it is behind this step.
        """
        data = SampleBatch.from_samples([sample for group in groups for sample in group.samples])
        mask, versions = data.tokens["response_mask"], data.tokens["versions"]
        lags = data.tokens["lags"] = np.where(mask, step - versions, 0).astype(np.int32)
        # In a response that saw a weight update, late tokens have this version too, but were sampled over older caches.
        fresh = np.maximum.reduceat(lags, data.offsets[:-1]) == 0
        data.tokens["same_weights"] = np.repeat(fresh, data.lengths)
        return cls(step, groups, data)

    @property
    def samples(self) -> list[Sample]:
        """All samples, group by group: the rows of ``data``."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def episodes(self) -> list[list[Sample]]:
        """The samples of each episode of each group, in order."""
        return [episode for group in self.groups for episode in group.episodes]

    @property
    def group_of_episode(self) -> np.ndarray:
        """int64 ``[episodes]``: position in ``groups`` of each episode's group."""
        return np.repeat(np.arange(len(self.groups)), [len(group.episodes) for group in self.groups])

    @property
    def tag_of_episode(self) -> np.ndarray:
        """int64 ``[episodes]``: number of the domain tag of each episode's prompt."""
        names, tags = np.unique([group.prompt.domain for group in self.groups], return_inverse=True)
        return tags[self.group_of_episode]

    @property
    def lags(self) -> np.ndarray:
        """int64 ``[sampled tokens]``: training step minus version."""
        return self.data.tokens["lags"][self.data.tokens["response_mask"]].astype(np.int64)

    def leave_out(self, kept: np.ndarray) -> None:
        """Take tokens (bool ``[total_tokens]``: false) out of the loss, in addition to those already left out."""
        trained = self.data.tokens.get("loss_mask", self.data.tokens["response_mask"])
        self.data.tokens["loss_mask"] = trained & kept

    def note_time(self, stage: str, seconds: float) -> None:
        """Add to the time of a stage; see `StageItem.note_time`."""
        self.metrics[f"time/{stage}"] = self.metrics.get(f"time/{stage}", 0.0) + seconds

    def check_staleness(self, bound: int) -> None:
        """Raise `StalenessViolation` if a sampled token is older than ``bound`` versions, or from the future."""
        lags = self.lags
        if lags.size and (lags.max() > bound or lags.min() < 0):
            culprit = min(self.groups, key=self._oldest_version)
            raise StalenessViolation(
                f"training step {self.step}: lags from {lags.min()} to {lags.max()}, allowed 0 to {bound}; "
                f"oldest tokens in group {culprit.group_id}"
            )

    def _oldest_version(self, group: Group) -> int:
        return min((sample.oldest_version for sample in group.samples if sample.response_tokens), default=self.step)

    def describe_rollouts(self, detail: str = "reward") -> None:
        """Add the metrics of the rollouts: rewards, lengths and lags.

        Metrics of the samples go under ``detail``, where ``{domain}`` stands for their domain tag.
        """
        episodes = self.episodes
        scores = np.array([parts[0].score for parts in episodes], dtype=np.float32)
        lengths = np.array([sum(part.response_tokens for part in parts) for parts in episodes], dtype=np.float64)
        lags = self.lags
        per_group = [group.scores for group in self.groups]
        self.metrics.update(
            {
                "reward/mean": float(scores.mean()),
                "reward/std": float(scores.std()),
                "reward/min": float(scores.min()),
                "reward/max": float(scores.max()),
                "reward/zero_variance_groups": float(np.mean([np.ptp(values) == 0 for values in per_group])),
                "response/length_mean": float(lengths.mean()),
                "response/length_max": float(lengths.max()),
                "response/tokens": float(lengths.sum()),
                "response/truncated_share": float(
                    np.mean([any(part.finish_reason == "length" for part in parts) for parts in episodes])
                ),
                "lag/mean": float(lags.mean()) if lags.size else 0.0,
                "lag/max": float(lags.max()) if lags.size else 0.0,
            }
        )
        self.metrics.update(self._domain_rewards())
        self.metrics.update(self._sample_metrics(detail))

    def _domain_rewards(self) -> dict[str, float]:
        domains = sorted({group.prompt.domain for group in self.groups})
        return {
            f"reward/{domain}/mean": float(
                np.mean(np.concatenate([group.scores for group in self.groups if group.prompt.domain == domain]))
            )
            for domain in domains
        }

    def _sample_metrics(self, detail: str) -> dict[str, float]:
        values: dict[str, list[float]] = defaultdict(list)
        for group in self.groups:
            place = detail.format(domain=group.prompt.domain)
            for sample in group.samples:
                for name, value in sample.metrics.items():
                    values[f"{place}/{name}"].append(value)
        return {name: float(np.mean(values[name])) for name in sorted(values)}
