"""Reader of the files of a run. It tolerates missing files, because reports of failed runs are needed most.

If a file is missing or cannot be read, the reason is recorded under its name. Only a folder without any file of a run
is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from roll.report.lanes import Trace, read_trace
from roll.tracking.files import read_json_lines
from roll.tracking.logs import last_lines
from roll.tracking.run_directory import RunDirectory
from roll.tracking.summary import read_summary
from roll.tracking.trackers import read_metrics

_read_tail = partial(last_lines, count=60, max_bytes=64 * 1024)

_Content = TypeVar("_Content")


@dataclass(frozen=True)
class RunFiles:
    """Contents of the files of a run."""

    root: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """One record per step, in the order of the file."""
    trace: Trace = Trace([])
    samples: list[dict[str, Any]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    log_tail: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)
    """Name, bytes and time of the last change (seconds since the epoch) of each file."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Name of a file -> reason why its part of the report is empty."""
    held: bool = False
    """True if a process is using the run now."""

    @property
    def training_steps(self) -> list[dict[str, Any]]:
        """Records of training steps, without that of step 0, which is the validation before the first step."""
        return [record for record in self.metrics if record["step"] > 0]


class NoRun(FileNotFoundError):
    """The folder has none of the files of a run."""


def read_run(root: Path) -> RunFiles:
    """Read the files that exist. Raises `NoRun` if the folder has none of the files of a run."""
    run = RunDirectory(root)
    parts = (run.metrics, run.timeline, run.samples, run.summary, run.config)
    found = [(path.name, path.stat()) for path in parts if path.is_file()]
    if not found:
        wanted = ", ".join(path.name for path in parts)
        raise NoRun(f"{root} holds no run: name a folder with {wanted} (or some of them)")
    absent: dict[str, str] = {}
    config_text = _read(run.config, partial(Path.read_text, encoding="utf-8", errors="replace"), "", absent)
    return RunFiles(
        root=root,
        metrics=_read(run.metrics, _read_steps, [], absent),
        trace=_read(run.timeline, read_trace, Trace([]), absent),
        samples=_read(run.samples, _read_samples, [], absent),
        summary=_read(run.summary, read_summary, {}, absent),
        config_text=config_text,
        config=_parse_config(config_text, absent),
        log_tail="\n".join(_read(run.logs / "driver.log", _read_tail, [], absent)),
        files=[{"name": name, "bytes": facts.st_size, "modified": facts.st_mtime} for name, facts in found],
        absent=absent,
        held=run.is_held(),
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


def _read_steps(path: Path) -> list[dict[str, Any]]:
    records = read_metrics(path)
    for number, record in enumerate(records, start=1):
        if not isinstance(record.get("step"), int):
            raise ValueError(f"record {number} has no step")
    if not records:
        raise ValueError("no step has ended yet")
    return records


def _read_samples(path: Path) -> list[dict[str, Any]]:
    samples = read_json_lines(path)
    if not samples:
        raise ValueError("no sample has been written (`num_logged_samples`, or no step has ended yet)")
    return samples


def _parse_config(text: str, absent: dict[str, str]) -> dict[str, Any]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        absent["config.yaml"] = f"config.yaml is no YAML: {error}"
        return {}
    return config if isinstance(config, dict) else {}
