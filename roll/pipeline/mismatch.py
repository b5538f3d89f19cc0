"""The alarm on the log-probability difference between trainer and engine at equal weights.

It reads `mismatch/abs_mean`, which a training step measures anyway. A step without tokens of equal version measures
nothing and raises no alarm. Then only the log-probability parity check of the weight update is left.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from roll.configs.schema import PipelineConfig

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
