"""Runs of the whole pipeline for tests: in this process on a shared Ray cluster, or as a command of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny import write_config

from roll.pipeline.cli import main
from roll.tracking.metrics import read_metrics
from roll.tracking.samples import read_samples

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parent


@dataclass
class FinishedRun:
    folder: Path
    exit_code: int

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The training steps (a validation before the first one is left out)."""
        return [step for step in read_metrics(self.folder / "metrics.jsonl") if step["step"] > 0]

    @property
    def samples(self) -> list[dict[str, Any]]:
        return read_samples(self.folder / "samples.jsonl")


def run_pipeline(
    folder: Path,
    address: str,
    config: dict[str, Any],
    expect: int = 0,
    before: Callable[[Path], None] = lambda out: None,
) -> FinishedRun:
    """Run a configuration on the shared cluster. ``expect`` is the exit code; ``before`` is told the run directory."""
    out = folder / f"out-{uuid.uuid4().hex[:8]}"
    before(out)
    config = {**config, "output_dir": str(out), "cluster": {**config["cluster"], "address": address}}
    path = write_config(folder, config, f"{out.name}.yaml")
    exit_code = main(["--config", str(path)])
    assert exit_code == expect, (out / "summary.json").read_text() if out.exists() else "no run directory"
    return FinishedRun(out, exit_code)


def go_on_from(step: int, run: FinishedRun, folder: Path, address: str, config: dict[str, Any]) -> FinishedRun:
    """As if the run had been interrupted before it had its last checkpoint."""
    shutil.rmtree(run.folder / "checkpoints" / f"step-{config['max_steps']}")
    cluster = {**config["cluster"], "address": address}
    resumed = {**config, "resume_from_checkpoint": str(run.folder), "cluster": cluster}
    assert main(["--config", str(write_config(folder, resumed, f"{run.folder.name}-again.yaml"))]) == 0
    assert run.summary["resumed_at"] == [step]
    return run


def start_command(folder: Path, config: dict[str, Any]) -> tuple[subprocess.Popen[str], Path]:
    """Start a run as a command of its own, with its own Ray. Returns the process and its run directory."""
    out = folder / f"out-{uuid.uuid4().hex[:8]}"
    path = write_config(folder, {**config, "output_dir": str(out)}, f"{out.name}.yaml")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "start_pipeline.py"), "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])},
    )
    return process, out
