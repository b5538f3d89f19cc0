"""Run the pipeline as a separate command, as a user does, and read the results from its files.

Most runs are the quick start's YAML with some keys replaced, on two CPU slots of one computing thread each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"


class BenchmarkFailed(RuntimeError):
    """Failure of one side of a comparison. The message has its last output."""


@dataclass(frozen=True)
class Span:
    """A period in which an actor was in one state, in seconds since the beginning of the run's timeline."""

    start: float
    end: float
    details: Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """A greedy evaluation, and the seconds of training before it."""

    step: int
    seconds: float
    accuracy: float


def make_task(folder: Path) -> None:
    """Make the quick start's model and data, in ``folder/model`` and ``folder/data``."""
    run_command([sys.executable, str(QUICKSTART / "make_model.py"), "--out", str(folder)], {})


def run_command(command: list[str], environment: Mapping[str, str]) -> None:
    """Run a command from the root of the repository. Raise `BenchmarkFailed` if it does not succeed."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if finished.returncode != 0:
        raise BenchmarkFailed(f"{' '.join(command)}\n{finished.stdout[-4000:]}")


@dataclass(frozen=True)
class PipelineRun:
    """The files of a finished run."""

    metrics: list[dict[str, Any]]
    """One object per training step, in order."""
    trace: list[dict[str, Any]]
    """The events of the timeline."""

    def column(self, name: str, warm_up: int) -> list[float]:
        """Return a metric of each step after the first ``warm_up`` steps."""
        return [step[name] for step in self.metrics[warm_up:]]

    def spans(self, actor: str, state: str) -> list[Span]:
        """Return the periods in which an actor of the timeline was in a state."""
        tracks = {
            (event["pid"], event["tid"])
            for event in self.trace
            if event["name"] == "thread_name" and event["args"]["name"] == actor
        }
        return [
            Span(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event.get("args", {}))
            for event in self.trace
            if event["name"] == state and (event["pid"], event["tid"]) in tracks
        ]

    def evaluations(self, domain: str) -> list[Evaluation]:
        """Return validations after the first one, with the seconds of training since the end of the first one.

        From the time of a validation, only the part in which the trainer did not work is left out: at ratio 1 the next
        training step may run during the validation.
        """
        accuracies = {step["step"]: step[f"val/{domain}/accuracy"] for step in self.metrics if _validated(step, domain)}
        training = self.spans("actor_train/0", "busy")
        first, *later = sorted(self.spans("validation", "running"), key=lambda span: span.start)
        found, left_out = [], 0.0
        for span in later:
            version = span.details["version"]
            found.append(Evaluation(version, span.start - first.end - left_out, accuracies[version]))
            left_out += span.end - span.start - sum(_overlap(span, busy) for busy in training)
        return found


def _validated(step: dict[str, Any], domain: str) -> bool:
    return f"val/{domain}/accuracy" in step


def _overlap(a: Span, b: Span) -> float:
    return max(0.0, min(a.end, b.end) - max(a.start, b.start))


def run_pipeline(task: Path, out: Path, overrides: Mapping[str, Any], eval_steps: int = 0) -> PipelineRun:
    """Run the quick start on the model and data in ``task`` with some keys replaced; its files go to ``out``.

    ``eval_steps`` is the number of training steps between validations; 0 means none.
    """
    validation_file = {"validation.data_args.file_name": task / "data" / "val.jsonl"}
    settings = {
        "output_dir": out,
        "pretrain": task / "model",
        "actor_train.data_args.file_name": task / "data" / "train.jsonl",
        "eval_steps": eval_steps,
        **(validation_file if eval_steps else {"validation": "null"}),
        "cluster.cpu_threads_per_device": 1,
        "track_with": "[]",
        "logging_steps": 1000,
        **overrides,
    }
    return run_file(QUICKSTART / "rlvr.yaml", out, settings)


def run_file(config: Path, out: Path, settings: Mapping[str, Any]) -> PipelineRun:
    """Run a configuration with some keys replaced, including ``output_dir``, which becomes ``out``."""
    start = [sys.executable, str(ROOT / "examples" / "start_pipeline.py"), "--config", str(config)]
    run_command([*start, *(f"{key}={value}" for key, value in settings.items())], {})
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    return PipelineRun(steps, json.loads((out / "timeline.json").read_text()))
