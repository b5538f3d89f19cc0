"""The files of a run, read as far as possible: a report of a failed run is worth most when files are missing.

A file that is missing or cannot be read becomes a reason under its name. Only a folder without any file of a run
raises.
"""

from __future__ import annotations

import fcntl
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from roll.report.lanes import Trace, read_trace
from roll.tracking.run_directory import RunDirectory
from roll.tracking.summary import read_samples
from roll.tracking.trackers import read_metrics

LOG_LINES = 60
"""Number of last lines of the driver's log."""

_Content = TypeVar("_Content")


@dataclass(frozen=True)
class RunFiles:
    """All content that a report is made of."""

    root: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """One record per step, in the order of the file."""
    trace: Trace | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    log_tail: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)
    """Name, bytes and time of the last change (seconds since the epoch) of each file."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Name of a file -> why its part of the report is empty."""
    held: bool = False
    """True if a process works on the run right now."""

    @property
    def training_steps(self) -> list[dict[str, Any]]:
        """Records of training steps; record 0 is the validation before the first."""
        return [record for record in self.metrics if record["step"] > 0]


class NoRun(FileNotFoundError):
    """The folder holds no run."""


def read_run(root: Path) -> RunFiles:
    """Read the files that exist. Raises `NoRun` if the folder holds none of the files of a run."""
    run = RunDirectory(root)
    parts = (run.metrics, run.timeline, run.samples, run.summary, run.config)
    found = [(path.name, path.stat()) for path in parts if path.is_file()]
    if not found:
        wanted = ", ".join(path.name for path in parts)
        raise NoRun(f"{root} holds no run: name a folder with {wanted} (or some of them)")
    absent: dict[str, str] = {}
    config_text = _read(run.config, _read_text, "", absent)
    return RunFiles(
        root=root,
        metrics=_read(run.metrics, _read_steps, [], absent),
        trace=_read(run.timeline, read_trace, None, absent),
        samples=_read(run.samples, _read_all_samples, [], absent),
        summary=_read(run.summary, _read_summary, {}, absent),
        config_text=config_text,
        config=_parse_config(config_text, absent),
        log_tail=_read(run.logs / "driver.log", _read_tail, "", absent),
        files=[{"name": name, "bytes": facts.st_size, "modified": facts.st_mtime} for name, facts in found],
        absent=absent,
        held=_is_held(root / ".lock"),
    )


def _read(path: Path, reader: Callable[[Path], _Content], nothing: _Content, absent: dict[str, str]) -> _Content:
    if not path.is_file():
        absent[path.name] = f"there is no {path.name} in the run's folder"
        return nothing
    try:
        return reader(path)
    except (OSError, ValueError) as error:
        absent[path.name] = f"{path.name} cannot be read: {error}"
        return nothing


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _read_steps(path: Path) -> list[dict[str, Any]]:
    records = read_metrics(path)
    for number, record in enumerate(records, start=1):
        if not isinstance(record.get("step"), int):
            raise ValueError(f"record {number} has no step")
    if not records:
        raise ValueError("no step has ended yet")
    return records


def _read_all_samples(path: Path) -> list[dict[str, Any]]:
    samples = read_samples(path)
    if not samples:
        raise ValueError("no sample has been written (`num_logged_samples`, or no step has ended yet)")
    return samples


_IN_THE_SUMMARY = {
    "ledger": (dict, "JSON object"),
    "val/first": (dict, "JSON object"),
    "val/last": (dict, "JSON object"),
    "resumed_at": (list, "list"),
    "seconds": (int | float, "number"),
    "first_step_seconds": (int | float, "number"),
}


def _read_summary(path: Path) -> dict[str, Any]:
    summary = json.loads(_read_text(path))
    if not isinstance(summary, dict):
        raise ValueError("it is no JSON object")
    for name, (kind, said) in _IN_THE_SUMMARY.items():
        if summary.get(name) is not None and not isinstance(summary[name], kind):
            raise ValueError(f"its {name} is no {said}")
    return summary


def _read_tail(path: Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, maxlen=LOG_LINES))


def _parse_config(text: str, absent: dict[str, str]) -> dict[str, Any]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        absent["config.yaml"] = f"config.yaml is no YAML: {error}"
        return {}
    return config if isinstance(config, dict) else {}


def _is_held(lock: Path) -> bool:
    """Return True if a process has claimed the run (`RunDirectory.held`).

    The lock is tested with a shared lock that is released at once.
    """
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
