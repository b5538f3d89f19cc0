"""Runs that were killed, without waiting for their processes: their folders as SIGKILL would have left them.

A run with all its workers in this process goes to its end; when a step is on record its folder is copied, at once and
as it is, with the checkpoint of that step unfinished. (Whatever a kill may interrupt is in memory, and no copy has it.)
One run so gives a killed run for each of its steps; put back, the same command goes on with it, in this process too.
"""

from __future__ import annotations

import asyncio
import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import FinishedRun, command, placed
from tiny import write_config

from roll.pipeline.algorithm import TrainingBatch
from roll.pipeline.checkpoints import saved_steps
from roll.pipeline.recorder import RunRecorder
from roll.tracking.trackers import read_metrics


class KilledRun:
    """The same command again and again, as a job scheduler would give it."""

    def __init__(self, folder: Path, config: dict[str, Any], beside: Path | None = None) -> None:
        """``beside``: another folder that the run writes into."""
        self.out = folder / "run"
        self.output = ""
        """Of the last command."""
        self._written = [self.out] if beside is None else [self.out, beside]
        self._copies = folder / "moments"
        self._config = {**config, "output_dir": str(self.out), "resume_from_checkpoint": True}

    def finish(self, *overrides: str, expect: int = 0, address: str = IN_THIS_PROCESS) -> FinishedRun:
        """The command, to its end. ``expect`` is the exit code."""
        path = write_config(self.out.parent, placed(self._config, address), "resumed.yaml")
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            exit_code = command(address, "--config", str(path), *overrides)
        self.output = said.getvalue()
        assert exit_code == expect, self.output
        return FinishedRun(self.out, exit_code)

    def kill_when(self, reached: Callable[[Path], bool], *overrides: str) -> None:
        """The command, killed at its first step after which that is true of its folder."""
        with self.moments() as moments:
            self.finish(*overrides)
        killed = next((moment for moment in moments if reached(moment)), None)
        assert killed is not None, f"never in {len(moments)} steps"
        self.put_back(killed)

    @contextmanager
    def moments(self) -> Iterator[list[Path]]:
        """Copies of the folder when each step of the runs in this context was on record, checkpoints of the steps
        before complete."""
        shutil.rmtree(self._copies, ignore_errors=True)
        copies: list[Path] = []
        record = RunRecorder.step

        async def record_and_copy(recorder: RunRecorder, batch: TrainingBatch, *rest: Any) -> None:
            await record(recorder, batch, *rest)
            unfinished = [self.out / "checkpoints" / f".step-{step}.partial" for step in range(batch.step + 1)]
            while any(path.exists() for path in unfinished):
                await asyncio.sleep(0.01)
            copies.append(self._copies / f"step-{batch.step + 1}" / self.out.name)
            for folder in self._written:
                copy(folder, copies[-1].with_name(folder.name))

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(RunRecorder, "step", record_and_copy)
            yield copies

    def put_back(self, moment: Path) -> None:
        """Be the run that was killed at that moment."""
        for folder in self._written:
            shutil.rmtree(folder)
            copy(moment.with_name(folder.name), folder)


def copy(folder: Path, to: Path) -> None:
    """Also of a folder in which threads go on writing: what is gone when its turn comes is not copied."""

    def copy_file(source: str, target: str) -> None:
        with suppress(FileNotFoundError):
            shutil.copy2(source, target)

    try:
        shutil.copytree(folder, to, symlinks=True, copy_function=copy_file)
    except shutil.Error as error:
        still_there = [source for source, *_ in error.args[0] if Path(source).exists()]
        assert not still_there, error


def recorded_steps(out: Path) -> int:
    """Training steps on record in the folder of a run."""
    path = out / "metrics.jsonl"
    return max((record["step"] for record in read_metrics(path)), default=0) if path.exists() else 0


def newest_checkpoint(out: Path) -> int:
    """Step of the newest checkpoint in the folder of a run, 0 if there is none."""
    return max(saved_steps(out / "checkpoints"), default=0)
