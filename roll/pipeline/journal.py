"""Writes the rollout journal in a background thread.

A group is encoded immediately, because training modifies its samples later. The thread writes it, and syncs the file
whenever no more writes are queued. An error in the thread is raised when the next group is reported.
"""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from roll.configs.run import PipelineConfig
from roll.data.records import Group, Prompt, decode_group, encode_group
from roll.rollout.buffer import FinishedGroup
from roll.rollout.journal import (
    Journal,
    RolloutProgress,
    dropped_record,
    finished_record,
    went_back_record,
)
from roll.rollout.ledger import DropReason
from roll.rollout.scheduler import SchedulerObserver
from roll.tracking.files import naming, write_atomically
from roll.tracking.run_directory import RunDirectory

_START_VERSION_BYTES = 8
_SETTINGS = "made_with.json"
ANSWERS = "(ground truths or metadata of the prompts)"
NOT_ON_RECORD = "(what they were made with is not on record)"
MOST_BYTES_BEHIND = 2 * 2**30
"""Maximum number of bytes queued for writing. More means that the disk is too slow, and memory would fill up."""


class JournalKeeper(SchedulerObserver[Any, Group]):
    """An observer that writes to a `Journal`.

    Its methods raise the error of an earlier write, usually an `OSError` that names the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with naming(folder):
            self._journal = Journal(folder)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._submitted = 0
        self._done = 0
        self._bytes_submitted = 0
        self._bytes_done = 0
        self._failure: Exception | None = None

    def made_with(self, settings: Mapping[str, Any]) -> None:
        """Record the rollout settings of the groups that follow.

        If the settings changed, earlier groups become invalid. If the process is killed during this, the next one
        completes it.
        """
        if other_settings(self._folder, settings):
            self._submit(self._make_anew)
        self._submit(write_atomically, self._folder / _SETTINGS, json.dumps(settings, indent=1))

    def went_back(self, step: int) -> None:
        """Record that the run resumes after training step ``step``, which invalidates later records."""
        self._submit(self._journal.append, went_back_record(step))

    def group_finished(self, group: FinishedGroup[Any, Group]) -> None:
        result = group.result
        versions = [group.start_version, result.baseline_version, *(sample.newest_version for sample in result.samples)]
        newest = int(np.concatenate([versions, *(sample.versions for sample in result.samples)]).max())
        start = group.start_version.to_bytes(_START_VERSION_BYTES, "little")
        payload = encode_group(result, before=start)
        self._submit(self._journal.append, finished_record(group.group_id, newest, payload), size=len(payload))

    def group_dropped(self, group_id: int, reason: DropReason, version: int) -> None:
        self._submit(self._journal.append, dropped_record(group_id, version, reason))

    def prune(self, oldest: RolloutProgress) -> None:
        """Delete segments that no checkpoint needs; ``oldest`` is the progress of the oldest checkpoint."""
        self._submit(self._journal.prune, oldest)

    def _make_anew(self) -> None:
        self._journal.append(went_back_record(-1))
        self._journal.sync()  # before the settings file, whose content means that this is done

    async def written(self) -> None:
        """Wait until all submitted records are on disk. Raises the first error of the thread."""
        await asyncio.wrap_future(self._thread.submit(lambda: None))
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Write all submitted records and close the journal. Raises the first error of the thread."""
        self._thread.shutdown()
        if self._failure is not None:
            with suppress(OSError):
                self._journal.close()
            raise self._failure
        with naming(self._folder):
            self._journal.close()

    def _submit(self, work: Callable[..., None], *arguments: Any, size: int = 0) -> None:
        if self._failure is not None:
            raise self._failure
        behind = self._bytes_submitted - self._bytes_done
        if behind > MOST_BYTES_BEHIND:
            raise OSError(
                errno.EIO, f"the disk does not keep up: {behind / 2**30:.1f} GiB of groups wait", str(self._folder)
            )
        self._submitted += 1
        self._bytes_submitted += size
        self._thread.submit(self._do, work, arguments, size)

    def _do(self, work: Callable[..., None], arguments: tuple[Any, ...], size: int) -> None:
        self._done += 1
        self._bytes_done += size
        if self._failure is not None:
            return
        try:
            with naming(self._folder):
                work(*arguments)
                if self._done == self._submitted:
                    self._journal.sync()
        except Exception as error:  # raised at the next group, and at the end
            self._failure = error


def other_settings(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the keys in which ``settings`` differ from those with which the journal's groups were made."""
    try:
        before = json.loads((folder / _SETTINGS).read_text())
    except (FileNotFoundError, ValueError):
        return [NOT_ON_RECORD]
    before.setdefault(ANSWERS, settings.get(ANSWERS))  # records of earlier versions lack them
    return [key for key in sorted({*before, *settings}) if before.get(key) != settings.get(key)]


def finished_again(group_id: int, item: Any, payload: bytes) -> FinishedGroup[Any, Group]:
    """Rebuild a finished group from its journal record. ``item``: its prompt or environment task.

    The record lacks some fields of a prompt, which a custom stage may read, so the group gets ``item``, if that is one.
    """
    start_version = int.from_bytes(payload[:_START_VERSION_BYTES], "little")
    group = decode_group(payload[_START_VERSION_BYTES:])
    if isinstance(item, Prompt):
        group.prompt = item
    return FinishedGroup(group_id, item, group, start_version)


@contextmanager
def journal_of(config: PipelineConfig, run: RunDirectory) -> Iterator[JournalKeeper | None]:
    """Open the journal of finished groups. Yields None if the run has no checkpoints to resume from."""
    if not config.save_steps and not run.journal.exists():
        yield None
        return
    journal = JournalKeeper(run.journal)
    try:
        yield journal
    except BaseException as failure:
        try:
            journal.close()
        except Exception as unwritten:
            if not _is_part_of(unwritten, failure):
                raise unwritten from failure
        raise
    journal.close()


def _is_part_of(error: BaseException, failure: BaseException) -> bool:
    """Return True if ``error``, an error of the journal, is the failure or one of its causes."""
    if isinstance(failure, BaseExceptionGroup):
        return any(_is_part_of(error, inner) for inner in failure.exceptions)
    return failure is error or (failure.__cause__ is not None and _is_part_of(error, failure.__cause__))


def forget_other_rollouts(run: RunDirectory, made_of: str) -> None:
    """At the start of a run from step 0, delete a journal whose groups it cannot use.

    The groups of an earlier process are usable if it had the same model and the same prompts or environments.
    ``made_of`` identifies these.
    """
    note = run.journal / "made_of.txt"
    if note.exists() and note.read_text() == made_of:
        return
    shutil.rmtree(run.journal, ignore_errors=True)
    run.journal.mkdir()
    write_atomically(note, made_of)
