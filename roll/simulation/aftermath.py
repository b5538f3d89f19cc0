"""Comparison of a prediction with its outcome: a run that followed another one, with changes, against what the first
run and the simulation said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from roll.configs import derived
from roll.configs.plugins import problem
from roll.configs.run import PipelineConfig, PromptConfig
from roll.simulation.inputs import Inputs
from roll.simulation.prediction import Prediction, aligned
from roll.simulation.replay import all_numbers, validation_seconds
from roll.simulation.run import LEAST_STEPS, WARM_UP_STEPS


@dataclass(frozen=True)
class Measured:
    """Means over the steps of a run after its warm-up."""

    step_seconds: float
    lag: float | None
    idle: Mapping[str, float]
    """Role -> share of the time in which it did not compute."""
    response: float | None
    """Tokens of a response."""


def measured(config: PipelineConfig, steps: Sequence[Mapping[str, Any]], *, with_validations: bool) -> Measured:
    """Return the means of a run's steps (`steps_of`). Without validations, the time for which a step waited for one is
    taken out of it. Raises `ConfigError` if they are too few."""
    if len(steps) < LEAST_STEPS:
        message = f"the run has {len(steps)} steps after the first {WARM_UP_STEPS}, and {LEAST_STEPS} are needed"
        raise problem("--after", message, "let it take more steps")
    waited = [0.0 if with_validations else validation_seconds(each) for each in steps]

    def mean(name: str) -> float | None:
        found = all_numbers(steps, name)
        return fmean(found) if found else None

    roles = dict.fromkeys(name for each in steps for name in each if name.startswith("idle/"))
    idle = {name.removeprefix("idle/"): mean(name) for name in roles}
    tokens = mean("response/tokens")
    return Measured(
        fmean(each["time/step"] - seconds for each, seconds in zip(steps, waited, strict=True)),
        mean("lag/mean"),
        {role: share for role, share in idle.items() if share is not None},
        None if tokens is None else tokens / derived.samples_per_step(config),
    )


def inputs_after(inputs: Inputs, before: PipelineConfig, after: PipelineConfig) -> Inputs:
    """Return inputs that were calibrated on ``before`` as they are with ``after``: the number of reward workers
    follows the configuration."""
    if inputs.rewards.workers is not None and isinstance(before, PromptConfig) and isinstance(after, PromptConfig):
        more = sum(each.num_workers for each in after.rewards.values())
        more -= sum(each.num_workers for each in before.rewards.values())
        rewards = replace(inputs.rewards, workers=max(1, inputs.rewards.workers + more))
        inputs = replace(inputs, rewards=rewards)
    return inputs


def comparison_text(predicted: Prediction, before: Measured, after: Measured) -> str:
    """Return predicted and measured values as a table, and whether the step left its interval."""
    outcome = predicted.outcome
    seconds, low, high = outcome.step_seconds, predicted.low, predicted.high
    interval = f"{low:.3g}-{high:.3g}" if predicted.draws else ""
    lines = [
        ["", "predicted", "interval", "measured", "off"],
        ["step s", f"{seconds:.3g}", interval, f"{after.step_seconds:.3g}", f"{after.step_seconds / seconds - 1:+.0%}"],
    ]
    gains = [before.step_seconds / each - 1 for each in (seconds, after.step_seconds)]
    lines.append(["gain", f"{gains[0]:+.0%}", "", f"{gains[1]:+.0%}", f"{100 * (gains[1] - gains[0]):+.0f} points"])
    if after.lag is not None:
        lag = sum(lag * share for lag, share in outcome.lags.items())
        lines.append(["lag mean", f"{lag:.2f}", "", f"{after.lag:.2f}", f"{after.lag - lag:+.2f}"])
    for role, share in outcome.idle.items():
        if (real := after.idle.get(role)) is not None:
            lines.append([f"idle {role}", f"{share:.0%}", "", f"{real:.0%}", f"{100 * (real - share):+.0f} points"])
    if after.response:
        response = outcome.tokens * seconds / outcome.samples
        off = f"{after.response / response - 1:+.0%}"
        lines.append(["tokens of a response", f"{response:.3g}", "", f"{after.response:.3g}", off])
    return "\n".join([aligned(lines), _verdict(predicted, after.step_seconds)])


def _verdict(predicted: Prediction, seconds: float) -> str:
    if not predicted.draws:
        return "no interval (`--draws`)"
    if predicted.low <= seconds <= predicted.high:
        return "the step is inside the interval"
    side = "slower" if seconds > predicted.high else "faster"
    bound = predicted.high if seconds > predicted.high else predicted.low
    return (
        f"the step LEFT the interval: {abs(seconds / bound - 1):.0%} {side} than its end. What is off most beside it "
        "says where to look; lengths, other work on the machine and changed code are not predicted"
    )
