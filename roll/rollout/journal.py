"""A log of what became of each group, so that a killed run does not repeat finished rollouts.

Records are appended, never changed. The record of a finished group carries the newest policy version it depends on,
that of a dropped one the version with which a group in its slot may start. The log also says where earlier runs went
back to a checkpoint. Together they tell which records still count: those whose version was made after the checkpoint do
not. A drop may thus count although it rests on weights that were lost. It must: a group in its slot may be kept, and
without the drop one group too many would be issued. A group whose record is torn is generated again, so a crash costs
time and nothing else. Segments that mention only ended groups are deleted, oldest first.
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

_MAGIC = b"rolljnl1"
_FRAME = struct.Struct("<II")
"""Length of the body in bytes, and its CRC-32."""
_BODY = struct.Struct("<Bqq")
"""Kind, group id and version; the payload follows."""


class RecordKind(IntEnum):
    """The event that a record describes."""

    FINISHED = 1
    DROPPED = 2
    WENT_BACK = 3
    """A restart after training step ``version``. Earlier records of a later version no longer count."""


@dataclass(frozen=True)
class JournalRecord:
    """One entry of the journal."""

    kind: RecordKind
    group_id: int
    version: int
    """Newest policy version that a finished group depends on; for a drop, the version at which its slot was free again.

    A group in the slot of a dropped one starts with that version or a later one.
    """
    payload: bytes = b""
    """The group in the owner's own format, if it finished; the drop reason, if it was dropped."""


@dataclass(frozen=True)
class RolloutProgress:
    """The state of a run's rollouts at the end of a training step, which is all that a checkpoint says of them."""

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
    """Information that a journal adds to the progress of a checkpoint."""

    issued: int
    finished: dict[int, bytes]
    """Payload of each finished group that waits to be trained on, by group id."""
    dropped: dict[int, DropReason]
    """Groups dropped after the checkpoint."""
    in_flight: tuple[int, ...]
    """Ids of the groups to generate again, ascending."""


class Journal:
    """Writer of a journal; only one at a time.

    After `append` a record is in the operating system's hands; after `sync` it is on the disk.
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
        body = _BODY.pack(record.kind, record.group_id, record.version) + record.payload
        self._file.write(_FRAME.pack(len(body), zlib.crc32(body)) + body)
        self._file.flush()
        if record.kind is not RecordKind.WENT_BACK:
            self._members[self._path].add(record.group_id)

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        os.fsync(self._file.fileno())

    def prune(self, oldest: RolloutProgress) -> None:
        """Begin a new segment and delete old ones.

        Segments are deleted from the oldest on, as long as a return to ``oldest`` or anything later needs none of their
        groups.
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
    """Return what a run that goes back to ``progress`` need not generate again.

    If a group has several records that count, the last one is used. Ids are given out in order, so every group up to
    the highest known id was issued.
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
    """Return the record of a run that restarts after training step ``step``.

    After step -1 no earlier record counts, since no version is below 0. Use step -1 when groups are made in another
    way from here on.
    """
    return JournalRecord(RecordKind.WENT_BACK, -1, step)


def _reason(record: JournalRecord) -> DropReason:
    (reason,) = (known for known in DROP_REASONS if known == record.payload.decode())
    return reason


def _read_segment(path: Path) -> Iterator[JournalRecord]:
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            logger.warning("%s is no segment of a journal: its groups are made again", path)
            return
        while frame := file.read(_FRAME.size):
            record = _read_record(file.read, frame)
            if record is None:
                logger.warning("%s ends with a torn or damaged record: its groups are made again", path)
                return
            yield record


def _read_record(read: Callable[[int], bytes], frame: bytes) -> JournalRecord | None:
    """Return the record, or None if it is not whole."""
    if len(frame) < _FRAME.size:
        return None
    size, crc = _FRAME.unpack(frame)
    body = read(size)
    if len(body) < max(size, _BODY.size) or zlib.crc32(body) != crc:
        return None
    kind, group_id, version = _BODY.unpack_from(body)
    return JournalRecord(RecordKind(kind), group_id, version, body[_BODY.size :])
