"""Checkpoints of a run: whole or absent, taken while training waits briefly, written while it goes on.

``checkpoints/step-N/`` is a model in Hugging Face format; with `save_steps` it also has ``state/``: what the trainer
needs to go on, and ``state/checkpoint.json``: what the driver knew. Everything is written into a folder of another
name, and gets its own name when all of it is on the disk and the metrics of step N are. So a crash at any moment leaves
the checkpoints before it as they were.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from roll.rollout.journal import RolloutProgress
from roll.tracking.files import naming, sync_file, write_atomically
from roll.tracking.waits import waiting

if TYPE_CHECKING:
    from roll.distributed.trainers import TrainerGroup

logger = logging.getLogger(__name__)

FORMAT = 1
STATE = "state"
FACTS = "checkpoint.json"
_NAME = re.compile(r"step-(\d+)")


class DamagedCheckpoint(ValueError):
    """A folder that was a checkpoint once."""


@dataclass(frozen=True)
class DriverState:
    """What the driver knew after a training step."""

    progress: RolloutProgress
    source: str
    """Fingerprint of what groups are made of, in their order."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """What the reward moments and the KL controller remember."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole one."""

    folder: Path
    state: DriverState

    @property
    def step(self) -> int:
        """Training steps done when it was made."""
        return self.state.progress.steps_done

    def role(self, name: str) -> Path:
        """The training state of a role."""
        return self.folder / STATE / name


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint after so many training steps is, or will be."""
    return checkpoints / f"step-{step}"


def exported_steps(checkpoints: Path) -> list[int]:
    """Steps with a model, whether or not one can go on from there, ascending."""
    names = (_NAME.fullmatch(path.name) for path in checkpoints.glob("step-*"))
    return sorted(int(match[1]) for match in names if match)


def saved_steps(checkpoints: Path) -> list[int]:
    """Steps whose folders hold (or held) a state to go on from, ascending."""
    return [step for step in exported_steps(checkpoints) if (checkpoint_folder(checkpoints, step) / STATE).is_dir()]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises `DamagedCheckpoint`, which says what is wrong with it."""
    path = folder / STATE / FACTS
    try:
        facts = json.loads(path.read_text())
        if facts["format"] != FORMAT:
            raise DamagedCheckpoint(f"{folder} has format {facts['format']}; this version reads {FORMAT}")
        sizes = facts["files"]
        progress = facts["progress"] | {"open_groups": tuple(facts["progress"]["open_groups"])}
        state = DriverState(RolloutProgress(**progress), facts["source"], facts["memory"])
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder} has no {STATE}/{FACTS}") from None
    except (OSError, ValueError, KeyError, TypeError) as cause:
        if isinstance(cause, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{path} cannot be read: {cause!r}") from cause
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            there = "is missing" if found is None else f"has {found} bytes"
            raise DamagedCheckpoint(f"{folder / name} {there}, not {size}")
    return Checkpoint(folder, state)


def newest_whole(checkpoints: Path) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
    """The newest checkpoint that a run can go on from, and what is wrong with those after it."""
    damages: list[DamagedCheckpoint] = []
    for step in reversed(saved_steps(checkpoints)):
        try:
            return read_checkpoint(checkpoint_folder(checkpoints, step)), damages
        except DamagedCheckpoint as damage:
            damages.append(damage)
    return None, damages


def check_model(folder: Path) -> None:
    """Raises `DamagedCheckpoint` unless the folder holds a model with all of its weights. Reads headers only."""
    try:
        json.loads((folder / "config.json").read_text())
        index = folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise DamagedCheckpoint(f"{folder} holds no model that can be read: {cause!r}") from cause
    for name in sorted(names):
        try:
            with safe_open(folder / name, framework="np"):
                pass  # it compares what the header says with the size of the file
        except (OSError, SafetensorError) as cause:
            raise DamagedCheckpoint(f"{folder / name} cannot be read: {cause}") from cause


@dataclass(frozen=True)
class _Pending:
    step: int
    partial: Path
    facts: dict[str, Any] | None
    """None: a model only."""
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    completed: asyncio.Event = field(default_factory=asyncio.Event)


class Checkpointer:
    """Takes, completes and prunes the checkpoints of a run. At most one state is being written.

    `take` is called by whoever holds the trainer's devices, and never waits for the record of an earlier step: that
    may need the same devices.
    """

    def __init__(
        self,
        folder: Path,
        trainers: Mapping[str, TrainerGroup],
        *,
        save_steps: int,
        max_steps: int,
        keep: int,
        source: str,
        on_oldest: Callable[[RolloutProgress], None],
    ) -> None:
        """``trainers``: the trained roles; the model of the first one is exported. ``keep``: checkpoints that stay, 0
        for all. ``on_oldest`` hears of the progress of the oldest checkpoint each time that one was completed."""
        self._folder = folder
        self._trainers = trainers
        self._save_steps = save_steps
        self._max_steps = max_steps
        self._keep = keep
        self._source = source
        self._on_oldest = on_oldest
        self._copied_at: int | None = None
        self._copied: set[str] = set()
        self._pending: dict[int, _Pending] = {}
        self._queue: asyncio.Queue[_Pending] = asyncio.Queue()
        self._synced = 0
        """Bytes that this process has waited for."""
        discard_partial(folder)

    def progress(self) -> tuple[object, ...]:
        """What changes while a checkpoint reaches the disk."""
        return self._synced, *([*trainer.unwritten] for trainer in self._trainers.values())

    def due(self, step: int) -> bool:
        """Whether a checkpoint is taken after this training step."""
        return step == self._max_steps or (self._save_steps > 0 and step % self._save_steps == 0)

    async def copy_state(self, step: int, role: str) -> None:
        """Copy the training state of a role into the checkpoint of this step. To be called by whoever holds the role's
        devices, after its last update of the step: roles that share devices are never all there at once."""
        if step != self._copied_at:
            await self._written()  # of the checkpoint before: at most one is in memory
            self._copied_at, self._copied = step, set()
        if self._save_steps:
            await self._trainers[role].snapshot(str(self._partial(step) / STATE / role))
        self._copied.add(role)

    def _partial(self, step: int) -> Path:
        return self._folder / f".step-{step}.partial"

    async def take(self, step: int, progress: RolloutProgress, memory: Mapping[str, Any]) -> None:
        """Complete the copies of what belongs into it; to be called with the devices of the first role, while it does
        not train. The other roles were copied before."""
        exported, *_ = self._trainers
        await self.copy_state(step, exported)
        partial = self._partial(step)
        await self._trainers[exported].export(str(partial))
        facts = None
        if self._save_steps:
            missing = self._trainers.keys() - self._copied
            if missing:
                raise RuntimeError(f"the states of {', '.join(sorted(missing))} were not copied at step {step}")
            facts = {"format": FORMAT, "progress": asdict(progress), "source": self._source, "memory": dict(memory)}
        self._pending[step] = _Pending(step, partial, facts)
        self._queue.put_nowait(self._pending[step])

    async def step_recorded(self, step: int) -> None:
        """The metrics of a step are on the disk. Of the last step, returns when its checkpoint is complete."""
        if step in self._pending:
            pending = self._pending[step]
            pending.recorded.set()
            if step == self._max_steps:
                with waiting("checkpoints", f"the checkpoint of step {step}"):
                    await pending.completed.wait()

    async def run(self) -> None:
        """Complete one checkpoint after another. Raises `OSError` or `WorkerFailed` if one cannot be written."""
        while True:
            pending = await self._queue.get()
            await pending.recorded.wait()
            await self._complete(pending)
            del self._pending[pending.step]
            pending.completed.set()

    async def _written(self) -> None:
        for trainer in self._trainers.values():
            await trainer.written()

    async def _complete(self, pending: _Pending) -> None:
        final = checkpoint_folder(self._folder, pending.step)
        await self._written()
        with waiting(f"disk/{final}", "a checkpoint to be on the disk"):
            await asyncio.to_thread(_publish, pending, final, self._count_synced)
        if pending.facts is not None:
            with waiting(f"disk/{self._folder}", "older checkpoints to be deleted"):
                oldest = await asyncio.to_thread(prune, self._folder, self._keep)
            self._on_oldest(oldest)


    def _count_synced(self, size: int) -> None:
        self._synced += size


def prune(folder: Path, keep: int) -> RolloutProgress:
    """Delete all but the newest ``keep`` checkpoints (0: none); the progress of the oldest that is left and whole."""
    steps = saved_steps(folder)
    for step in steps[:-keep] if keep else []:
        # Under another name first: half a checkpoint must not look like one.
        partial = folder / f".step-{step}.partial"
        os.replace(checkpoint_folder(folder, step), partial)
        shutil.rmtree(partial)
    for step in steps[-keep:]:
        try:
            return read_checkpoint(checkpoint_folder(folder, step)).state.progress
        except DamagedCheckpoint as damage:
            logger.warning("nobody can go back to a damaged checkpoint: %s", damage)
    raise DamagedCheckpoint(f"no checkpoint in {folder} is whole")


def abandon(folder: Path, step: int) -> Path:
    """Put the checkpoint of this step aside: it is no part of the run any more. Returns where it is now."""
    number, name = 1, f"abandoned-step-{step}"
    while (folder / name).exists():
        number += 1
        name = f"abandoned-step-{step}-{number}"
    os.replace(checkpoint_folder(folder, step), folder / name)
    return folder / name


def prune_abandoned(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` of the abandoned checkpoints that were written last (0: none)."""
    abandoned = sorted(folder.glob("abandoned-step-*"), key=lambda path: path.stat().st_mtime_ns)
    for path in abandoned[:-keep] if keep else []:
        partial = folder / f".step-{path.name}.partial"
        os.replace(path, partial)
        shutil.rmtree(partial)


def discard_partial(folder: Path) -> None:
    """Remove what an earlier run was writing, or deleting, when it ended."""
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path)


def _publish(pending: _Pending, final: Path, on_synced: Callable[[int], None]) -> None:
    """Say what a complete folder holds, and give it its name. ``on_synced`` hears of the bytes that are on the disk."""
    partial = pending.partial
    with naming(final):
        if pending.facts is not None:
            files = {
                str(path.relative_to(partial)): path.stat().st_size for path in partial.rglob("*") if path.is_file()
            }
            write_atomically(partial / STATE / FACTS, json.dumps(pending.facts | {"files": files}, indent=1))
        for path in partial.rglob("*"):
            if path.is_file():
                sync_file(path, on_synced)
            else:
                _sync_folder(path)
        _sync_folder(partial)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        _sync_folder(final.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
