"""A power cut leaves everything that a run has waited for until it was on the disk."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch

from roll.pipeline.checkpoints import (
    Checkpointer,
    abandon,
    checkpoint_folder,
    newest_whole,
    prune_abandoned,
    read_checkpoint,
    saved_steps,
)
from roll.rollout.journal import Journal, RolloutProgress, finished_record, read_journal
from roll.runtime.placement import WorkerPlace
from roll.runtime.workers import WorkerIdentity
from roll.tracking.files import write_atomically
from roll.tracking.trackers import MetricsLog
from roll.trainers.state import SavedState, StateSnapshot, whole, write_state
from roll.trainers.worker import TrainWorker
from tests.power_cut import PowerCut

STATE = StateSnapshot([whole("weight/a", torch.arange(6.0))], {"optimizer_steps": 3, "updates": {}})


class Trainer:
    """Writes a model and a state of two ranks, and waits for nothing: whatever reaches the disk, the driver saw to."""

    async def export(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "model.safetensors").write_bytes(b"model")

    async def snapshot(self, folder):
        Path(folder).mkdir(parents=True)
        for rank in range(2):
            Path(folder, f"rank-{rank:05d}.safetensors").write_bytes(b"rank %d" % rank)

    unwritten: list[object] = []

    async def written(self):
        pass


def progress(step: int) -> RolloutProgress:
    return RolloutProgress(step, 8 * step, {}, ())


async def train(folder: Path) -> Checkpointer:
    nothing_older = lambda oldest: None  # noqa: E731
    checkpoints = Checkpointer(
        folder,
        {"actor_train": Trainer()},
        save_steps=2,
        max_steps=4,
        keep=0,
        source="prompts",
        on_oldest=nothing_older,
    )
    running = asyncio.create_task(checkpoints.run())
    for step in (2, 4):
        await checkpoints.take(step, progress(step), {"coef": step})
        await checkpoints.step_recorded(step)
    running.cancel()
    return checkpoints


def test_checkpoints_are_whole_after_a_power_cut(tmp_path, monkeypatch):
    folder, cut = tmp_path / "checkpoints", PowerCut(monkeypatch)
    folder.mkdir()
    asyncio.run(train(folder))
    left = cut.survivors(folder, tmp_path / "left")
    assert saved_steps(left) == [2, 4]
    for step in (2, 4):
        found = read_checkpoint(checkpoint_folder(left, step))
        assert found.state.progress == progress(step) and found.state.advantage_state == {"coef": step}
        assert (found.folder / "model.safetensors").read_bytes() == b"model"
        state = found.role("actor_train")
        assert [path.read_bytes() for path in sorted(state.iterdir())] == [b"rank 0", b"rank 1"]


def test_nothing_gets_a_checkpoints_name_before_it_is_on_the_disk(tmp_path, monkeypatch):
    """The new name may reach the disk by itself, long before what is in the folder."""
    folder, cut = tmp_path / "checkpoints", PowerCut(monkeypatch)
    folder.mkdir()
    rename, renamed = os.replace, []

    def replace(source, target):
        if Path(target).parent == folder:
            left = tmp_path / f"left {len(renamed)}"
            renamed.append(newest_whole(cut.survivors(source, left / "step-1").parent))
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    asyncio.run(train(folder))
    assert [(found.step, damages) for found, damages in renamed] == [(2, []), (4, [])]


def test_a_step_that_is_done_again_replaces_what_had_its_name_and_bytes_on_the_disk_are_progress(tmp_path):
    for leftover in ("model.safetensors", "of another run"):
        (tmp_path / "step-4").mkdir(exist_ok=True)
        (tmp_path / "step-4" / leftover).write_text("old")
    checkpoints = asyncio.run(train(tmp_path))
    found = [path for step in (2, 4) for path in (tmp_path / f"step-{step}").rglob("*") if path.is_file()]
    assert not (tmp_path / "step-4" / "of another run").exists() and saved_steps(tmp_path) == [2, 4]
    assert checkpoints.progress() == (sum(path.stat().st_size for path in found), [])


def content(path: Path, cut: PowerCut, into: Path) -> bytes:
    """Read the remains of a file whose name is known to be there."""
    cut.forget_names_of(path.parent)
    left = cut.survivors(path.parent, into) / path.name
    return left.read_bytes() if left.exists() else b""


def test_the_state_of_a_rank_is_on_the_disk_when_its_writing_has_ended(tmp_path, monkeypatch):
    """On another machine than the driver's: nobody else could wait for it."""
    cut, told = PowerCut(monkeypatch), []
    path = write_state(tmp_path / "state", 0, STATE, told.append)
    assert content(path, cut, tmp_path / "left") == path.read_bytes() != b""
    assert sum(told) == path.stat().st_size
    assert torch.equal(SavedState(tmp_path / "left").read_whole("weight/a", (6,)), torch.arange(6.0))


class Model:
    """The strategy of a trainer rank, and its exported model."""

    def export(self) -> Model:
        return self

    def write(self, folder: str) -> None:
        Path(folder).mkdir()
        for name in ("config.json", "model.safetensors"):
            Path(folder, name).write_bytes(name.encode())


def test_an_exported_model_is_on_the_disk_when_its_writing_has_ended(tmp_path, monkeypatch):
    cut, folder = PowerCut(monkeypatch), tmp_path / "model"

    async def export() -> None:
        worker = TrainWorker(WorkerIdentity("actor_train", 0, 1, WorkerPlace(0, "cpu", (0,), 1), None))
        worker._strategy = worker._trainer = Model()
        worker._writing = []
        await worker.export(str(folder))
        assert await worker.written([str(folder)], 60) == []

    asyncio.run(export())
    cut.forget_names_of(folder)
    left = cut.survivors(folder, tmp_path / "left")
    assert {path.name: path.read_bytes() for path in left.iterdir()} == {
        "config.json": b"config.json",
        "model.safetensors": b"model.safetensors",
    }


def test_synced_records_of_the_journal_survive(tmp_path, monkeypatch):
    cut = PowerCut(monkeypatch)
    journal = Journal(tmp_path / "journal")
    records = [finished_record(number, 0, b"group") for number in range(3)]
    for record in records:
        journal.append(record)
    journal.sync()
    left = cut.survivors(tmp_path, tmp_path / "left")
    assert list(read_journal(left / "journal")) == records
    journal.append(finished_record(3, 0, b"late"))
    journal.prune(RolloutProgress.at_start())
    left = cut.survivors(tmp_path, tmp_path / "later")
    kept = [record.group_id for record in read_journal(left / "journal")]
    assert kept == [0, 1, 2, 3], "a segment is whole before the next one"
    journal.append(finished_record(4, 0, b"of the second segment"))
    journal.sync()
    left = cut.survivors(tmp_path, tmp_path / "last")
    assert [record.group_id for record in read_journal(left / "journal")] == [0, 1, 2, 3, 4]
    journal.close()


def test_metrics_are_on_the_disk_before_the_checkpoint_of_their_step(tmp_path, monkeypatch):
    cut = PowerCut(monkeypatch)
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log({"reward/mean": 1.0}, 1)
    log.sync()
    assert content(log_path := tmp_path / "metrics.jsonl", cut, tmp_path / "left") == log_path.read_bytes() != b""
    log.close()


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_replaced_durably_is_on_the_disk(tmp_path, monkeypatch, durable):
    cut, path = PowerCut(monkeypatch), tmp_path / "summary.json"
    write_atomically(path, "text", durable=durable)
    assert content(path, cut, tmp_path / "left") == (b"text" if durable else b"")


def test_checkpoints_that_are_put_aside_keep_names_of_their_own_until_there_are_too_many(tmp_path):
    aside = []
    for turn in range(4):
        path = checkpoint_folder(tmp_path, 7)
        path.mkdir()
        (path / "turn").write_text(str(turn))
        aside.append(abandon(tmp_path, 7))
        os.utime(aside[-1], (turn, turn))
    assert [path.name for path in aside] == ["abandoned-step-7", *(f"abandoned-step-7-{n}" for n in (2, 3, 4))]
    assert [(path / "turn").read_text() for path in aside] == ["0", "1", "2", "3"]
    prune_abandoned(tmp_path, 0)
    assert all(path.is_dir() for path in aside), "0: all stay"
    prune_abandoned(tmp_path, 3)
    assert sorted(tmp_path.iterdir()) == aside[1:]
