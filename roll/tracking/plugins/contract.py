"""The contract of a plug-in tracker: a class with options that takes metrics and an end, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol


@dataclass(frozen=True)
class TrackerRun:
    """The run's identity for trackers."""

    name: str
    id: str
    """21 lower-case letters and digits, drawn once for each tracker of a run and kept in its folder."""
    folder: str
    """Folder for the tracker's files."""
    resumed: bool
    """True if the tracker has seen this run before, under this id."""
    config: dict[str, Any]
    """The resolved configuration, secrets redacted."""


@dataclass(frozen=True)
class Ending:
    """The end of a run."""

    status: Literal["success", "failed", "interrupted"]
    summary: dict[str, Any]
    """Content of `summary.json`."""
    error: str | None = None

    @property
    def exit_code(self) -> int:
        """Exit code for trackers: 0 is a success."""
        return 0 if self.status == "success" else 1


class PlugIn(Protocol):
    """A tracker. All calls come from one thread, in order. An exception is reported once and loses only that record."""

    Options: ClassVar[type]
    """A dataclass: the keys below `tracker_kwargs.<name>`, each field with its ``metadata["help"]``."""
    package: ClassVar[str | None]
    """Package that must be installed; None: none."""
    install: ClassVar[str]
    """Command that installs it."""

    def __init__(self, run: TrackerRun, options: Any) -> None:
        """Begin or resume the run. Libraries are imported here and not before."""

    @staticmethod
    def secret(options: Any) -> str | None:
        """Return the environment variable that must hold a key with these options; None: no key is needed."""

    @staticmethod
    def mode(options: Any) -> str:
        """Return where metrics go with these options, in a word or two: ``online``, ``offline``."""

    @property
    def where(self) -> str:
        """Address or folder where a user finds the metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step. Values may be NaN or infinite; a resumed run may report a step again."""

    def finish(self, ending: Ending) -> None:
        """Write out everything; the process ends afterwards."""


def flat_summary(summary: Mapping[str, Any], prefix: str = "summary") -> dict[str, Any]:
    """Return ``{"val/last": {"math": 0.5}}`` as ``{"summary/val/last/math": 0.5}``; None values are left out."""
    return dict(_leaves(summary, prefix))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(below, f"{path}/{key}")
    elif value is not None:
        yield path, value


def made(folder: str) -> str:
    """Create the folder if it does not exist, and return it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder
