"""What a plug-in tracker is: a class with options, made in a process of its own, that takes metrics and an end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol


@dataclass(frozen=True)
class TrackerRun:
    """The run, as trackers call it."""

    name: str
    id: str
    """21 small letters and digits, drawn once for each tracker of a run and kept in its folder."""
    folder: str
    """Where the tracker may put files."""
    resumed: bool
    """Whether the tracker has seen this run before, under this id."""
    config: dict[str, Any]
    """The resolved configuration, secrets masked."""


@dataclass(frozen=True)
class Ending:
    """How the run ended."""

    status: Literal["success", "failed", "interrupted"]
    summary: dict[str, Any]
    """What `summary.json` says."""
    error: str | None = None

    @property
    def exit_code(self) -> int:
        """As trackers count: 0 is a success."""
        return 0 if self.status == "success" else 1


class PlugIn(Protocol):
    """A tracker. All calls come from one thread, in order; what they raise is told once and costs that record."""

    Options: ClassVar[type]
    """A dataclass: the keys below `tracker_kwargs.<name>`, each field with its ``metadata["help"]``."""
    package: ClassVar[str | None]
    """What has to be installed; None: nothing."""
    install: ClassVar[str]
    """How."""

    def __init__(self, run: TrackerRun, options: Any) -> None:
        """Begin, or go on with, the run. Libraries are imported here and not before."""

    @staticmethod
    def secret(options: Any) -> str | None:
        """The environment variable that must hold a key with these options; None: no key is needed."""

    @staticmethod
    def mode(options: Any) -> str:
        """Where metrics go with these options, in a word or two: ``online``, ``offline``."""

    @property
    def where(self) -> str:
        """An address or a folder, for whoever looks for the metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step. Values may be NaN or infinite; a run that goes on may tell of a step again."""

    def finish(self, ending: Ending) -> None:
        """Write out everything; the process ends afterwards."""


def flat_summary(summary: Mapping[str, Any], prefix: str = "summary") -> dict[str, Any]:
    """``{"val/last": {"math": 0.5}}`` -> ``{"summary/val/last/math": 0.5}``; what is not known is left out."""
    return dict(_leaves(summary, prefix))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(below, f"{path}/{key}")
    elif value is not None:
        yield path, value


def made(folder: str) -> str:
    """A folder that is there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder
