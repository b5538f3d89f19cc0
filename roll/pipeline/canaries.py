"""The log-probability parity check: which weight updates are checked, and the trainer's scores of the canary sequences.

The trainer scores the sequences right after its weights are gathered, and the engines after they have loaded them
(`InferencePool.publish`). Both therefore score with the same version.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.configs import derived
from roll.configs.schema import PipelineConfig
from roll.data.canaries import canary_sequences
from roll.data.records import SampleBatch
from roll.distributed.canaries import CanaryScores
from roll.distributed.trainers import TrainerGroup


class Canaries:
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


def build_canaries(config: PipelineConfig, prompts: Sequence[np.ndarray]) -> Canaries | None:
    """Return the canary sequences made from ``prompts`` (int32 ``[prompt]`` each).

    Returns None with `weight_update.canary_interval: 0`.
    """
    update = config.weight_update
    if update.canary_interval == 0:
        return None
    sequences = canary_sequences(
        prompts, count=update.canary_prompts, length=derived.canary_length(config), seed=config.seed
    )
    return Canaries(sequences, interval=update.canary_interval, tolerance=derived.canary_tolerance(config))


def _as_batch(sequences: Sequence[np.ndarray]) -> SampleBatch:
    token_ids = np.concatenate(sequences)
    return SampleBatch(
        lengths=np.array([len(tokens) for tokens in sequences], dtype=np.int64),
        tokens={"token_ids": token_ids, "response_mask": np.ones(len(token_ids), dtype=bool)},
    )
