"""Choice between the diagnoses of a live and of a dead run. The functions are pure: all input is in the evidence."""

from __future__ import annotations

from roll.pipeline.doctor.dead import of_a_dead_run
from roll.pipeline.doctor.findings import Diagnosis, Evidence, may_be_alive
from roll.pipeline.doctor.live import of_a_live_run


def diagnose(evidence: Evidence) -> Diagnosis:
    """Explain what is wrong with a run, alive or dead."""
    if evidence.status is not None and may_be_alive(evidence):
        return of_a_live_run(evidence, evidence.status)
    return of_a_dead_run(evidence)
