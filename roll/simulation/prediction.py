"""Predictions: a simulation with the nominal inputs, and an interval from simulations with varied inputs.

Each uncertain input is drawn independently from a log-normal distribution around its value
(`roll.simulation.inputs.SPREADS`); the interval covers the middle 80 % of the outcomes. It reflects the uncertainty of
the inputs, not the errors of the cost model. `docs/simulation.md` reports how many published runs lie within their
intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll.configs import derived
from roll.configs.errors import count
from roll.configs.run import PipelineConfig
from roll.pipeline.algorithm import build_algorithms
from roll.simulation.inputs import Inputs, Origin, drawn_factors, varied
from roll.simulation.run import MEASURED_STEPS, Outcome, replayed_steps, simulate
from roll.simulation.workload import GroupWork, turns

DRAWS = 16
"""Default number of simulations for an interval."""
LEAST_DRAWS = 4
"""Minimum number of simulations for an interval."""
MOST_REQUESTS = 400_000
"""Limit on the requests of all simulations for an interval together, about half a minute of computation. Large runs get
fewer simulations, but at least `LEAST_DRAWS`."""
BAR = 30
"""Characters of the longest bar of a sweep."""
INTERVAL = (0.1, 0.9)
"""Quantiles of the outcomes at the ends of the interval."""


@dataclass(frozen=True)
class Prediction:
    """Outcome with the nominal inputs, and an interval for the time of a step."""

    outcome: Outcome
    low: float
    """Lower end of the interval, in seconds per step."""
    high: float
    """Upper end of the interval, in seconds per step."""
    devices: int
    """Number of devices of the run."""
    steps: int
    """Number of steps of the whole run."""
    draws: int
    """Simulations behind the interval; 0: there is none, and both ends are the outcome."""
    drawn: tuple[float, ...]
    """Time of a step in each of them. Those of two configurations with the same seed and inputs are pairs."""

    @property
    def hours(self) -> float:
        """Hours that the whole run takes."""
        return self.outcome.step_seconds * self.steps / 3600

    def cost(self, price: float) -> str:
        """Return the cost of the whole run as text; ``price`` is per device and hour."""
        return f"{self.hours * self.devices * price:,.0f}"


def predict(
    config: PipelineConfig,
    inputs: Inputs,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    steps: int = MEASURED_STEPS,
    algorithms: Any = None,
    progress: Callable[[str], None] = lambda text: None,
    replayed: Sequence[GroupWork] = (),
) -> Prediction:
    """Predict the time of a step, with an interval.

    ``draws``: number of simulations for the interval, with the same seed and steps as the nominal one; fewer than
    `LEAST_DRAWS`: no interval. ``algorithms``: see `simulate`. ``progress`` is called with a line of text after each
    simulated step. ``replayed``: see `simulate`. Raises `ConfigError`.
    """
    steps = replayed_steps(config, replayed) if replayed else steps
    algorithms = algorithms or build_algorithms(config)
    draws = _afforded(config, inputs, steps, draws) if draws >= LEAST_DRAWS else 0

    def simulated(number: int, own: Inputs) -> Outcome:
        def step_done(step: int, last: int) -> None:
            progress(f"simulation {number + 1} of {draws + 1}: {count(step, 'step')} of {last}")

        return simulate(
            config, own, seed=seed, steps=steps, algorithms=algorithms, step_done=step_done, replayed=replayed
        )

    outcome, random = simulated(0, inputs), np.random.default_rng(seed)
    seconds: list[float] = []
    for number in range(1, draws + 1):
        drawn = varied(inputs, drawn_factors(inputs, random), config)
        seconds.append(simulated(number, drawn).step_seconds)
    low, high = interval(outcome.step_seconds, seconds)
    return Prediction(outcome, low, high, derived.total_devices(config), config.max_steps, draws, tuple(seconds))


def interval(nominal: float, drawn: Sequence[float]) -> tuple[float, float]:
    """Return the interval of drawn step times, which contains the nominal one.

    Its ends are the quantiles at positions p (n + 1) of n values (Weibull; type 6 of Hyndman and Fan 1996): between
    them a further draw lies in four of five cases if n is at least 9, whatever the distribution. Below that they are
    the extremes, which hold (n - 1) / (n + 1).
    """
    if not drawn:
        return nominal, nominal
    low, high = np.quantile(drawn, INTERVAL, method="weibull")
    return min(nominal, float(low)), max(nominal, float(high))


def _afforded(config: PipelineConfig, inputs: Inputs, steps: int, draws: int) -> int:
    """Return the number of simulations that `MOST_REQUESTS` allows for a run of this size."""
    requests = derived.samples_per_step(config) * turns(config, inputs) * (steps + 2 * config.async_generation_ratio)
    return max(LEAST_DRAWS, min(draws, int(MOST_REQUESTS / requests)))


def report(config: PipelineConfig, inputs: Inputs, prediction: Prediction, price: float | None = None) -> str:
    """Return a prediction as text. ``price`` is per device and hour."""
    return "\n".join(_lines(config, inputs, prediction, price))


def _lines(config: PipelineConfig, inputs: Inputs, prediction: Prediction, price: float | None) -> Iterator[str]:
    outcome, hours = prediction.outcome, prediction.hours
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
    cost = "" if price is None else f", {prediction.cost(price)} at {price:g} an hour"
    taken = f"{hours:,.3g} h: {hours * prediction.devices:,.3g} device hours on {count(prediction.devices, 'device')}"
    yield f"the run    {count(prediction.steps, 'step')} take {taken}{cost}"
    yield f"device     {inputs.device or ('CPU' if config.cluster.device == 'cpu' else 'H100')}"
    yield from origins(inputs)
    yield from left_out(config, inputs)


def left_out(config: PipelineConfig, inputs: Inputs) -> Iterator[str]:
    """Yield a line of text about what a simulation of this configuration leaves out."""
    found = ["validations"] if config.eval_steps and inputs.validation.seconds is None else []
    found += ["checkpoints"] if config.save_steps else []
    if config.actor_train.model_args.lora_target is not None:
        found.append("what adapters (LoRA) save: training and updates take the time of all weights")
    if found:
        yield f"left out   {'; '.join(found)}"


def _span(prediction: Prediction) -> str:
    nominal = f"{_seconds(prediction.outcome.step_seconds)} s"
    if not prediction.draws:
        return nominal
    ends = f"{_seconds(prediction.low)} to {_seconds(prediction.high)} s"
    return f"{nominal}; {ends} as what is not known of the inputs varies ({count(prediction.draws, 'draw')})"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def origins(inputs: Inputs) -> Iterator[str]:
    """Yield lines of text that list the inputs by origin."""
    known = inputs.known()
    order: Sequence[Origin] = ("measured", "fitted", "given")
    for origin in order:
        if origin in known:
            yield f"{origin:<10} {', '.join(known[origin])}"
    everything = "every other input" if known else "every input (`--inputs`, `--calibrate`)"
    yield f"default    {everything}"


def table(name: str, rows: Sequence[tuple[str, Prediction]], price: float | None = None) -> str:
    """Return a sweep over the setting ``name`` as a text table with a bar of the samples a second. ``rows``: (value,
    prediction); ``price`` is per device and hour."""
    roles = sorted({role for _, each in rows for role in each.outcome.idle})
    interval = any(each.draws for _, each in rows)
    heads = [name, "step s", *["interval"] * interval, "samples/s", "lag"]
    heads += [*(f"idle {role}" for role in roles), "waste"]
    heads += [] if price is None else ["cost"]
    lines = [[*heads, ""]]
    most = max(each.outcome.samples / each.outcome.step_seconds for _, each in rows)
    for value, each in rows:
        outcome = each.outcome
        mean = sum(lag * share for lag, share in outcome.lags.items())
        idle = [f"{outcome.idle[role]:.0%}" if role in outcome.idle else "" for role in roles]
        lines.append(
            [
                value,
                _seconds(outcome.step_seconds),
                *[f"{_seconds(each.low)}-{_seconds(each.high)}"] * interval,
                f"{outcome.samples / outcome.step_seconds:.3g}",
                f"{mean:.2f}",
                *idle,
                f"{outcome.wasted:.0%}",
                *([] if price is None else [each.cost(price)]),
                f"{'#' * round(BAR * outcome.samples / outcome.step_seconds / most):<{BAR}}",
            ]
        )
    return "\n".join(line.rstrip() for line in aligned(lines).split("\n"))


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a table."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True)) for line in lines)
