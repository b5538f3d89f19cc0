"""Replay: the groups of a finished run, as its `groups.jsonl` has them, under the schedule of a simulation.

Recorded are the lengths, the wait for a verdict or for environments (with any wait for a free worker), and which groups
the filter dropped. Simulated is all the rest, so a replay of the run as it was shows how far to trust a replay of it as
it might have been.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.plugins import problem
from roll.simulation.inputs import Inputs, is_number
from roll.simulation.run import LEAST_STEPS, WARM_UP_STEPS, Outcome
from roll.simulation.workload import GroupWork
from roll.tracking.files import read_json_lines
from roll.tracking.run_directory import RunDirectory

RECORDED = ("lengths.", "rewards.", "environments.", "filtered_share")
"""Inputs that a replay takes from the run."""


@dataclass(frozen=True)
class Recorded:
    """The groups of a run."""

    groups: list[GroupWork]
    """In the order in which they were issued."""
    step_seconds: float
    """Mean time of a step, of those that a replay measures."""

    def compared(self, outcome: Outcome) -> str:
        """Return how well the replay of the run as it was meets the run, in words."""
        off = outcome.step_seconds / self.step_seconds - 1
        return (
            f"replayed   a step of the run took {self.step_seconds:.3g} s (steps {WARM_UP_STEPS + 1} to "
            f"{len(outcome.step_ends)}), of its replay as it was {outcome.step_seconds:.3g} s ({off:+.0%})"
        )


def recorded_groups(folder: Path, steps: int | None = None) -> list[GroupWork]:
    """Return the groups of the run in ``folder``, in the order in which they were issued; none if it has no
    `groups.jsonl`.

    ``steps``: only those of its last so many steps. Raises `ConfigError` for a damaged file.
    """
    path = RunDirectory(folder).groups
    if not path.is_file():
        return []
    records = lines_of(path)
    try:
        last = max((record["step"] for record in records), default=0)
        chosen = {record["group"]: record for record in records if steps is None or record["step"] > last - steps}
        return [_work(chosen[group]) for group in sorted(chosen)]
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise problem(str(path), f"it is damaged: {error!r}", "give a run whose files are whole") from error


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of a run. Raises `ConfigError` for a damaged one."""
    try:
        return read_json_lines(path)
    except ValueError as error:
        raise problem(str(path), str(error), "give a run whose files are whole") from error


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's steps after its warm-up; none if it has no metrics."""
    path = RunDirectory(folder).metrics
    records = lines_of(path) if path.is_file() else []
    return [
        each
        for each in records
        if is_number(each.get("step")) and each["step"] > WARM_UP_STEPS and is_number(each.get("time/step"))
    ]


def all_numbers(records: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Return all values of a metric that are numbers."""
    return [record[name] for record in records if is_number(record.get(name))]


def validation_seconds(record: Mapping[str, Any]) -> float:
    """Return the seconds for which a step's publication waited for a validation; 0 if there was none, or beside it."""
    if not any(name.startswith("val/") for name in record) or not is_number(record.get("time/param_update")):
        return 0.0
    update = sum(sum(all_numbers([record], f"weights/{name}_seconds")) for name in ("send", "fetch", "load"))
    return max(0.0, float(record["time/param_update"]) - update)


def _work(record: Mapping[str, Any]) -> GroupWork:
    responses = [float(tokens) for tokens in record["responses"]]
    if not responses or not all(0 <= tokens < math.inf for tokens in responses):
        raise ValueError(f"responses of {responses} tokens")
    if "waits" in record:
        pairs = zip(record["waits"], record["turns"], strict=True)
        waits = [[seconds / turns] * turns for seconds, turns in pairs]
    else:
        generated, judged = record["generated"], record["judged"]
        seconds = 0.0 if generated is None or judged is None else max(0.0, judged - generated)
        waits = [[seconds]] * len(responses)
    issued, judged = record.get("issued"), record.get("judged")
    taken = None if issued is None or judged is None else max(0.0, judged - issued)
    return GroupWork(float(record["prompt"]), responses, waits, record["consumed"] is not None, taken)


def refuse_given(inputs: Inputs) -> None:
    """Raise `ConfigError` for given inputs that a replay takes from the run."""
    given = [path for path, _ in inputs.told() if inputs.origin(path) == "given" and path.startswith(RECORDED)]
    if given:
        remedy = "leave it out, or simulate without --replay"
        raise ConfigError(
            [ConfigProblem(f"simulation.{path}", "a replay takes it from the run", remedy) for path in given]
        )


def recorded(folder: Path, inputs: Inputs) -> Recorded:
    """Return what a run has recorded for its replay.

    Raises `ConfigError` if that is not enough, and for given ``inputs`` that a replay takes from the run.
    """
    refuse_given(inputs)
    groups = recorded_groups(folder)
    if not groups:
        remedy = "give a run of this version: earlier ones have not recorded the lengths of all samples"
        raise problem("--replay", f"there is no groups.jsonl in {folder}, or nothing is in it", remedy)
    times = [each["time/step"] for each in steps_of(folder)]
    if len(times) < LEAST_STEPS:
        message = f"the run has {len(times)} steps after the first {WARM_UP_STEPS}, and {LEAST_STEPS} are needed"
        raise problem("--replay", message, "give a longer run")
    return Recorded(groups, fmean(times))
