"""A log of finished and dropped groups, so that a run that was killed does not repeat finished rollouts.

Records are only appended. Each has a policy version: for a finished group, the newest version it depends on; for a
dropped group, the version at which a new group may start in its slot. A restart from the checkpoint after step s is
recorded, too, and voids all earlier records with versions above s, because those weights are lost. The record of a drop
may stay valid although the dropped group used lost weights. This is intended: the group that took its slot may be kept,
and without the drop, one group too many would be issued. A group with a damaged record is generated again, so a crash
costs nothing but time. Segments that mention only ended groups are deleted, oldest first.
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
from roll.tracking.files import sync_folder

logger = logging.getLogger(__name__)

_MAGIC = b"rolljnl2"
_EARLIER = b"rolljnl1"
"""Of segments whose groups have their texts elsewhere. They are read as well."""
_FRAME = struct.Struct("<II")
"""Length of the body in bytes, and its CRC-32."""
_BODY = struct.Struct("<Bqq")
"""Kind, group id and version; the payload follows."""


class RecordKind(IntEnum):
    """The event that a record describes."""

    FINISHED = 1
    DROPPED = 2
    WENT_BACK = 3
    """A restart after training step ``version``. It voids all earlier records with a later version."""


@dataclass(frozen=True)
class JournalRecord:
    """One entry of the journal."""

    kind: RecordKind
    group_id: int
    version: int
    """For a finished group: the newest policy version it depends on. For a drop: the policy version when its slot
    became free; the group that takes the slot starts at this version or a later one. For a restart: its step."""
    payload: bytes = b""
    """For a finished group: its data, in the caller's format. For a drop: the reason."""


@dataclass(frozen=True)
class RolloutProgress:
    """State of a run's rollouts at the end of a training step, as saved in a checkpoint."""

    steps_done: int
    issued: int
    """Number of issued groups: their ids are below this. Group n is made from item n of the source."""
    dropped: Mapping[DropReason, int]
    """Number of dropped groups by reason."""
    open_groups: tuple[int, ...]
    """Ids of issued groups that were not dropped and that no completed training step used, ascending."""

    @classmethod
    def at_start(cls) -> RolloutProgress:
        """Return the progress of a run that has not begun."""
        return cls(0, 0, {}, ())


@dataclass(frozen=True)
class Recovered:
    """Groups that a resumed run knows from a checkpoint and the journal together."""

    issued: int
    finished: dict[int, bytes]
    """Payload of each finished group that waits to be trained on, by group id."""
    dropped: dict[int, DropReason]
    """Drop reason of each group that was dropped after the checkpoint."""
    in_flight: tuple[int, ...]
    """Ids of the groups to generate again, ascending."""


class Journal:
    """Writer of a journal. A journal has one writer at a time.

    `append` passes a record to the operating system, where it survives the end of the process; `sync` writes it to
    disk.
    """

    def __init__(self, folder: Path) -> None:
        """Begin a new segment after the existing ones. Raises `OSError` if the folder cannot be written."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        self._members = {
            path: {record.group_id for record in _read_segment(path) if record.kind is not RecordKind.WENT_BACK}
            for path in segments(folder)
        }
        self._open_segment()

    def append(self, record: JournalRecord) -> None:
        """Add a record."""
        head = _BODY.pack(record.kind, record.group_id, record.version)
        frame = _FRAME.pack(len(head) + len(record.payload), zlib.crc32(record.payload, zlib.crc32(head)))
        self._file.write(frame + head)
        self._file.write(record.payload)
        self._file.flush()
        if record.kind is not RecordKind.WENT_BACK:
            self._members[self._path].add(record.group_id)

    def sync(self) -> None:
        """Wait until all records are on disk."""
        os.fsync(self._file.fileno())

    def prune(self, oldest: RolloutProgress) -> None:
        """Begin a new segment and delete old ones that no restart needs any more.

        ``oldest``: progress of the oldest checkpoint that the run may resume from. Segments are deleted from the oldest
        on, up to the first that mentions a group which was open or not yet issued at that checkpoint.
        """
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
        """Close the file; no more records can be appended."""
        self._file.close()

    def _open_segment(self) -> None:
        number = max((int(path.stem) for path in self._members), default=0) + 1
        self._path = self._folder / f"{number:08d}.log"
        self._file = open(self._path, "xb")
        self._file.write(_MAGIC)
        self._file.flush()
        self._members[self._path] = set()
        sync_folder(self._folder)


def segments(folder: Path) -> list[Path]:
    """Return the files of a journal, oldest first."""
    return sorted(folder.glob("[0-9]" * 8 + ".log"))


def read_journal(folder: Path) -> Iterator[JournalRecord]:
    """Yield all whole records, oldest first. The rest of a segment after a damaged record is skipped with a warning."""
    for path in segments(folder):
        yield from _read_segment(path)


def recover(records: Iterable[JournalRecord], progress: RolloutProgress) -> Recovered:
    """Return the groups that a run resumed at ``progress`` can reuse, and those that it must generate again.

    If a group has several valid records, the last one is used. Ids are given out in order, so every group up to the
    highest known id was issued.
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
    issued = max([progress.issued, *(group_id + 1 for group_id in kept)])
    open_groups.update(range(progress.issued, issued))
    return Recovered(
        issued=issued,
        finished={group_id: record.payload for group_id, record in kept.items() if record.kind is RecordKind.FINISHED},
        dropped={group_id: _reason(record) for group_id, record in kept.items() if record.kind is RecordKind.DROPPED},
        in_flight=tuple(sorted(open_groups - kept.keys())),
    )


def finished_record(group_id: int, version: int, payload: bytes) -> JournalRecord:
    """Return the record of a group that is ready to be trained on."""
    return JournalRecord(RecordKind.FINISHED, group_id, version, payload)


def dropped_record(group_id: int, version: int, reason: DropReason) -> JournalRecord:
    """Return the record of a group that will not be trained on."""
    return JournalRecord(RecordKind.DROPPED, group_id, version, reason.encode())


def went_back_record(step: int) -> JournalRecord:
    """Return the record of a restart after training step ``step``.

    Step -1 voids all earlier records, since versions begin at 0; use it when groups are generated differently from now
    on.
    """
    return JournalRecord(RecordKind.WENT_BACK, -1, step)


def _reason(record: JournalRecord) -> DropReason:
    (reason,) = (known for known in DROP_REASONS if known == record.payload.decode())
    return reason


def _read_segment(path: Path) -> Iterator[JournalRecord]:
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) not in (_MAGIC, _EARLIER):
            logger.warning("%s is no segment of a journal: its groups are made again", path)
            return
        while frame := file.read(_FRAME.size):
            record = _read_record(file.read, frame)
            if record is None:
                logger.warning("%s ends with a torn or damaged record: its groups are made again", path)
                return
            yield record


def _read_record(read: Callable[[int], bytes], frame: bytes) -> JournalRecord | None:
    """Return the record, or None if it is incomplete or damaged."""
    if len(frame) < _FRAME.size:
        return None
    size, crc = _FRAME.unpack(frame)
    body = read(size)
    if len(body) < max(size, _BODY.size) or zlib.crc32(body) != crc:
        return None
    kind, group_id, version = _BODY.unpack_from(body)
    return JournalRecord(RecordKind(kind), group_id, version, body[_BODY.size :])
