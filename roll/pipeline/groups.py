"""`groups.jsonl`: lengths and times of every group that was trained on or dropped by the filter, one line each.

`roll simulate --replay` and calibrations read it. Groups that failed, or were dropped as stale, are not in it. Trained
groups are written at the end of their step, filtered ones at once: a resumed run makes the former again, but not all of
the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from roll.data.records import Group
from roll.rollout.journal import Recovered
from roll.tracking.files import JsonLines, keep_lines

TIMES = ("issued", "generated", "judged", "consumed")


class GroupLog(JsonLines):
    """Writer that appends to `groups.jsonl`."""

    def write(self, groups: Iterable[Group], step: int) -> None:
        """Append groups that ended by the record of ``step``. Raises `OSError` with the path."""
        for group in groups:
            self.append(group_record(group, step))


def drop_lines(path: Path, recovered: Recovered) -> None:
    """Remove the lines of filtered groups that a resumed run generates again."""

    def stays(record: dict[str, Any]) -> bool:
        number = record["group"]
        return not is_filtered(record) or (number < recovered.issued and number not in recovered.in_flight)

    keep_lines(path, stays)


def is_filtered(record: Mapping[str, Any]) -> bool:
    """Return True for the line of a group that the filter dropped."""
    return "consumed" in record and record["consumed"] is None


def group_record(group: Group, step: int) -> dict[str, Any]:
    """Return the line of a group.

    ``responses``: sampled tokens of each episode; ``prompt``: mean number of the others. The times are seconds since
    the epoch, null if unknown; without ``consumed`` the group was dropped. Episodes have their numbers of ``turns`` and
    the seconds of their ``waits``, in which their environments worked.
    """
    episodes = group.episodes
    responses = [sum(part.response_tokens for part in parts) for parts in episodes]
    tokens = sum(len(part.token_ids) for part in group.samples)
    record: dict[str, Any] = {
        "step": step,
        "group": group.group_id,
        "prompt": round((tokens - sum(responses)) / len(episodes), 1),
        "responses": responses,
        **{name: round(group.times[name], 3) if name in group.times else None for name in TIMES},
    }
    if group.waits:
        turns = [
            [0 if part.turns is None else 1 + int(part.turns.max(initial=0)) for part in parts] for parts in episodes
        ]
        record |= {"turns": [max(1, *each) for each in turns], "waits": [round(each, 6) for each in group.waits]}
    return record
