"""What is known of a run, and what is told of it."""

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
    """What a resumed run would find."""

    step: int | None
    """Of the newest whole checkpoint."""
    passed_over: tuple[str, ...] = ()
    """What is wrong with newer ones."""
    finished: int = 0
    """Groups in the journal that need not be made again."""
    begin_again: int = 0
    """Groups that were in flight."""


@dataclass(frozen=True)
class Evidence:
    """What was found in a run's folder and on this host."""

    run: Path
    now: float
    host: str
    """This one."""
    status: RunStatus | None
    summary: Mapping[str, Any] | None
    processes: Mapping[int, ProcessFacts | None] = field(default_factory=dict)
    """The driver and its workers on this host; None: gone."""
    resume: ResumeFacts | None = None
    last_words: tuple[str, ...] = ()
    """The end of the driver's log."""


@dataclass(frozen=True)
class Diagnosis:
    """What to tell."""

    verdict: Verdict
    headline: str
    culprit: str | None = None
    advice: str | None = None
    findings: tuple[str, ...] = ()
    """In support of the headline."""

    @property
    def is_well(self) -> bool:
        """Whether nothing has to be done about the run."""
        return self.verdict in WELL


def may_be_alive(evidence: Evidence) -> bool:
    """Whether the driver is there; of one on another host it is not known."""
    status = evidence.status
    if status is None or status.phase == "ended":
        return False
    driver = status.driver
    if driver.host != evidence.host:
        return (evidence.summary or {}).get("status", "running") == "running"
    facts = evidence.processes.get(driver.pid)
    return facts is not None and facts.started == driver.started
