"""Suspicion about deaths of environment processes, by tag and seed, which together make an episode repeatable.

A process holds many environments and cannot say which one ended it. Being in a call when a process dies raises
suspicion. After two such deaths an episode runs apart from others; a death there is proof. Proof is permanent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

DEATHS_TO_CONFINE = 2


class Who(NamedTuple):
    """Tag and seed, which identify an episode and its repetitions."""

    tag: str
    seed: int


class Suspects:
    """Record of the episodes that were in a call when a process died."""

    def __init__(self) -> None:
        self._deaths: Counter[Who] = Counter()
        self._proven: set[Who] = set()

    def must_be_alone(self, who: Who) -> bool:
        """Return True if its episodes must not share their process."""
        return who in self._proven or self._deaths[who] >= DEATHS_TO_CONFINE

    def process_died(self, in_a_call: Iterable[Who]) -> None:
        """Record a death. Each of these may have caused it; several episodes of one count once."""
        self._deaths.update(set(in_a_call))

    def prove(self, who: Who) -> None:
        """Record that it was alone in a process that died."""
        self._proven.add(who)

    def acquit(self, who: Who) -> None:
        """Clear the suspicion: an episode of it has ended alone in a process that did not die. Proof stays."""
        del self._deaths[who]
