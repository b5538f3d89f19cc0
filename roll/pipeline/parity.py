"""The log-probability parity check of a run: which weight updates are checked, and the alarm on differences.

The trainer scores the sequences right after its weights are gathered, and the engines after they have loaded them
(`InferencePool.publish`). Both therefore score with the same version. The alarm reads `mismatch/abs_mean`, which a
training step measures anyway. A step without tokens of equal version measures nothing and raises no alarm. Then only
the parity check of the weight update is left.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roll.configs import derived
from roll.configs.run import PipelineConfig
from roll.data.records import SampleBatch
from roll.trainers.worker import TrainerGroup
from roll.weights.verify import CanaryScores, canary_sequences


class ParityCheck:
    """The canary sequences of a run, and the interval of checked weight updates."""

    def __init__(self, sequences: Sequence[np.ndarray], *, interval: int, tolerance: float) -> None:
        """Keep the sequences (int32 ``[length]`` each); ``tolerance`` is that of `CanaryScores`."""
        self._sequences = list(sequences)
        self._interval = interval
        self._tolerance = tolerance
        self._publications = 0

    async def score(self, trainer: TrainerGroup, version: int) -> CanaryScores | None:
        """Return the trainer's scores at ``version``, or None if this weight update is not checked.

        Call it once per weight update, while the trainer holds the weights of ``version``. The first one is always
        checked.
        """
        due = self._publications % self._interval == 0
        self._publications += 1
        if not due:
            return None
        batch = _as_batch(self._sequences)
        logprobs = np.split(await trainer.log_probs(batch, 1.0), batch.offsets[1:-1])
        return CanaryScores(version, self._sequences, logprobs, self._tolerance)


def build_parity_check(config: PipelineConfig, prompts: Sequence[np.ndarray]) -> ParityCheck | None:
    """Return the canary sequences made from ``prompts`` (int32 ``[prompt]`` each).

    Returns None with `weight_update.canary_interval: 0`.
    """
    update = config.weight_update
    if update.canary_interval == 0:
        return None
    sequences = canary_sequences(
        prompts, count=update.canary_prompts, length=derived.canary_length(config), seed=config.seed
    )
    return ParityCheck(sequences, interval=update.canary_interval, tolerance=derived.canary_tolerance(config))


def _as_batch(sequences: Sequence[np.ndarray]) -> SampleBatch:
    token_ids = np.concatenate(sequences)
    return SampleBatch(
        lengths=np.array([len(tokens) for tokens in sequences], dtype=np.int64),
        tokens={"token_ids": token_ids, "response_mask": np.ones(len(token_ids), dtype=bool)},
    )


logger = logging.getLogger(__name__)


class MismatchTooLarge(RuntimeError):
    """Trainer and engine disagree about the tokens that the engine sampled with the trainer's weights."""


@dataclass(frozen=True)
class MismatchAlarm:
    """Limit of the difference, and the action above it."""

    limit: float
    """Limit in nats per token."""
    stops: bool

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare the metrics of training step ``step`` (counted from 1) with the limit. NaN is above every limit.

        Raises `MismatchTooLarge` if the alarm stops the run, and warns otherwise.
        """
        value = metrics.get("mismatch/abs_mean")
        if value is None or value <= self.limit:
            return
        text = (
            f"step {step}: log-probabilities of trainer and engine differ by {value:.3g} nats per token on average "
            f"over {metrics['mismatch/tokens']:.0f} tokens sampled with the trainer's weights (at most "
            f"{metrics['mismatch/max']:.3g}); mismatch_alarm allows {self.limit:g}"
        )
        if self.stops:
            raise MismatchTooLarge(text)
        logger.warning(text)


def build_alarm(config: PipelineConfig) -> MismatchAlarm | None:
    """Build the alarm of a configuration; None without `mismatch_alarm`."""
    if config.mismatch_alarm is None:
        return None
    return MismatchAlarm(config.mismatch_alarm, config.mismatch_action == "stop")
