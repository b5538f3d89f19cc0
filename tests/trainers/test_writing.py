"""What is written beside training: as long as it takes while bytes move, and no longer than a limit while none do."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roll.rollout.clock import run_virtual
from roll.runtime.workers import WorkerFailed, WorkerIdentity, WritingStuck
from roll.tracking import files
from roll.tracking.files import sync_file
from roll.trainers.state import SavedState, StateSnapshot, whole
from roll.trainers.worker import TrainerGroup, TrainWorker, Writing, WritingProgress

LIMIT = 100.0


class SlowDisks:
    """Two ranks whose files grow for so many seconds; a rank's bytes stand still from ``stuck_at`` on."""

    def __init__(self, seconds: list[float], stuck_at: float = float("inf"), failure: Exception | None = None) -> None:
        self.workers = [SimpleNamespace(name=f"actor_train/{rank}") for rank in range(len(seconds))]
        self.seconds = seconds
        self.stuck_at = stuck_at
        self.failure = failure
        self.asked_for: list[list[str]] = []

    async def call_all(self, method, *arguments, timeout):
        if method != "written":
            return []
        folders, wait = arguments
        assert timeout == LIMIT and wait < timeout / 2
        self.asked_for.append(folders)
        now = asyncio.get_running_loop().time
        longest = max(self.seconds)
        if self.failure is not None:
            raise self.failure
        await asyncio.sleep(max(0.0, min(wait, longest - now())))
        size = int(min(now(), self.stuck_at))
        return [
            [WritingProgress(f"/slow/rank-{rank}", size, 0, 0)] if now() < seconds else []
            for rank, seconds in enumerate(self.seconds)
        ]


def group_of(disks: SlowDisks) -> TrainerGroup:
    return TrainerGroup(disks, start_timeout_seconds=1, call_timeout_seconds=LIMIT)


async def saved(group: TrainerGroup) -> float:
    await group.snapshot("/slow/step-1/state")
    await group.export("/slow/step-1")
    await group.written()
    return asyncio.get_running_loop().time()


def test_a_checkpoint_may_take_many_times_the_limit_while_bytes_move():
    disks = SlowDisks([30 * LIMIT, 2 * LIMIT])
    assert run_virtual(saved(group_of(disks))) == 30 * LIMIT
    assert disks.asked_for[0] == ["/slow/step-1", "/slow/step-1/state"]


def test_a_file_that_stands_still_ends_the_wait_with_its_name_and_size():
    disks = SlowDisks([30 * LIMIT, 1.0], stuck_at=5 * LIMIT)

    async def scenario():
        with pytest.raises(WritingStuck, match=r"actor_train/0 has written nothing for 100 s .*/slow/rank-0 has 0.000"):
            await saved(group_of(disks))
        return asyncio.get_running_loop().time()

    assert 6 * LIMIT <= run_virtual(scenario()) <= 6.5 * LIMIT


def test_what_is_saved_later_is_waited_for_by_whoever_saved_it():
    async def scenario():
        disks = SlowDisks([3 * LIMIT])
        group = group_of(disks)
        await group.snapshot("first")
        waiting = asyncio.create_task(group.written())
        await asyncio.sleep(LIMIT)
        await group.snapshot("second")
        await waiting
        await group.written()
        return disks.asked_for

    asked_for = run_virtual(scenario())
    assert asked_for[0] == ["first"] == asked_for[-2] and asked_for[-1] == ["second"]


def test_a_failure_is_raised_as_it_is():
    failure = WorkerFailed("actor_train/0", "written", "OSError: no space left", "OSError")
    with pytest.raises(WorkerFailed, match="no space left"):
        run_virtual(saved(group_of(SlowDisks([1.0], failure=failure))))


def trainer_rank(strategy: object) -> TrainWorker:
    """A worker in this process, around something that can be saved."""
    place = SimpleNamespace(device="cpu", device_ids=(0,))
    worker = TrainWorker(WorkerIdentity("actor_train", 0, 1, place, None))
    worker._trainer, worker._writing = strategy, []
    return worker


class Saved:
    """As much of a trainer as a worker saves."""

    def __init__(self) -> None:
        self.half_written, self.may_write = threading.Event(), threading.Event()
        self.model = np.arange(3)

    def snapshot(self) -> StateSnapshot:
        return StateSnapshot([whole("weight/a", torch.arange(1000.0))], {"optimizer_steps": 1, "updates": {}})

    def export(self) -> Saved:
        return self

    def write(self, folder: str) -> None:
        path = Path(folder, "model.safetensors")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
        self.half_written.set()
        assert self.may_write.wait(60)
        path.write_bytes(b"half and half")


def test_a_worker_says_what_is_not_on_the_disk_yet_and_how_much_of_it_is(tmp_path):
    async def scenario():
        trainer = Saved()
        worker = trainer_rank(trainer)
        model, state = str(tmp_path / "model"), str(tmp_path / "model" / "state")
        await worker.snapshot(state)
        assert await worker.written([state], 60) == []
        await worker.export(model)
        assert await worker.written([state], 60) == [], "nobody asked for the export"
        assert await asyncio.to_thread(trainer.half_written.wait, 60)
        (unfinished,) = await worker.written([model, state], 0.01)
        assert (unfinished.path, unfinished.size, unfinished.synced) == (model, 4, 0)
        trainer.may_write.set()
        assert await worker.written([model, state], 60) == []

    asyncio.run(scenario())
    state = SavedState(tmp_path / "model" / "state")
    assert torch.equal(state.read_whole("weight/a", (1000,)), torch.arange(1000.0))


def test_a_worker_whose_disk_refuses_says_why(tmp_path):
    async def scenario():
        (tmp_path / "file").touch()
        worker = trainer_rank(Saved())
        await worker.snapshot(str(tmp_path / "file" / "state"))
        with pytest.raises(OSError, match="file"):
            await worker.written([str(tmp_path / "file" / "state")], 60)

    asyncio.run(scenario())


def test_bytes_on_the_disk_are_progress_although_the_file_does_not_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SYNC_PIECE", 64 * 1024)
    path, content = tmp_path / "large", np.random.default_rng(0).bytes(200 * 1024 + 7)
    path.write_bytes(content)
    pieces: list[int] = []
    sync_file(path, pieces.append)
    assert pieces == [64 * 1024] * 3 + [8 * 1024 + 7, 0] and path.read_bytes() == content

    async def scenario():
        piece, go_on = threading.Event(), threading.Event()

        def work(synced):
            synced(5)
            piece.set()
            assert go_on.wait(60)

        writing = Writing("here", path, work)
        before = WritingProgress(str(path), len(content), path.stat().st_blocks * 512, 0)
        await asyncio.to_thread(piece.wait, 60)
        progress = writing.progress()
        go_on.set()
        await writing.task
        return before, progress

    before, progress = asyncio.run(scenario())
    assert progress != before and progress.synced == 5 and (progress.size, progress.allocated) == (
        before.size, before.allocated
    )  # fmt: skip


def test_small_and_empty_files_are_synced_at_once(tmp_path):
    for size in (0, 9):
        (tmp_path / "small").write_bytes(b"x" * size)
        pieces: list[int] = []
        sync_file(tmp_path / "small", pieces.append)
        assert pieces == [size]
    with pytest.raises(OSError, match="gone"):
        sync_file(tmp_path / "gone", pieces.append)
