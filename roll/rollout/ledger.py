"""The ledger of groups. At any time: issued = consumed + dropped (by reason) + buffered + in flight.

The ledger is the only place where groups are counted. Each transition is a method that takes constant time and rejects
illegal moves (ending twice, consuming an unfinished group), so a lost or duplicated group raises an error at the line
that caused it. Only open groups are stored: ids are handed out in order, so an issued id that is not open has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Literal, get_args

DropReason = Literal["failed", "filtered", "stale", "cancelled"]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)


class LedgerError(RuntimeError):
    """An illegal transition, or counts that do not add up."""


class _State(Enum):
    IN_FLIGHT = "in flight"
    BUFFERED = "buffered"


class Ledger:
    """Counts of groups, and the state of each group that has not ended."""

    def __init__(self) -> None:
        self.issued = 0
        self.consumed = 0
        self.buffered = 0
        self.in_flight = 0
        self.dropped: Counter[DropReason] = Counter()
        self._open: dict[int, _State] = {}

    @property
    def net_issued(self) -> int:
        """Number of issued groups that were not dropped; admission uses it as the number of the next group."""
        return self.issued - self.dropped.total()

    def issue(self) -> int:
        """Issue a new group, in flight, and return its id: 0, 1, 2, ... in order of issue, never used again."""
        group_id = self.issued
        self._open[group_id] = _State.IN_FLIGHT
        self.issued += 1
        self.in_flight += 1
        return group_id

    def finish(self, group_id: int) -> None:
        """Move a group from in flight to buffered. Raises `LedgerError` if it is not in flight."""
        self._require(group_id, _State.IN_FLIGHT, "finish")
        self._open[group_id] = _State.BUFFERED
        self.in_flight -= 1
        self.buffered += 1

    def consume(self, group_id: int) -> None:
        """Move a group from buffered to consumed. Raises `LedgerError` if it is not buffered."""
        self._require(group_id, _State.BUFFERED, "consume")
        del self._open[group_id]
        self.buffered -= 1
        self.consumed += 1

    def drop(self, group_id: int, reason: DropReason) -> None:
        """Drop a group that is in flight or buffered, which frees its slot for a new group.

        Raises `LedgerError` if the group has ended or the reason is unknown.
        """
        if reason not in DROP_REASONS:
            raise LedgerError(f"unknown drop reason {reason!r}; known are {', '.join(DROP_REASONS)}")
        if group_id not in self._open:
            raise LedgerError(f"cannot drop group {group_id}: it {self._fate(group_id)}")
        if self._open.pop(group_id) is _State.IN_FLIGHT:
            self.in_flight -= 1
        else:
            self.buffered -= 1
        self.dropped[reason] += 1

    @classmethod
    def resumed(cls, issued: int, dropped: Mapping[DropReason, int], in_flight: Iterable[int]) -> Ledger:
        """Return the ledger of a resumed run.

        Groups below ``issued`` that are not in flight were consumed or dropped. Raises `LedgerError` if more are
        dropped and in flight than were issued.
        """
        ledger = cls()
        ledger._open = dict.fromkeys(sorted(in_flight), _State.IN_FLIGHT)
        ledger.issued, ledger.in_flight = issued, len(ledger._open)
        ledger.dropped.update(dropped)
        ledger.consumed = ledger.net_issued - ledger.in_flight
        if ledger.consumed < 0:
            dropped_groups = ledger.dropped.total()
            raise LedgerError(f"{issued} groups cannot be {dropped_groups} dropped and {ledger.in_flight} in flight")
        return ledger

    def open_groups(self) -> list[int]:
        """Return the ids of the groups that have not ended, in order of issue."""
        return list(self._open)

    def counts(self) -> dict[str, int]:
        """Return the counts as metrics: ``issued``, ``consumed``, ``buffered``, ``in_flight``, ``dropped/<reason>``."""
        counts = {
            "issued": self.issued,
            "consumed": self.consumed,
            "buffered": self.buffered,
            "in_flight": self.in_flight,
        }
        return counts | {f"dropped/{reason}": self.dropped[reason] for reason in DROP_REASONS}

    def check(self) -> None:
        """Raise `LedgerError` unless issued = consumed + dropped + buffered + in flight. Constant time."""
        ended = self.consumed + self.dropped.total()
        unended = self.buffered + self.in_flight
        if self.issued != ended + unended or unended != len(self._open):
            raise LedgerError(f"the ledger does not add up: {self.counts()}, {len(self._open)} groups open")

    def _require(self, group_id: int, state: _State, verb: str) -> None:
        if self._open.get(group_id) is not state:
            raise LedgerError(f"cannot {verb} group {group_id}: it {self._fate(group_id)}, not {state.value}")

    def _fate(self, group_id: int) -> str:
        if group_id in self._open:
            return f"is {self._open[group_id].value}"
        return "has already ended" if 0 <= group_id < self.issued else "was never issued"
