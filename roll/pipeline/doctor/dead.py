"""Diagnosis of a dead run: how it ended and how to resume it."""

from __future__ import annotations

from collections.abc import Iterator

from roll.pipeline.doctor.findings import Diagnosis, Evidence, Verdict
from roll.pipeline.doctor.graph import wait_graph
from roll.pipeline.doctor.live import SILENT_SECONDS
from roll.pipeline.doctor.words import describe_waits, silence_of


def of_a_dead_run(evidence: Evidence) -> Diagnosis:
    """Explain how a dead run ended and how to resume it."""
    summary = evidence.summary
    if summary is None:
        message = "the run ended before it had begun: there is no summary.json"
        return Diagnosis("unknown", message, None, _go_on(evidence), evidence.last_words)
    steps = f"after step {summary['steps']}"
    if summary["status"] == "success":
        return Diagnosis("ended", f"the run has ended well, {steps}")
    findings = tuple(_last_known(evidence))
    if summary["status"] in ("failed", "interrupted"):
        verdict: Verdict = "failed" if summary["status"] == "failed" else "interrupted"
        cause = summary["error"] or "no cause is on record"
        return Diagnosis(verdict, f"the run {_PAST[verdict]} {steps}", cause, _go_on(evidence), findings)
    driver = evidence.status.driver if evidence.status is not None else None
    who = "its driver" if driver is None else f"its driver (process {driver.pid} on {driver.host})"
    culprit = (
        f"{who} is gone without a word: killed (SIGKILL, as the kernel does when memory runs out: see `dmesg`), or its "
        "host went down"
    )
    return Diagnosis("killed", f"the run is dead {steps}", culprit, _go_on(evidence), findings)


_PAST = {"failed": "failed", "interrupted": "was interrupted"}


def _last_known(evidence: Evidence) -> Iterator[str]:
    """Yield the waits, the silent workers and the last log lines from when the run was last seen."""
    status = evidence.status
    if status is not None:
        yield from ("when it was last seen:", *describe_waits(status, wait_graph(status)))
        silent = [worker for worker in status.workers if silence_of(status, worker) > SILENT_SECONDS]
        yield from (f"{worker.name} had been silent for {silence_of(status, worker):.0f} s" for worker in silent)
    if evidence.last_words:
        yield from ("last lines of the driver's log:", *(f"  {line}" for line in evidence.last_words))


def _go_on(evidence: Evidence) -> str:
    facts = evidence.resume
    if facts is not None and facts.step is None and facts.passed_over:
        return "; ".join([*facts.passed_over, "no checkpoint is whole: begin a new run in another folder"])
    if facts is None or facts.step is None:
        kept = "" if facts is None or not facts.finished else f", with {facts.finished} groups that were finished"
        return f"there is no checkpoint yet: with resume_from_checkpoint=true the run begins again{kept}"
    parts = [f"passed over: {damage}" for damage in facts.passed_over]
    parts.append(
        f"the same command with resume_from_checkpoint=true goes on after step {facts.step}, with {facts.finished} "
        f"finished groups; {facts.begin_again} that were in flight begin again"
    )
    return "; ".join(parts)
