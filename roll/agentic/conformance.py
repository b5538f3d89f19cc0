"""Check that an environment keeps the interface: resets, seeds, odd actions, threads, leaks, deadlines.

The environment runs in separate processes. Whatever it does (hang, end its process, leave children) is reported and
cleaned up afterwards. `conformance_checks` defines the checks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Literal

from roll.agentic.conformance_checks import CHECKS, MAKING, run_checks

Level = Literal["passed", "warning", "failed"]

START_SECONDS = 120.0
"""Limit for starting Python and importing, and for our own work between two calls of the environment."""
MAX_LOST_PROCESSES = 3
EXIT_SECONDS = 10.0
MARKS: Mapping[Level, str] = {"passed": "ok", "warning": "warning", "failed": "FAILED"}


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    level: Level
    message: str
    """Observation of the check; for a warning or a failure, also what is wrong and what would be right."""

    @property
    def passed(self) -> bool:
        """True if an environment with this finding may be used."""
        return self.level != "failed"


@dataclass(frozen=True)
class ConformanceReport:
    """All findings about one environment."""

    env_type: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """True if nothing failed; there may be warnings."""
        return all(finding.passed for finding in self.findings)


@dataclass(frozen=True)
class _Limits:
    """Time limits of calls, in seconds."""

    call: float
    making: float

    def of(self, call: str | None) -> float:
        """Return the limit of a call; None means the time between two calls."""
        return START_SECONDS if call is None else self.making if call == MAKING else self.call


@dataclass(frozen=True)
class _Lost:
    """A process that ended early or had to be stopped."""

    check: str
    message: str


def check_env(
    env_type: str,
    env_config: Mapping[str, Any],
    *,
    episodes: int = 20,
    seed: int = 0,
    deadline_seconds: float = 10.0,
    make_deadline_seconds: float = 120.0,
) -> ConformanceReport:
    """Test an environment the way training uses it, and more harshly. Takes some seconds.

    Most checks play ``episodes`` episodes, with seeds from ``seed`` on. A call of the environment that takes longer
    than ``deadline_seconds`` counts as hanging; creating it may take ``make_deadline_seconds``, because it may import
    much. Faults of the environment never raise.
    """
    try:
        pickle.dumps((env_type, dict(env_config)))
    except (pickle.PicklingError, TypeError, AttributeError) as cause:
        message = f"name and options cannot be sent to a worker process ({cause}); use plain values as in YAML"
        return ConformanceReport(env_type, (Finding("pickling", "failed", message),))
    findings = [Finding("pickling", "passed", "name and options can be sent to a worker process")]
    limits = _Limits(deadline_seconds, make_deadline_seconds)
    waiting = list(CHECKS)
    lost: list[_Lost] = []
    while waiting and len(lost) < MAX_LOST_PROCESSES:
        arguments = (env_type, dict(env_config), max(1, episodes), seed, tuple(waiting))
        found, loss = _in_a_process(arguments, limits)
        findings += found
        if loss is not None:
            lost.append(loss)
            findings.append(Finding(loss.check, "failed", loss.message))
        done = {finding.name for finding in findings}
        waiting = [name for name in waiting if name not in done]
        if _cannot_be_made(findings):
            break
    findings += [Finding(name, "warning", "was not run, because of what failed before") for name in waiting]
    return ConformanceReport(env_type, (*findings, _process_finding(lost, limits)))


def render_report(report: ConformanceReport) -> str:
    """Format the report for a terminal: one line per finding, and a verdict."""
    width = max(len(finding.name) for finding in report.findings)
    lines = [f"{finding.name:<{width}}  {MARKS[finding.level]:<7}  {finding.message}" for finding in report.findings]
    failed = sum(not finding.passed for finding in report.findings)
    doubts = sum(finding.level == "warning" for finding in report.findings)
    verdict = "keeps the interface" if report.passed else f"breaks the interface in {failed} of {len(lines)} checks"
    warnings = f", with {doubts} warning{'' if doubts == 1 else 's'}" if doubts else ""
    return "\n".join([*lines, f"{report.env_type} {verdict}{warnings}"])


def _cannot_be_made(findings: Sequence[Finding]) -> bool:
    return any(finding.name == "make" and not finding.passed for finding in findings)


def _process_finding(lost: Sequence[_Lost], limits: _Limits) -> Finding:
    if lost:
        return Finding("process", "failed", f"{len(lost)} of the processes that held the environment were lost")
    return Finding("process", "passed", f"each call returned within {limits.call:g} s, and no process was lost")


def _in_a_process(arguments: tuple[Any, ...], limits: _Limits) -> tuple[list[Finding], _Lost | None]:
    """Run checks in a new process. Return the findings, and how the process was lost, if it was."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_checks, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        return _listened(ours, process, arguments[-1][0], limits)
    finally:
        _end(process)
        ours.close()


def _listened(
    connection: Connection, process: SpawnProcess, check: str, limits: _Limits
) -> tuple[list[Finding], _Lost | None]:
    findings: list[Finding] = []
    call: str | None = None
    while True:
        try:
            if not connection.poll(limits.of(call)):
                return findings, _Lost(check, _hung(call, limits.of(call)))
            kind, *values = connection.recv()
        except (EOFError, ConnectionResetError):
            process.join(EXIT_SECONDS)
            return findings, _Lost(check, _died(call, process.exitcode))
        if kind == "check":
            check = values[0]
        elif kind == "call":
            call = values[0]
        elif kind == "returned":
            call = None
        elif kind == "finding":
            findings.append(Finding(*values))
        elif kind == "end":
            return findings, None


def _hung(call: str | None, seconds: float) -> str:
    if call is None:
        return f"nothing was heard for {seconds:g} s; is something slow imported, or a thread kept busy?"
    return f"{call} did not return within {seconds:g} s; give what it waits for a time limit of its own"


def _died(call: str | None, exit_code: int | None) -> str:
    how = f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"
    return f"the process ended ({how}) during {call or 'its start'}; an environment may raise, but not end its process"


def _end(process: SpawnProcess) -> None:
    """Kill the process and everything it started."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # already gone, or not yet the leader of a group
        process.kill()
    process.join(EXIT_SECONDS)
    process.close()
