"""Checkpoints of a run: copied during a short pause of training, written while training continues, and always complete.

``checkpoints/step-N/`` is a model in Hugging Face format. With `save_steps` it also has ``state/``, which the trainer
needs to resume, and ``state/checkpoint.json``, the state of the driver. All files are written into a folder with a
temporary name. The folder is renamed only when its files and the metrics of step N are on disk. So a crash at any
moment leaves the earlier checkpoints intact.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from roll.configs.pictures import MODEL_INDEX
from roll.rollout.journal import RolloutProgress
from roll.tracking.files import naming, sync_file, sync_folder, write_atomically
from roll.tracking.waits import waiting
from roll.trainers.state import PICTURES, SINGLE

if TYPE_CHECKING:
    from roll.trainers.worker import TrainerGroup

logger = logging.getLogger(__name__)

FORMAT = 1
STATE = "state"
FACTS = "checkpoint.json"
_NAME = re.compile(r"step-(\d+)")


class DamagedCheckpoint(ValueError):
    """The checkpoint is incomplete or unreadable."""


@dataclass(frozen=True)
class DriverState:
    """State of the driver after a training step."""

    progress: RolloutProgress
    source: str
    """Fingerprint of the prompts or environment tasks of the groups, in order."""
    advantage_state: Mapping[str, Any] = field(default_factory=dict)
    """State of the running reward moments and the KL controller."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    state: DriverState

    @property
    def step(self) -> int:
        """Number of training steps completed at the checkpoint."""
        return self.state.progress.steps_done

    def role(self, name: str) -> Path:
        """Return the folder with the training state of a role."""
        return self.folder / STATE / name


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint after ``step`` training steps. It need not exist."""
    return checkpoints / f"step-{step}"


def exported_steps(checkpoints: Path) -> list[int]:
    """Return, in ascending order, the steps that have a model, with or without a training state."""
    names = (_NAME.fullmatch(path.name) for path in checkpoints.glob("step-*"))
    return sorted(int(match[1]) for match in names if match)


def saved_steps(checkpoints: Path) -> list[int]:
    """Return, in ascending order, the steps that have a training state to resume from, even a damaged one."""
    return [step for step in exported_steps(checkpoints) if (checkpoint_folder(checkpoints, step) / STATE).is_dir()]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint and check its files. Raises `DamagedCheckpoint` with what is wrong."""
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
    """Return the newest undamaged checkpoint, and the errors of newer ones."""
    damages: list[DamagedCheckpoint] = []
    for step in reversed(saved_steps(checkpoints)):
        try:
            return read_checkpoint(checkpoint_folder(checkpoints, step)), damages
        except DamagedCheckpoint as damage:
            damages.append(damage)
    return None, damages


def model_damage(folder: Path) -> str | None:
    """Return what is wrong with the model in a folder; None if all of its weights are there. Only headers are read."""
    single = SINGLE
    if (folder / MODEL_INDEX).exists():
        folder, single = folder / PICTURES[0], PICTURES[1]
    try:
        json.loads((folder / "config.json").read_text())
        index = folder / f"{single}.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {single}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        return f"{folder} holds no model that can be read: {cause!r}"
    for name in sorted(names):
        try:
            with safe_open(folder / name, framework="np"):
                pass  # opening it compares the sizes in the header with the size of the file
        except (OSError, SafetensorError) as cause:
            return f"{folder / name} cannot be read: {cause}"
    return None


@dataclass(frozen=True)
class _Pending:
    step: int
    partial: Path
    facts: dict[str, Any] | None
    """Content of ``checkpoint.json`` without its list of files; None for a model without a training state."""
    recorded: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Checkpointer:
    """Takes, completes and prunes the checkpoints of a run. Writes at most one training state at a time.

    The caller of `take` must hold the trainer's devices. `take` never waits for an earlier step to be recorded, because
    recording may need the same devices.
    """

    folder: Path
    trainers: Mapping[str, TrainerGroup]
    """The trained roles. The model of the first one is exported."""
    _: KW_ONLY
    save_steps: int
    max_steps: int
    keep: int
    """Number of checkpoints to keep; 0: all."""
    source: str
    on_oldest: Callable[[RolloutProgress], None]
    """Called after each completed checkpoint, with the progress of the oldest checkpoint that is left."""
    _copied: dict[int, set[str]] = field(default_factory=dict, init=False)
    """Step -> roles whose training state was copied."""
    _pending: dict[int, _Pending] = field(default_factory=dict, init=False)
    _queue: asyncio.Queue[_Pending] = field(default_factory=asyncio.Queue, init=False)
    _synced: int = field(default=0, init=False)
    """Number of bytes that this process has synced to disk."""

    def __post_init__(self) -> None:
        for partial in self.folder.glob(".step-*.partial"):  # of an earlier process
            shutil.rmtree(partial)

    def progress(self) -> tuple[object, ...]:
        """Return values that change as long as a checkpoint is being written."""
        return self._synced, *([*trainer.unwritten] for trainer in self.trainers.values())

    def due(self, step: int) -> bool:
        """Return True if a checkpoint is taken after this training step."""
        return step == self.max_steps or (self.save_steps > 0 and step % self.save_steps == 0)

    async def copy_state(self, step: int, role: str) -> None:
        """Copy the training state of a role into the checkpoint of this step.

        Call it while holding the role's devices, after its last update of the step. Each role is copied separately,
        because roles that share devices are never all loaded at once and finish the step at different times.
        """
        await self.trainers[role].written()  # of the previous checkpoint: at most one is in memory
        if self.save_steps:
            await self.trainers[role].snapshot(str(self._partial(step) / STATE / role))
        self._copied.setdefault(step, set()).add(role)

    def _partial(self, step: int) -> Path:
        return self.folder / f".step-{step}.partial"

    async def take(self, step: int, progress: RolloutProgress, advantage_state: Mapping[str, Any]) -> None:
        """Copy the training state and the model of the first role, and queue the checkpoint for completion.

        Call it while holding the first role's devices, between its training steps. The other roles must be copied
        before the step is recorded.
        """
        exported, *_ = self.trainers
        await self.copy_state(step, exported)
        partial = self._partial(step)
        await self.trainers[exported].export(str(partial))
        facts = None
        if self.save_steps:
            facts = {
                "format": FORMAT,
                "progress": asdict(progress),
                "source": self.source,
                "memory": dict(advantage_state),
            }
        self._pending[step] = _Pending(step, partial, facts)
        self._queue.put_nowait(self._pending[step])

    async def step_recorded(self, step: int) -> None:
        """Report that the metrics of a step are on disk. After the last step, wait until its checkpoint is complete."""
        if step in self._pending:
            self._pending[step].recorded.set()
            if step == self.max_steps:
                with waiting("checkpoints", f"the checkpoint of step {step}"):
                    await self._queue.join()

    async def run(self) -> None:
        """Complete one checkpoint after another until cancelled.

        Raises `OSError` or `WorkerFailed` if a checkpoint cannot be written, and `RuntimeError` if a role was not
        copied.
        """
        while True:
            pending = await self._queue.get()
            await pending.recorded.wait()
            missing = self.trainers.keys() - self._copied.pop(pending.step)
            if missing and pending.facts is not None:  # without `save_steps` only the last model is saved
                raise RuntimeError(f"the states of {', '.join(sorted(missing))} were not copied at step {pending.step}")
            await self._written()
            final = checkpoint_folder(self.folder, pending.step)
            with waiting(f"disk/{final}", "a checkpoint to be on the disk"):
                await asyncio.to_thread(_publish, pending, final, self._count_synced)
            if pending.facts is not None:
                with waiting(f"disk/{self.folder}", "older checkpoints to be deleted"):
                    oldest = await asyncio.to_thread(prune, self.folder, self.keep)
                self.on_oldest(oldest)
            del self._pending[pending.step]
            self._queue.task_done()

    async def _written(self) -> None:
        for trainer in self.trainers.values():
            await trainer.written()

    def _count_synced(self, size: int) -> None:
        self._synced += size


def prune(folder: Path, keep: int) -> RolloutProgress:
    """Delete all but the newest ``keep`` checkpoints (0: delete none).

    Returns the progress of the oldest undamaged checkpoint that is left. Raises `DamagedCheckpoint` if there is none.
    """
    steps = saved_steps(folder)
    for step in steps[:-keep] if keep else []:
        _delete(checkpoint_folder(folder, step))
    for step in steps[-keep:]:
        try:
            return read_checkpoint(checkpoint_folder(folder, step)).state.progress
        except DamagedCheckpoint as damage:
            logger.warning("nobody can go back to a damaged checkpoint: %s", damage)
    raise DamagedCheckpoint(f"no checkpoint in {folder} is whole")


def abandon(folder: Path, step: int) -> Path:
    """Rename the checkpoint of a step that no longer belongs to the run, and return its new path."""
    number, name = 1, f"abandoned-step-{step}"
    while (folder / name).exists():
        number += 1
        name = f"abandoned-step-{step}-{number}"
    os.replace(checkpoint_folder(folder, step), folder / name)
    return folder / name


def prune_abandoned(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` most recently written abandoned checkpoints (0: delete none)."""
    abandoned = sorted(folder.glob("abandoned-step-*"), key=lambda path: path.stat().st_mtime_ns)
    for path in abandoned[:-keep] if keep else []:
        _delete(path)


def _delete(checkpoint: Path) -> None:
    # Renamed first, because a partly deleted checkpoint must not look like a checkpoint.
    partial = checkpoint.with_name(f".step-{checkpoint.name.removeprefix('step-')}.partial")
    os.replace(checkpoint, partial)
    shutil.rmtree(partial)


def _publish(pending: _Pending, final: Path, on_synced: Callable[[int], None]) -> None:
    """Write the list of files, sync everything to disk, and rename the folder to its final name.

    ``on_synced`` is called with the size in bytes of each synced file.
    """
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
                sync_folder(path)
        sync_folder(partial)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        sync_folder(final.parent)
