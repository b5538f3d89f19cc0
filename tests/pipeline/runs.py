"""Runs of the whole pipeline for tests: in this process on a shared Ray cluster, or as a command of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_cluster import IN_THIS_PROCESS, FakeCluster
from tiny import write_config

from roll.cli.main import main
from roll.tracking.files import read_json_lines
from roll.tracking.trackers import read_metrics
from tests.warm_workers import search_path

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
        return read_json_lines(self.folder / "samples.jsonl")


def run_pipeline(
    folder: Path,
    address: str,
    config: dict[str, Any],
    expect: int = 0,
    before: Callable[[Path], None] = lambda out: None,
) -> FinishedRun:
    """Run a configuration on the shared cluster at an address, or `IN_THIS_PROCESS`. ``expect`` is the exit code;
    ``before`` is told the run directory."""
    out = folder / f"out-{uuid.uuid4().hex[:8]}"
    before(out)
    path = write_config(folder, {**placed(config, address), "output_dir": str(out)}, f"{out.name}.yaml")
    exit_code = command(address, "--config", str(path))
    assert exit_code == expect, (out / "summary.json").read_text() if out.exists() else "no run directory"
    return FinishedRun(out, exit_code)


def placed(config: dict[str, Any], address: str) -> dict[str, Any]:
    """A configuration for the cluster at an address."""
    return config if address == IN_THIS_PROCESS else {**config, "cluster": {**config["cluster"], "address": address}}


def command(address: str, *arguments: str) -> int:
    """The command line, in this process; ``address`` says where its workers are. Returns the exit code."""
    with FakeCluster() if address == IN_THIS_PROCESS else nullcontext():
        return main(arguments)


def go_on_from(step: int, run: FinishedRun, folder: Path, address: str, config: dict[str, Any]) -> FinishedRun:
    """As if the run had been interrupted before it had its last checkpoint."""
    shutil.rmtree(run.folder / "checkpoints" / f"step-{config['max_steps']}")
    resumed = {**placed(config, address), "resume_from_checkpoint": str(run.folder)}
    assert command(address, "--config", str(write_config(folder, resumed, f"{run.folder.name}-again.yaml"))) == 0
    assert run.summary["resumed_at"] == [step]
    return run


def start_command(folder: Path, config: dict[str, Any]) -> tuple[subprocess.Popen[str], Path]:
    """Start a run as a command of its own, with its own Ray. Returns the process and its run directory."""
    out = folder / f"out-{uuid.uuid4().hex[:8]}"
    path = write_config(folder, {**config, "output_dir": str(out)}, f"{out.name}.yaml")
    return start_process(path), out


def start_process(path: Path) -> subprocess.Popen[str]:
    """Start the command that trains as a file says, with a Ray of its own."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "start_pipeline.py"), "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": search_path(ROOT, TESTS)},
    )
