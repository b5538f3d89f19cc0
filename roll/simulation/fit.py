"""Fit: inputs with which simulations of real runs take the times that these took.

The unknowns are the scales of engine and trainer, the driver's time of a sample and of a step, the wait of a turn of an
episode, and, on a CPU, how much slower work is while the other cores compute. Each run tells those times of a step in
which engine and trainer were busy, the whole step, and the time of a group's rollout, which fixed times of a step are
no part of. The fit minimises the squared errors of their logarithms, plus the squared distances of the unknowns from
their values before, each in units of its uncertainty (maximum a posteriori), by Levenberg and Marquardt's method. An
unknown of which the runs tell little keeps its value: a run at ratio 0 says nothing of cores that compute together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from roll.configs.run import AgenticConfig, PipelineConfig
from roll.simulation.inputs import SPREADS, Inputs, ValidationInputs, with_value
from roll.simulation.run import Outcome, groups_of_warm_up, simulate
from roll.simulation.workload import GroupWork

ROLES = {"engine": "actor_infer", "trainer": "actor_train"}
"""Section of the inputs -> the role whose speed it has."""
NOISE = (0.03, 0.03, 0.02, 0.03)
"""Standard deviations of the logarithms of measured times: engine busy, trainer busy, a step, a group's rollout."""
TOLD = 0.9
"""An unknown counts as fitted if the runs reduce its standard deviation to this share or less."""
STEP_DEVIATION = 0.1
"""Standard deviation of what is known of `driver.step_seconds` before a fit, as a share of a step."""
TURN_DEVIATION = 0.02
"""Standard deviation of what is known of `driver.turn_seconds`, in seconds."""
SLOWDOWN_DEVIATION = 0.2
"""Standard deviation of what is known of `host.slowdown`."""
LEAST_GAIN = 0.01
"""Share by which the squared errors have to fall for the fit to go on."""
CHANGE = 0.5
"""Change of an unknown, in its deviations, from which the derivatives are taken."""
PASSES, MOVES = 2, 3
"""How often the derivatives are taken, and most moves after each, with Broyden's updates of the derivatives."""
ROUNDS = 6
"""Most simulations that only bring the scales near."""
DAMPING = 0.1
"""Damping of the first move of a fit (Levenberg and Marquardt's), in units of what is known before."""
NEAR = 0.1
"""Error of the logarithm of a busy time below which the scales are near."""


@dataclass(frozen=True)
class Observed:
    """Measured times of a real run."""

    config: PipelineConfig
    step_seconds: float
    """Median or mean time of a step."""
    busy: Mapping[str, float]
    """Role -> seconds of a step in which it worked; of replicas the mean. Validations are left out."""
    groups: Sequence[GroupWork] = ()
    """Its groups; then the times are means, since lengths differ from step to step here as in the run."""

    def errors(self, outcome: Outcome) -> list[float]:
        """Return the errors of four times in units of what is uncertain about them: the seconds in which engine and
        trainer are busy, those of a step, and those of a group's rollout. 0 stands for a time that is not known."""
        made = [busy_seconds(outcome, role) for role in ROLES.values()]
        seen = [self.busy.get(role, 0.0) for role in ROLES.values()]
        rollouts = [work.seconds or 0.0 for work in self.groups[groups_of_warm_up(self.config) :]]
        made += [outcome.step_seconds, outcome.group_seconds]
        seen += [self.step_seconds, fmean(rollouts) if rollouts and all(rollouts) else 0.0]
        both = zip(made, seen, NOISE, strict=True)
        return [math.log(mine / theirs) / noise if mine > 0 and theirs > 0 else 0.0 for mine, theirs, noise in both]


def busy_seconds(outcome: Outcome, role: str) -> float:
    """Return the seconds per step in which a role computed."""
    return (1 - outcome.idle.get(role, 1.0)) * outcome.step_seconds


@dataclass(frozen=True)
class _Unknown:
    """An input that is fitted, by its distance from the value before: of logarithms if it ``multiplies``."""

    path: str
    deviation: float
    """Standard deviation of that distance as far as it is known before."""
    multiplies: bool
    value: float

    @property
    def least(self) -> float:
        """Smallest distance: an input is not below 0."""
        return -math.inf if self.multiplies else -self.value

    def put(self, inputs: Inputs, distance: float) -> Inputs:
        """Return the inputs with a value at this distance."""
        value = self.value * math.exp(distance) if self.multiplies else self.value + distance
        return with_value(inputs, self.path, value, "fitted")


def fitted(inputs: Inputs, runs: Sequence[Observed], rounds: int = ROUNDS) -> tuple[Inputs, list[str]]:
    """Return the inputs with which simulations of these runs take the times that they took, and how close they come, as
    text. Inputs that the user gave are not changed. ``rounds``: see `ROUNDS`; 0: nothing is fitted."""
    for _ in range(rounds):
        errors = _busy_errors(_simulated(inputs, runs), runs)
        for section, error in errors.items():
            scale = vars(inputs)[section].scale * math.exp(-error)
            inputs = with_value(inputs, f"{section}.scale", scale, "fitted")
        if all(abs(error) < NEAR for error in errors.values()):
            break
    if rounds:
        inputs = _refined(inputs, runs)
    beside = "" if inputs.validation.seconds is None else " without validations"
    lines = []
    for run, outcome in zip(runs, _simulated(inputs, runs), strict=True):
        seconds = outcome.step_seconds
        lines.append(
            f"a step took {run.step_seconds:.3g} s{beside}; simulated with these inputs {seconds:.3g} s "
            f"({seconds / run.step_seconds - 1:+.0%})"
        )
    return inputs, lines


def _busy_errors(outcomes: Sequence[Outcome], runs: Sequence[Observed]) -> dict[str, float]:
    """Return section of the inputs -> logarithm of simulated over measured busy seconds of its role, mean over runs."""
    found = {}
    for section, role in ROLES.items():
        pairs = [
            (busy_seconds(outcome, role), run.busy.get(role, 0.0)) for run, outcome in zip(runs, outcomes, strict=True)
        ]
        logs = [math.log(simulated / seen) for simulated, seen in pairs if simulated > 0 and seen > 0]
        if logs:
            found[section] = fmean(logs)
    return found


def _simulated(inputs: Inputs, runs: Sequence[Observed]) -> list[Outcome]:
    inputs = replace(inputs, validation=ValidationInputs())
    return [simulate(run.config, inputs, replayed=run.groups) for run in runs]


def _refined(inputs: Inputs, runs: Sequence[Observed]) -> Inputs:
    """Return the inputs with the unknowns that explain the runs best."""
    unknowns = _unknowns(inputs, runs)
    deviations, least = (np.array([getattr(each, name) for each in unknowns]) for name in ("deviation", "least"))

    def put(values: np.ndarray) -> Inputs:
        own = inputs
        for unknown, distance in zip(unknowns, values.tolist(), strict=True):
            own = unknown.put(own, distance) if distance else own
        return own

    def errors(values: np.ndarray) -> list[float]:
        outcomes = _simulated(put(values), runs)
        return [error for run, outcome in zip(runs, outcomes, strict=True) for error in run.errors(outcome)]

    return put(most_likely(errors, deviations, least))


def most_likely(
    errors_of: Callable[[np.ndarray], Sequence[float]],
    deviations: np.ndarray,
    least: np.ndarray | None = None,
    passes: int = PASSES,
) -> np.ndarray:
    """Return the most likely distances of unknowns from what is known of them before, float ``[n]``, by some steps of
    Levenberg and Marquardt's method.

    ``errors_of`` tells what distances do not explain, in units of its uncertainty; ``deviations`` are the standard
    deviations of the distances, and ``least`` their smallest values; see `PASSES`. An unknown of which little is told
    keeps its value.
    """

    def errors(values: np.ndarray) -> np.ndarray:
        return np.concatenate([errors_of(values), values / deviations])

    least = np.full(len(deviations), -math.inf) if least is None else least
    values = np.zeros(len(deviations))
    found, damping, still = errors(values), DAMPING, np.zeros(len(deviations))
    for _ in range(passes):
        changes = np.diag(CHANGE * deviations)
        slopes = np.stack([(errors(values + change) - found) / change.sum() for change in changes], axis=1)
        told = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes))) <= TOLD * deviations
        for _ in range(MOVES):
            damped = np.concatenate([slopes, np.diag(np.sqrt(damping) / deviations)])
            move = _least_squares(damped * told, np.concatenate([found, still]), least - values)
            if not move.any():
                break
            moved = errors(values + move)
            slopes += np.outer(moved - found - slopes @ move, move) / (move @ move)
            gain = 1 - moved @ moved / max(found @ found, 1e-12)
            damping *= 1 / 4 if gain > 0 else 8
            if gain > 0:
                values, found = values + move, moved
            if 0 <= gain < LEAST_GAIN:
                break
    return values


def _least_squares(slopes: np.ndarray, found: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Return the move that minimises ``|found + slopes @ move|``, with no part below ``least``. Columns of zeros do not
    move."""
    move, free = np.zeros(len(least)), slopes.any(axis=0)
    while free.any():
        move[free] = np.linalg.lstsq(slopes[:, free], -found - slopes[:, ~free] @ move[~free], rcond=None)[0]
        low = free & (move < least)
        if not low.any():
            break
        move[low], free = least[low], free & ~low
    return move


def _unknowns(inputs: Inputs, runs: Sequence[Observed]) -> list[_Unknown]:
    """Return the unknowns of a fit. One that the user gave is fitted in vain: `with_value` does not change it."""

    def unknown(path: str, deviation: float, multiplies: bool) -> _Unknown:
        section, _, name = path.partition(".")
        return _Unknown(path, deviation, multiplies, vars(vars(inputs)[section])[name])

    found = [unknown(f"{section}.scale", SPREADS[f"{section}.scale"], True) for section in ROLES]
    found.append(unknown("driver.sample_seconds", SPREADS["driver.sample_seconds"], True))
    found.append(unknown("driver.step_seconds", STEP_DEVIATION * fmean(run.step_seconds for run in runs), False))
    if any(isinstance(run.config, AgenticConfig) for run in runs):
        found.append(unknown("driver.turn_seconds", TURN_DEVIATION, False))
    if any(run.config.cluster.device == "cpu" for run in runs):
        found.append(unknown("host.slowdown", SLOWDOWN_DEVIATION, False))
    return found
