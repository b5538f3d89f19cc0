"""The files of a run that was only simulated, for the page of `roll report`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from roll.report.files import RunFiles
from roll.report.lanes import Lane, read_trace

ABSENT = {
    "samples.jsonl": "a simulation has lengths, and no texts",
    "logs": "in their place is what the simulation says",
}


def simulated_run(
    source: Path,
    config_text: str,
    timeline: Path,
    step_ends: Sequence[float],
    lags: Mapping[int, float],
    ledger: Mapping[str, int],
    report: str,
) -> RunFiles:
    """Return the content of a page about a simulated run.

    ``source``: file or folder of its configuration. ``step_ends``: seconds since the beginning of the ``timeline``.
    ``lags``: lag in versions -> share of the trained tokens. ``report``: the simulation's result as text.
    """
    trace = read_trace(timeline)
    config = yaml.safe_load(config_text)
    lanes: dict[str, list[Lane]] = defaultdict(list)
    for lane in trace.lanes:
        if lane.kind == "roles":
            lanes[lane.name.rpartition("/")[0]].append(lane)
    records: list[dict[str, Any]] = []
    for step, (start, end) in enumerate(zip((0.0, *step_ends), step_ends, strict=False), start=1):
        window = round(start * 1e6), max(round(end * 1e6), round(start * 1e6) + 1)
        idle = {f"idle/{role}": 1 - fmean(lane.busy_share(window) for lane in each) for role, each in lanes.items()}
        records.append({"step": step, "time/step": end - start, **idle})
    mean = sum(lag * share for lag, share in lags.items())
    records[-1] |= {"lag/mean": mean, **{f"actor/lag_{lag}/share": share for lag, share in lags.items()}}
    return RunFiles(
        root=source,
        metrics=records,
        trace=trace,
        summary={
            "status": "simulated",
            "steps": len(records),
            "seconds": step_ends[-1],
            "first_step_seconds": step_ends[0],
            "lag/max": max(lags, default=0),
            "ledger": dict(ledger),
        },
        config_text=config_text,
        config={**config, "exp_name": f"{config['exp_name']} (simulated)", "max_steps": len(records)},
        log_tail=report,
        absent=ABSENT,
    )
