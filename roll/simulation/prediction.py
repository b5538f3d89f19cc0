"""A prediction: a simulation of the nominal inputs, and its interval from simulations of inputs that are varied.

Each uncertain input is drawn from a log-normal distribution about its value (`roll.simulation.inputs.SPREADS`), all
independently; the interval holds the middle four fifths of the outcomes. It tells what is not known of the inputs, not
what the models leave out: `docs/simulation.md` has the share of published runs inside of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll.configs import derived
from roll.configs.errors import count
from roll.configs.run import PipelineConfig
from roll.pipeline.algorithm import build_algorithms
from roll.simulation.inputs import Inputs, Origin, drawn_factors, varied
from roll.simulation.run import MEASURED_STEPS, Outcome, simulate

DRAWS = 16
"""Simulations behind an interval by default."""
INTERVAL = (0.1, 0.9)
"""Quantiles of the outcomes at its ends."""


@dataclass(frozen=True)
class Prediction:
    """The outcome of the nominal inputs, and the time of a step at the ends of the interval."""

    outcome: Outcome
    low: float
    high: float
    devices: int

    def gpu_hours(self, steps: int) -> float:
        """Return the device hours of so many steps."""
        return self.outcome.step_seconds * steps * self.devices / 3600


def predict(
    config: PipelineConfig,
    inputs: Inputs,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    steps: int = MEASURED_STEPS,
    algorithms: Any = None,
) -> Prediction:
    """Predict the time of a step.

    ``draws``: simulations for the interval; 0: none, and the interval is a point. ``algorithms``: see `simulate`.
    Raises `ConfigError`.
    """
    algorithms = algorithms or build_algorithms(config)
    outcome = simulate(config, inputs, seed=seed, steps=steps, algorithms=algorithms)
    random = np.random.default_rng(seed)
    seconds = [outcome.step_seconds]
    for draw in range(draws):
        drawn = varied(inputs, drawn_factors(inputs, random), config)
        fewer = max(2, steps // 2)
        seconds.append(simulate(config, drawn, seed=seed + draw, steps=fewer, algorithms=algorithms).step_seconds)
    low, high = np.quantile(seconds, INTERVAL)
    return Prediction(outcome, float(low), float(high), derived.total_devices(config))


def report(config: PipelineConfig, inputs: Inputs, prediction: Prediction, price: float | None = None) -> str:
    """Return a prediction in words. ``price``: of a device and hour."""
    return "\n".join(_lines(config, inputs, prediction, price))


def _lines(config: PipelineConfig, inputs: Inputs, prediction: Prediction, price: float | None) -> Iterator[str]:
    outcome, steps = prediction.outcome, config.max_steps
    yield f"a step     {_span(prediction)}"
    seconds = outcome.step_seconds
    yield f"rates      {outcome.samples / seconds:,.3g} samples/s, {outcome.tokens:,.0f} sampled tokens/s trained on"
    yield f"idle       {', '.join(f'{role} {share:.0%}' for role, share in outcome.idle.items())}"
    mean = sum(lag * share for lag, share in outcome.lags.items())
    shares = ", ".join(f"{lag}: {share:.0%}" for lag, share in outcome.lags.items())
    yield f"lag        mean {mean:.2f} versions (tokens at lag {shares})"
    yield (
        f"waste      {outcome.wasted:.1%} of the generated tokens are dropped, the caches of {outcome.recomputed:.1%} "
        "are computed again"
    )
    hours = prediction.gpu_hours(steps)
    cost = "" if price is None else f", {hours * price:,.0f} at {price:g} an hour"
    days = f"{count(steps, 'step')} take {seconds * steps / 3600:,.3g} h"
    yield f"the run    {days}: {hours:,.3g} device hours on {count(prediction.devices, 'device')}{cost}"
    yield f"device     {inputs.device or ('CPU' if config.cluster.device == 'cpu' else 'H100')}"
    yield from _origins(inputs)
    if config.eval_steps or config.save_steps:
        yield "left out   validations and checkpoints"


def _span(prediction: Prediction) -> str:
    low, high = _seconds(prediction.low), _seconds(prediction.high)
    return f"{_seconds(prediction.outcome.step_seconds)} s; {low} to {high} s as what is not known of the inputs varies"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _origins(inputs: Inputs) -> Iterator[str]:
    known = inputs.known()
    order: Sequence[Origin] = ("measured", "fitted", "given")
    for origin in order:
        if origin in known:
            yield f"{origin:<10} {', '.join(known[origin])}"
    everything = "every other input" if known else "every input (`--inputs`, `--calibrate`)"
    yield f"default    {everything}"


def table(name: str, rows: Sequence[tuple[str, Prediction]]) -> str:
    """Return a sweep over ``name`` as a table."""
    roles = sorted({role for _, each in rows for role in each.outcome.idle})
    heads = [name, "step s", "interval", "samples/s", "lag", *(f"idle {role}" for role in roles), "waste"]
    lines = [heads]
    for value, each in rows:
        outcome = each.outcome
        mean = sum(lag * share for lag, share in outcome.lags.items())
        idle = [f"{outcome.idle[role]:.0%}" if role in outcome.idle else "" for role in roles]
        lines.append(
            [
                value,
                _seconds(outcome.step_seconds),
                f"{_seconds(each.low)}-{_seconds(each.high)}",
                f"{outcome.samples / outcome.step_seconds:.3g}",
                f"{mean:.2f}",
                *idle,
                f"{outcome.wasted:.0%}",
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join("  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True)) for line in lines)
