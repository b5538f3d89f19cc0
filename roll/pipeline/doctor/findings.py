"""The evidence on a run, and the diagnosis made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from roll.tracking.processes import ProcessFacts
from roll.tracking.status import RunStatus

Verdict = Literal[
    "ended", "working", "quiet", "deadlock", "worker in trouble", "driver in trouble", "failed", "interrupted",
    "killed", "out of sight", "unknown",
]
WELL: tuple[Verdict, ...] = ("ended", "working")


@dataclass(frozen=True)
class ResumeFacts:
    """State that a resumed run would start from."""

    step: int | None
    """Step of the newest whole checkpoint; None: there is none."""
    passed_over: tuple[str, ...] = ()
    """Damages of newer checkpoints."""
    finished: int = 0
    """Number of groups in the journal that need not be generated again."""
    begin_again: int = 0
    """Number of groups that were in flight."""


@dataclass(frozen=True)
class Evidence:
    """Facts found in a run's folder and on this host."""

    run: Path
    now: float
    host: str
    """Name of this host."""
    status: RunStatus | None
    summary: Mapping[str, Any] | None
    processes: Mapping[int, ProcessFacts | None] = field(default_factory=dict)
    """Process facts of the driver and its workers on this host, by process id; None: the process is gone."""
    resume: ResumeFacts | None = None
    last_words: tuple[str, ...] = ()
    """Last lines of the driver's log."""


@dataclass(frozen=True)
class Diagnosis:
    """The answer of `roll doctor`."""

    verdict: Verdict
    headline: str
    culprit: str | None = None
    advice: str | None = None
    findings: tuple[str, ...] = ()
    """Lines that support the headline."""

    @property
    def is_well(self) -> bool:
        """True if the user need not do anything about the run."""
        return self.verdict in WELL


def may_be_alive(evidence: Evidence) -> bool:
    """Return True if the driver is there. One on another host counts as alive unless the summary records an end."""
    status = evidence.status
    if status is None or status.phase == "ended":
        return False
    driver = status.driver
    if driver.host != evidence.host:
        return (evidence.summary or {}).get("status", "running") == "running"
    facts = evidence.processes.get(driver.pid)
    return facts is not None and facts.started == driver.started
