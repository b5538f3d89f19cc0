"""A log of what became of groups, so that a run that was killed need not make finished rollouts again.

Records are appended, never changed. Each carries the newest policy version it depends on, and the log also says where
earlier runs went back to a checkpoint; from that alone follows what still counts: whatever depends on versions that
came after the checkpoint belongs to a future that did not happen. What a torn record loses is made again, so a
crash costs time and nothing else. Segments that only tell of ended groups are deleted, oldest first.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from roll.rollout.ledger import DROP_REASONS, DropReason

logger = logging.getLogger(__name__)

_MAGIC = b"rolljnl1"
_FRAME = struct.Struct("<II")
"""Bytes of the body, and their CRC-32."""
_BODY = struct.Struct("<Bqq")
"""Kind, group, version; the payload follows."""


class RecordKind(IntEnum):
    """What a record tells."""

    FINISHED = 1
    DROPPED = 2
    WENT_BACK = 3
    """A run began again after training step ``version``; of what was before only that counts which does not depend on a
    later version."""


@dataclass(frozen=True)
class JournalRecord:
    """One entry."""

    kind: RecordKind
    group_id: int
    version: int
    """Newest policy version that the entry depends on."""
    payload: bytes = b""
    """Of a finished group: the group, in whatever form the owner chose; of a dropped one: the reason."""


@dataclass(frozen=True)
class RolloutProgress:
    """Where the rollouts of a run stood when some training step was done; all that a checkpoint says of them."""

    steps_done: int
    issued: int
    """Groups issued: those with ids below this. A group is made of the source's item of the same number."""
    dropped: Mapping[DropReason, int]
    """Reason -> groups."""
    open_groups: tuple[int, ...]
    """Ids of issued groups that no completed training step was on and that were not dropped, ascending."""

    @classmethod
    def at_start(cls) -> RolloutProgress:
        """Of a run that has not begun."""
        return cls(0, 0, {}, ())


@dataclass(frozen=True)
class Recovered:
    """What a journal adds to the progress of a checkpoint."""

    issued: int
    finished: dict[int, bytes]
    """Group that waits to be trained on -> its payload."""
    dropped: dict[int, DropReason]
    """Groups that were dropped after the checkpoint."""
    in_flight: tuple[int, ...]
    """Groups to be made again, ascending."""


class Journal:
    """The writing end. One writer; `append` is on the system's side when it returns, on the disk after `sync`."""

    def __init__(self, folder: Path) -> None:
        """Begins a new segment after those that are there. `OSError` if the folder cannot be written."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._members: dict[Path, set[int]] = {path: _groups_of(path) for path in segments(folder)}
        self._open_segment()

    def append(self, record: JournalRecord) -> None:
        """Add a record."""
        body = _BODY.pack(record.kind, record.group_id, record.version) + record.payload
        self._file.write(_FRAME.pack(len(body), zlib.crc32(body)) + body)
        self._file.flush()
        if record.kind is not RecordKind.WENT_BACK:
            self._members[self._path].add(record.group_id)

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        os.fsync(self._file.fileno())

    def prune(self, oldest: RolloutProgress) -> None:
        """Begin a new segment, and delete the oldest ones as long as they tell of nothing that a return to ``oldest``
        or anything later would need."""
        self.sync()
        self._file.close()
        open_groups = set(oldest.open_groups)
        for path, members in list(self._members.items()):
            if any(group_id >= oldest.issued or group_id in open_groups for group_id in members):
                break
            path.unlink()
            del self._members[path]
        self._open_segment()

    def close(self) -> None:
        """No more records."""
        self._file.close()

    def _open_segment(self) -> None:
        number = max((int(path.stem) for path in self._members), default=0) + 1
        self._path = self._folder / f"{number:08d}.log"
        self._file = open(self._path, "xb")
        self._file.write(_MAGIC)
        self._file.flush()
        self._members[self._path] = set()


def segments(folder: Path) -> list[Path]:
    """The files of a journal, oldest first."""
    return sorted(folder.glob("[0-9]" * 8 + ".log"))


def read_journal(folder: Path) -> Iterator[JournalRecord]:
    """All whole records, oldest first. What follows damage in a segment is left out with a warning."""
    for path in segments(folder):
        yield from _read_segment(path)


def recover(records: Iterable[JournalRecord], progress: RolloutProgress) -> Recovered:
    """What a run that goes back to ``progress`` need not make again.

    Of several records of a group the last that counts is believed. Groups below the last one that is known of are
    issued, as ids are given out in order.
    """
    latest: dict[int, JournalRecord] = {}
    for record in records:
        if record.kind is RecordKind.WENT_BACK:
            latest = {group_id: known for group_id, known in latest.items() if known.version <= record.version}
        else:
            latest[record.group_id] = record
    open_groups = set(progress.open_groups)
    kept = {
        group_id: record
        for group_id, record in latest.items()
        if record.version <= progress.steps_done and (group_id >= progress.issued or group_id in open_groups)
    }
    issued = max(progress.issued, max(kept, default=-1) + 1)
    open_groups.update(range(progress.issued, issued))
    return Recovered(
        issued=issued,
        finished={
            group_id: record.payload for group_id, record in kept.items() if record.kind is RecordKind.FINISHED
        },
        dropped={
            group_id: _reason(record) for group_id, record in kept.items() if record.kind is RecordKind.DROPPED
        },
        in_flight=tuple(sorted(open_groups - kept.keys())),
    )


def finished_record(group_id: int, version: int, payload: bytes) -> JournalRecord:
    """The group is ready to be trained on."""
    return JournalRecord(RecordKind.FINISHED, group_id, version, payload)


def dropped_record(group_id: int, version: int, reason: DropReason) -> JournalRecord:
    """The group will not be trained on."""
    return JournalRecord(RecordKind.DROPPED, group_id, version, reason.encode())


def went_back_record(step: int) -> JournalRecord:
    """A run begins again after training step ``step``."""
    return JournalRecord(RecordKind.WENT_BACK, -1, step)


def made_anew_record() -> JournalRecord:
    """From here on groups are made in another way: nothing before it counts, as there is no version below 0."""
    return went_back_record(-1)


def _reason(record: JournalRecord) -> DropReason:
    (reason,) = (known for known in DROP_REASONS if known == record.payload.decode())
    return reason


def _groups_of(path: Path) -> set[int]:
    return {record.group_id for record in _read_segment(path) if record.kind is not RecordKind.WENT_BACK}


def _read_segment(path: Path) -> Iterator[JournalRecord]:
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            logger.warning("%s is no segment of a journal: its groups are made again", path)
            return
        while frame := file.read(_FRAME.size):
            record = _read_record(file.read, frame)
            if record is None:
                logger.warning("%s ends with a torn or damaged record: what it told is made again", path)
                return
            yield record


def _read_record(read: Callable[[int], bytes], frame: bytes) -> JournalRecord | None:
    """None: it is not whole."""
    if len(frame) < _FRAME.size:
        return None
    size, crc = _FRAME.unpack(frame)
    body = read(size)
    if len(body) < max(size, _BODY.size) or zlib.crc32(body) != crc:
        return None
    kind, group_id, version = _BODY.unpack_from(body)
    return JournalRecord(RecordKind(kind), group_id, version, body[_BODY.size :])
