"""The range of numbers that a setting accepts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """A range of numbers with optional limits. NaN is in no range."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def contains(self, value: float) -> bool:
        """Return True if ``value`` is in the range."""
        return (
            value == value
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        signs = {">=": self.at_least, ">": self.above, "<=": self.at_most, "<": self.below}
        return " and ".join(f"{sign} {limit}" for sign, limit in signs.items() if limit is not None)
