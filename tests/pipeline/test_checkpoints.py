"""A checkpoint is whole or absent, whatever fails and whenever."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from roll.pipeline.checkpoints import (
    Checkpointer,
    DamagedCheckpoint,
    checkpoint_folder,
    read_checkpoint,
    saved_steps,
)
from roll.rollout.journal import RolloutProgress


class Trainer:
    """Writes a model at once, and its state when it is told to."""

    def __init__(self, may_write: asyncio.Event | None = None, failure: OSError | None = None) -> None:
        self.may_write = may_write
        self.failure = failure
        self.unwritten: dict[Path, bytes] = {}

    async def export(self, folder: str) -> None:
        self.unwritten[Path(folder) / "model.safetensors"] = b"model"

    async def snapshot(self, folder: str) -> None:
        self.unwritten[Path(folder) / "rank-00000.safetensors"] = b"state of rank 0"

    async def written(self) -> None:
        if self.unwritten and self.may_write is not None:
            await self.may_write.wait()
        if self.unwritten and self.failure is not None:
            raise self.failure
        while self.unwritten:
            path, content = self.unwritten.popitem()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def progress(step: int) -> RolloutProgress:
    return RolloutProgress(step, step * 8 + 3, {"failed": step}, (step * 8, step * 8 + 2))


def checkpointer(
    folder: Path, trainer: Trainer, oldest: list | None = None, critic: Trainer | None = None, **changes
) -> Checkpointer:
    trainers = {"actor_train": trainer} | ({} if critic is None else {"critic": critic})
    settings = {"save_steps": 2, "max_steps": 10, "keep": 2, "source": "prompts"} | changes
    seen = oldest if oldest is not None else []
    return Checkpointer(folder, trainers, on_oldest=seen.append, **settings)


async def train(checkpoints: Checkpointer, steps) -> None:
    running = asyncio.create_task(checkpoints.run())
    try:
        for step in steps:
            if checkpoints.due(step):
                await checkpoints.take(step, progress(step), {"coef": step})
            recorded = asyncio.create_task(checkpoints.step_recorded(step))
            done, _ = await asyncio.wait([recorded, running], return_when=asyncio.FIRST_COMPLETED)
            if running in done:
                recorded.cancel()
                running.result()
    finally:
        running.cancel()


def test_every_second_step_and_the_last_are_kept_and_older_ones_pruned(tmp_path):
    oldest: list[RolloutProgress] = []
    asyncio.run(train(checkpointer(tmp_path, Trainer(), oldest, max_steps=9), range(1, 10)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-8", "step-9"]
    assert saved_steps(tmp_path) == [8, 9]
    assert oldest == [progress(2), progress(2), progress(4), progress(6), progress(8)]
    found = read_checkpoint(checkpoint_folder(tmp_path, 8))
    assert found.state.progress == progress(8) and found.state.advantage_state == {"coef": 8}
    assert found.step == 8 and found.state.source == "prompts"
    assert (found.role("actor_train") / "rank-00000.safetensors").read_bytes() == b"state of rank 0"
    assert (found.folder / "model.safetensors").read_bytes() == b"model"


def test_no_file_stays_open(tmp_path):
    asyncio.run(train(checkpointer(tmp_path, Trainer(), max_steps=2), [1, 2]))
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(train(checkpointer(tmp_path, Trainer(), max_steps=8), range(3, 9)))
    assert len(os.listdir("/proc/self/fd")) == before


def test_all_stay_where_that_is_asked_for(tmp_path):
    asyncio.run(train(checkpointer(tmp_path, Trainer(), keep=0), range(1, 11)))
    assert saved_steps(tmp_path) == [2, 4, 6, 8, 10]


def test_without_save_steps_only_the_last_model_is_written(tmp_path):
    asyncio.run(train(checkpointer(tmp_path, Trainer(), save_steps=0), range(1, 11)))
    assert saved_steps(tmp_path) == [] and [path.name for path in tmp_path.iterdir()] == ["step-10"]
    assert [path.name for path in (tmp_path / "step-10").iterdir()] == ["model.safetensors"]


def test_each_role_is_copied_when_its_devices_are_there(tmp_path):
    actor, critic = Trainer(), Trainer()
    checkpoints = checkpointer(tmp_path, actor, critic=critic)

    async def whole():
        running = asyncio.create_task(checkpoints.run())
        await checkpoints.copy_state(2, "critic")
        assert not actor.unwritten, "only whoever was asked for is copied"
        await checkpoints.copy_state(4, "critic")  # it may be a step ahead
        await checkpoints.take(2, progress(2), {})
        await checkpoints.step_recorded(2)
        while not saved_steps(tmp_path):
            await asyncio.sleep(0.01)
        await checkpoints.take(6, progress(6), {})
        await checkpoints.step_recorded(6)
        with pytest.raises(RuntimeError, match="critic were not copied at step 6"):
            await running

    asyncio.run(asyncio.wait_for(whole(), 60))
    found = read_checkpoint(checkpoint_folder(tmp_path, 2))
    assert all((found.role(role) / "rank-00000.safetensors").is_file() for role in ("actor_train", "critic"))


def test_a_checkpoint_waits_for_its_state_and_for_the_record_of_its_step(tmp_path):
    async def main():
        may_write = asyncio.Event()
        checkpoints = checkpointer(tmp_path, Trainer(may_write))
        running = asyncio.create_task(checkpoints.run())
        await checkpoints.take(2, progress(2), {})
        may_write.set()
        await asyncio.sleep(0.05)
        assert saved_steps(tmp_path) == [], "its step is not on record"
        await checkpoints.step_recorded(2)
        while not saved_steps(tmp_path):
            await asyncio.sleep(0.01)
        may_write.clear()
        await checkpoints.take(4, progress(4), {})
        await checkpoints.step_recorded(4)
        third = asyncio.create_task(checkpoints.take(6, progress(6), {}))
        await asyncio.sleep(0.05)
        assert saved_steps(tmp_path) == [2] and not third.done(), "one state at a time"
        may_write.set()
        await third
        while len(saved_steps(tmp_path)) < 2:
            await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_next_one_is_taken_though_the_step_of_the_last_is_not_on_record(tmp_path):
    """Its record may need the devices that the trainer holds while it waits here."""

    async def main():
        checkpoints = checkpointer(tmp_path, Trainer(), keep=0)
        running = asyncio.create_task(checkpoints.run())
        for step in (2, 4, 6):
            await checkpoints.take(step, progress(step), {})
        for step in (2, 4, 6):
            await checkpoints.step_recorded(step)
        while len(saved_steps(tmp_path)) < 3:
            await asyncio.sleep(0.01)
        running.cancel()
        assert read_checkpoint(checkpoint_folder(tmp_path, 4)).state.progress == progress(4)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_damaged_old_checkpoint_does_not_end_the_run(tmp_path):
    oldest: list[RolloutProgress] = []
    asyncio.run(train(checkpointer(tmp_path, Trainer(), keep=3, max_steps=4), [1, 2, 3, 4]))
    (tmp_path / "step-2" / "model.safetensors").unlink()
    asyncio.run(train(checkpointer(tmp_path, Trainer(), oldest, keep=3, max_steps=6), [5, 6]))
    assert saved_steps(tmp_path) == [2, 4, 6] and oldest == [progress(4)]


def test_a_state_that_cannot_be_written_is_raised_and_leaves_the_others(tmp_path):
    asyncio.run(train(checkpointer(tmp_path, Trainer(), max_steps=2), [1, 2]))
    full = Trainer(failure=OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        asyncio.run(asyncio.wait_for(train(checkpointer(tmp_path, full), [3, 4, 5, 6]), 60))
    assert saved_steps(tmp_path) == [2]
    checkpointer(tmp_path, full)  # the next process
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: (state / "actor_train" / "rank-00000.safetensors").write_bytes(b"st"), "has 2 bytes, not 15"),
        (lambda state: (state / "actor_train" / "rank-00000.safetensors").unlink(), "is missing, not 15"),
        (lambda state: (state.parent / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda state: (state / "checkpoint.json").unlink(), "has no state/checkpoint.json"),
        (lambda state: (state / "checkpoint.json").write_text("{"), "cannot be read"),
        (lambda state: (state / "checkpoint.json").write_text("[]"), "cannot be read"),
        (lambda state: _change(state, format=2), "^[^ ]*/step-2 has format 2; this version reads 1"),
        (lambda state: _change(state, progress={"steps_done": 1}), "cannot be read"),
    ],
)
def test_damage_is_said_in_so_many_words(tmp_path, damage, message):
    asyncio.run(train(checkpointer(tmp_path, Trainer(), max_steps=2), [1, 2]))
    damage(tmp_path / "step-2" / "state")
    with pytest.raises(DamagedCheckpoint, match=message):
        read_checkpoint(tmp_path / "step-2")


def _change(state: Path, **changes) -> None:
    path = state / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_an_earlier_process_was_writing_is_removed(tmp_path):
    (tmp_path / ".step-4.partial" / "state").mkdir(parents=True)
    checkpointer(tmp_path, Trainer())
    assert list(tmp_path.iterdir()) == []
