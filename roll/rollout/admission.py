"""When a group may start, and when giving slots back has gone on for too long. Pure state machines: no task, no clock.

With B groups per step, ratio r, bound R, s steps done and engine version v, group number g starts iff
``g < (s + 1) B + r B`` and ``v >= g // B - R``. The first line alone is a budget, not a bound: it is the second, with
the consumption rule of `buffer.py`, that keeps every token within R versions. All arithmetic is exact.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Literal

from roll.rollout.ledger import DropReason

Refusal = Literal["complete", "paused", "budget", "version"]


class TooManyRefunds(RuntimeError):
    """Group after group was dropped and none accepted. The message counts the reasons; the last cause is chained."""


def exact_ratio(ratio: float | Fraction) -> Fraction:
    """The ratio as its decimal digits say: 0.1 is 1/10, not the binary number next to it.

    Raises `ValueError` if it is negative or not finite.
    """
    if isinstance(ratio, float) and not math.isfinite(ratio):
        raise ValueError(f"the ratio must be a finite number >= 0, not {ratio}")
    exact = ratio if isinstance(ratio, Fraction) else Fraction(repr(ratio))
    if exact < 0:
        raise ValueError(f"the ratio must be a finite number >= 0, not {ratio}")
    return exact


class Admission:
    """Decides whether the next group may start, from its number alone, in constant time."""

    def __init__(self, *, batch_size: int, max_steps: int, ratio: float | Fraction, max_staleness: int) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._total = max_steps * batch_size
        self._ahead = exact_ratio(ratio) * batch_size
        self._pauses = 0
        self.steps_done = 0
        self.version = 0

    def refusal(self, number: int) -> Refusal | None:
        """Why group ``number`` (issued minus refunded groups so far) may not start now; None if it may.

        ``complete``: the run has all the groups it needs; ``paused``; ``budget``: enough is ahead of training;
        ``version``: the engine's weights are too old for the step this group is meant for.
        """
        if number >= self._total:
            return "complete"
        if self._pauses:
            return "paused"
        if number >= (self.steps_done + 1) * self._batch_size + self._ahead:
            return "budget"
        if self.version < number // self._batch_size - self._max_staleness:
            return "version"
        return None

    def training_step_done(self, steps_done: int) -> None:
        """``steps_done`` steps are complete. Raises `ValueError` unless it is one more than before."""
        if steps_done != self.steps_done + 1:
            raise ValueError(f"training step {steps_done} was reported done after step {self.steps_done}")
        self.steps_done = steps_done

    def weights_published(self, version: int) -> None:
        """Every live replica now holds ``version`` or newer. Raises `ValueError` if that is older than before, or a
        version that no training step has made yet."""
        if version < self.version:
            raise ValueError(f"version {version} was published after version {self.version}; versions never go back")
        if version > self.steps_done:
            raise ValueError(f"version {version} was published, but only {self.steps_done} training steps are done")
        self.version = version

    def resume_at(self, steps_done: int) -> None:
        """Of a run that goes on: its engine will have the weights of the last step."""
        self.steps_done = self.version = steps_done

    @property
    def is_paused(self) -> bool:
        """Whether no group may start, whatever the budget."""
        return self._pauses > 0

    def pause(self) -> None:
        """Start nothing until `resume`. Pauses add up, so that two owners do not resume each other's."""
        self._pauses += 1

    def resume(self) -> None:
        """Undo one `pause`. Raises `RuntimeError` if there is none."""
        if not self._pauses:
            raise RuntimeError("admission was resumed without being paused")
        self._pauses -= 1


class RefundCap:
    """Ends a run that drops group after group: each drop gives its slot back, so it would go on for ever."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row: Counter[DropReason] = Counter()

    def accepted(self) -> None:
        """A group was accepted: the row is over."""
        if self._in_a_row:
            self._in_a_row.clear()

    def dropped(self, reason: DropReason, cause: BaseException | None) -> None:
        """A group was dropped. Raises `TooManyRefunds` at the ``limit``-th in a row."""
        self._in_a_row[reason] += 1
        if self._in_a_row.total() < self._limit:
            return
        reasons = ", ".join(f"{count} {name}" for name, count in sorted(self._in_a_row.items()))
        last = f"; the last cause was {cause!r}" if cause is not None else ""
        message = f"{self._limit} groups were dropped in a row and none accepted ({reasons}){last}"
        raise TooManyRefunds(message) from cause
