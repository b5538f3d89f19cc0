"""The scale of the loss in float16, whose smallest numbers are larger than many gradients.

The loss is multiplied before the backward pass, and the gradients, which are added up in float32, are divided after it.
The scale is as large as the gradients allow: it is halved when they overflow, and that update is skipped; it is doubled
after a number of updates without one. All ranks see the same norm, so all have the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGEST, SMALLEST = 2.0**24, 2.0**-4
"""Limits of the scale. Gradients that overflow at the smallest one are wrong, not large."""
GROWTH_INTERVAL = 200
"""Updates in a row without an overflow before the scale is doubled. A skipped update of reinforcement learning costs a
batch of rollouts, so the scale is not tried out often."""


@dataclass
class LossScale:
    """A scale that follows the gradients; 1 and constant unless ``dynamic``."""

    dynamic: bool
    value: float = 1.0
    good_updates: int = 0
    """Updates since the scale last changed."""

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """Return the scale with which training in ``dtype`` begins."""
        return cls(dynamic=True, value=2.0**14) if dtype == "float16" else cls(dynamic=False)

    def update(self, finite: bool) -> None:
        """Adapt to an update whose gradients were ``finite``."""
        if not self.dynamic:
            return
        if not finite:
            self.value, self.good_updates = max(SMALLEST, self.value / 2), 0
            return
        self.good_updates += 1
        if self.good_updates >= GROWTH_INTERVAL:
            self.value, self.good_updates = min(LARGEST, self.value * 2), 0
