"""Admission control: when a group may start, and the limit on drops in a row. Pure state: no tasks, no clock.

With B groups per step, ratio r, staleness bound R, s steps done and engine version v, group number g starts iff

    g < (s + 1) B + r B    and    v >= g // B - R

The first condition limits how far generation runs ahead of training. The second one, together with the consumption rule
of `buffer.py`, ensures that no token is more than R versions old when it is trained on. At ratio 0 every group also
waits for the newest version that is to be published, so that nothing depends on timing. All arithmetic is exact.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Literal

from roll.rollout.ledger import DropReason

Refusal = Literal["complete", "paused", "budget", "version"]


class TooManyDrops(RuntimeError):
    """Too many groups in a row were dropped. The message counts the reasons; the last cause is chained."""


def exact_ratio(ratio: float | Fraction) -> Fraction:
    """Return the ratio as an exact fraction of its decimal notation: 0.1 becomes 1/10, not the nearest binary number.

    Raises `ValueError` if it is negative or not finite.
    """
    if not math.isfinite(ratio):
        raise ValueError(f"the ratio must be a finite number >= 0, not {ratio}")
    exact = ratio if isinstance(ratio, Fraction) else Fraction(repr(ratio))
    if exact < 0:
        raise ValueError(f"the ratio must be a finite number >= 0, not {ratio}")
    return exact


class Admission:
    """Admission rule. It decides in constant time if the next group may start, given only the number of that group."""

    def __init__(self, *, batch_size: int, max_steps: int, ratio: float | Fraction, max_staleness: int) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._total = max_steps * batch_size
        self._ahead = exact_ratio(ratio) * batch_size
        self._pauses = 0
        self._least_version = 0
        self.steps_done = 0
        self.version = 0

    def refusal(self, number: int) -> Refusal | None:
        """Return why group ``number`` may not start now; None if it may.

        ``number`` is the count of groups issued so far minus the dropped ones. ``complete``: the run has all the groups
        it needs. ``paused``: admission is paused. ``budget``: generation is as far ahead of training as allowed.
        ``version``: the engine's weights are too old for the step that will train on this group.
        """
        if number >= self._total:
            return "complete"
        if self._pauses:
            return "paused"
        if number >= (self.steps_done + 1) * self._batch_size + self._ahead:
            return "budget"
        if self.version < max(self._least_version, number // self._batch_size - self._max_staleness):
            return "version"
        return None

    def training_step_done(self, steps_done: int, publishes: bool = False) -> None:
        """Record that ``steps_done`` steps are complete. Raises `ValueError` unless it is one more than before.

        ``publishes``: the engine will get this version. At ratio 0 no group starts with an older one, whatever the
        bound allows.
        """
        if steps_done != self.steps_done + 1:
            raise ValueError(f"training step {steps_done} was reported done after step {self.steps_done}")
        self.steps_done = steps_done
        if publishes and not self._ahead:
            self._least_version = steps_done

    def weights_published(self, version: int) -> None:
        """Record that every live replica holds ``version`` or newer.

        Raises `ValueError` if the version is older than before, or if no training step has produced it yet.
        """
        if version < self.version:
            raise ValueError(f"version {version} was published after version {self.version}; versions never go back")
        if version > self.steps_done:
            raise ValueError(f"version {version} was published, but only {self.steps_done} training steps are done")
        self.version = version

    def resume_at(self, steps_done: int) -> None:
        """Set the state of a resumed run, whose engine will hold the weights of the last completed step."""
        self.steps_done = self.version = steps_done

    @property
    def is_paused(self) -> bool:
        """True while admission is paused. No group may start then."""
        return self._pauses > 0

    def pause(self) -> None:
        """Start nothing until `resume`. Pauses are counted: each `resume` undoes one `pause`."""
        self._pauses += 1

    def resume(self) -> None:
        """Undo one `pause`. Raises `RuntimeError` if there is none."""
        if not self._pauses:
            raise RuntimeError("admission was resumed without being paused")
        self._pauses -= 1


class DropLimit:
    """Limit on drops in a row. Each drop frees a slot for a new group, so without a limit a run could drop for ever."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row: Counter[DropReason] = Counter()

    def accepted(self) -> None:
        """Reset the count, because a group was accepted."""
        if self._in_a_row:
            self._in_a_row.clear()

    def dropped(self, reason: DropReason, cause: BaseException | None) -> None:
        """Count a dropped group. Raises `TooManyDrops` at the ``limit``-th drop in a row."""
        self._in_a_row[reason] += 1
        if self._in_a_row.total() < self._limit:
            return
        reasons = ", ".join(f"{count} {name}" for name, count in sorted(self._in_a_row.items()))
        last = f"; the last cause was {cause!r}" if cause is not None else ""
        message = f"{self._limit} groups were dropped in a row and none accepted ({reasons}){last}"
        raise TooManyDrops(message) from cause
