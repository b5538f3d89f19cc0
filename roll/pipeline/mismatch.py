"""The alarm on the distance between trainer and engine at equal weights (`mismatch/abs_mean` of a training step).

It looks at what the step has measured anyway. A step without tokens of equal version has measured nothing and raises
no alarm; the canaries of the weight publication are what is left then.
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
    """What happens above a limit."""

    limit: float
    """Nats per token."""
    stops: bool

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Judge training step ``step`` (counted from 1) by its metrics. NaN is above every limit. Raises
        `MismatchTooLarge` if the alarm stops the run, else warns."""
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
    """None without `mismatch_alarm`."""
    if config.mismatch_alarm is None:
        return None
    return MismatchAlarm(config.mismatch_alarm, config.mismatch_action == "stop")
