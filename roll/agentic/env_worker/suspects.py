"""Who is blamed for the deaths of environment processes, by tag and seed, which together make an episode repeatable.

A process holds many environments and cannot say which one ended it. Having been in a call when a process died is a
suspicion; two such deaths are enough to be kept apart from others, where a further death is proof. Proof is for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

DEATHS_TO_CONFINE = 2


class Who(NamedTuple):
    """All episodes of a tag and seed."""

    tag: str
    seed: int


class Suspects:
    """What is known about those that were near a death."""

    def __init__(self) -> None:
        self._deaths: Counter[Who] = Counter()
        self._proven: set[Who] = set()

    def must_be_alone(self, who: Who) -> bool:
        """Whether its episodes may share their process with nobody."""
        return who in self._proven or self._deaths[who] >= DEATHS_TO_CONFINE

    def process_died(self, in_a_call: Iterable[Who]) -> None:
        """One process died; each of these may have done it, however many of its episodes were there."""
        self._deaths.update(set(in_a_call))

    def prove(self, who: Who) -> None:
        """It was alone in a process that died."""
        self._proven.add(who)

    def acquit(self, who: Who) -> None:
        """An episode of it has ended alone in a process that did not die. What is proven stays."""
        del self._deaths[who]
