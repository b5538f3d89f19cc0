"""The evidence on a run, from its folder and this host. Collecting it only reads and imports nothing heavy."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.pipeline.checkpoints import DamagedCheckpoint, checkpoint_folder, read_checkpoint, saved_steps
from roll.pipeline.doctor.findings import Evidence, ResumeFacts, may_be_alive
from roll.rollout.journal import RolloutProgress, read_journal, recover
from roll.tracking.processes import ProcessFacts, look_at
from roll.tracking.run_directory import RunDirectory
from roll.tracking.status import RunStatus, read_status

LAST_LINES = 6
_LAST_BYTES = 8192


def gather_evidence(run: RunDirectory) -> Evidence:
    """Collect all evidence on a run. Raises `OSError` for files that cannot be read, `ValueError` for damaged ones."""
    status = read_status(run.status)
    evidence = Evidence(
        run=run.root,
        now=time.time(),
        host=socket.gethostname(),
        status=status,
        summary=_summary(run.summary),
        processes={} if status is None else _processes(status),
    )
    if may_be_alive(evidence):
        return evidence
    return replace(evidence, resume=_resume_facts(run), last_words=_last_lines(run.logs / "driver.log"))


def _processes(status: RunStatus) -> dict[int, ProcessFacts | None]:
    if status.driver.host != socket.gethostname():
        return {}
    pids = [status.driver.pid, *(worker.pid for worker in status.workers if worker.on_driver_host)]
    return {pid: look_at(pid) for pid in pids}


def _summary(path: Path) -> Mapping[str, Any] | None:
    try:
        summary: Mapping[str, Any] = json.loads(path.read_text())
        return summary
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _resume_facts(run: RunDirectory) -> ResumeFacts:
    """Return the facts of the newest whole checkpoint and of what the journal adds to it."""
    passed_over: list[str] = []
    progress, step = RolloutProgress.at_start(), None
    for candidate in reversed(saved_steps(run.checkpoints)):
        try:
            progress = read_checkpoint(checkpoint_folder(run.checkpoints, candidate)).state.progress
        except DamagedCheckpoint as damage:
            passed_over.append(str(damage))
        else:
            step = candidate
            break
    recovered = recover(read_journal(run.journal), progress)
    return ResumeFacts(step, tuple(passed_over), len(recovered.finished), len(recovered.in_flight))


def _last_lines(path: Path) -> tuple[str, ...]:
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LAST_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-LAST_LINES:])
    except FileNotFoundError:
        return ()
