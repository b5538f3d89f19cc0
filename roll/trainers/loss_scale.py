"""Dynamic loss scaling for float16, in which many gradients would underflow to zero.

The loss is multiplied by the scale before the backward pass. Gradients are accumulated in float32 and divided by the
scale afterwards. An overflow halves the scale, and the update is skipped. A number of updates without an overflow
doubles it. All ranks see the same gradient norm, so all have the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGEST, SMALLEST = 2.0**24, 2.0**-4
"""Limits of the scale. Gradients that overflow even at the smallest scale are wrong, not merely large."""
GROWTH_INTERVAL = 200
"""Consecutive updates without an overflow after which the scale is doubled. A skipped update wastes a batch of
rollouts, so larger scales are tried rarely."""


@dataclass
class LossScale:
    """Loss scale that adapts to the gradients. Constant 1 unless ``dynamic``."""

    dynamic: bool
    value: float = 1.0
    good_updates: int = 0
    """Updates since the scale last changed."""

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """Return the initial loss scale for training in ``dtype``."""
        return cls(dynamic=True, value=2.0**14) if dtype == "float16" else cls(dynamic=False)

    def update(self, finite: bool) -> None:
        """Adapt the scale after an update. ``finite``: its gradients did not overflow."""
        if not self.dynamic:
            return
        if not finite:
            self.value, self.good_updates = max(SMALLEST, self.value / 2), 0
            return
        self.good_updates += 1
        if self.good_updates >= GROWTH_INTERVAL:
            self.value, self.good_updates = min(LARGEST, self.value * 2), 0
