"""`roll simulate FILE`: predicts the time of a step, the waits, the staleness of tokens and the cost of a run.

Nothing is started. Neither a GPU nor the model is needed: the model's name or its `config.json` gives the sizes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from roll.check.config import LACKING, check_elsewhere, loaded, read_config
from roll.cli.main import command_parser, refusal
from roll.configs.errors import ConfigError
from roll.configs.plugins import problem
from roll.configs.run import ImageConfig, PipelineConfig
from roll.tracking.files import say

DONE, FAILED, BAD_CONFIGURATION = 0, 1, 2
PREFIX = "simulation."
"""Prefix of the names of inputs on the command line."""
SHORT = {"ratio": "async_generation_ratio"}
"""Short names of keys in `--sweep`."""
PROGRESS_SECONDS = 5.0
"""Seconds between progress messages of a long simulation."""

_EPILOG = """\
examples:
  roll simulate run.yaml
  roll simulate run.yaml async_generation_ratio=1 simulation.device=H200 simulation.lengths.median=3000
  roll simulate run.yaml --sweep ratio=0,0.5,1,2
  roll simulate run.yaml --calibrate output/run/latest -o numbers.yaml
  roll simulate run.yaml --inputs numbers.yaml --price 2.5

Inputs are lengths, speeds and latencies; docs/simulation.md has them all, and says how far to trust the numbers.

exit codes: 0 simulated; 2 the configuration or an input is wrong, every problem named with a remedy; 1 OUT cannot be
written.
"""


def main(arguments: Sequence[str]) -> int:
    """Simulate the run that is described on the command line; return the exit code."""
    parser = command_parser(
        "simulate",
        "Predict what a run takes: the real scheduler in virtual time, with models of what computes.",
        _EPILOG,
    )
    parser.add_argument("config", metavar="FILE", help="YAML file of a run; keys: docs/configuration.md")
    take_inputs(parser)
    parser.add_argument("-o", dest="out", metavar="OUT", help="write the inputs to this file, which must not exist")
    parser.add_argument(
        "--sweep", metavar="KEY=A,B,...", help="a table over values of a key or an input, or of `ratio`"
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=16,
        help="simulations for the interval (default 16; of a large run fewer; below 4: no interval)",
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        return _simulate(options)
    except ConfigError as error:
        say(refusal(options.config, error), error=True)
        return BAD_CONFIGURATION


def _simulate(options: argparse.Namespace) -> int:
    from roll.simulation.calibration import calibrated
    from roll.simulation.inputs import dump_inputs, overridden, read_inputs
    from roll.simulation.prediction import origins, predict, report, table

    if options.draws < 0:
        raise problem("--draws", f"{options.draws} is no number of simulations", "write 0 or more")
    check_price(options.price)
    keys, numbers = split(options.overrides)
    config = simulated_config(options.config, keys)
    inputs = read_inputs(options.inputs, numbers)
    if options.calibrate:
        inputs, notes = calibrated(config, inputs, [Path(each) for each in options.calibrate])
        say("\n".join(notes))
    if options.out is not None:
        try:
            with Path(options.out).open("x", encoding="utf-8") as file:
                file.write(dump_inputs(inputs))
        except OSError as error:
            say(f"cannot write {options.out}: {error.strerror or error}", error=True)
            return FAILED
    progress = Progress()
    if options.sweep is None:
        prediction = predict(config, inputs, draws=options.draws, seed=options.seed, progress=progress)
        say(report(config, inputs, prediction, options.price))
        return DONE
    key, values = _sweep(options.sweep)
    rows = []
    for value in values:
        change, number = split([f"{key}={value}"])
        swept = simulated_config(options.config, [*keys, *change])
        given = overridden(inputs, number)
        progress.of = f"{key}={value}, "
        rows.append((value, predict(swept, given, draws=options.draws, seed=options.seed, progress=progress)))
    say(table(key, rows, options.price))
    say("\n".join(origins(inputs)))
    return DONE


def take_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the commands that simulate: overrides, inputs, a seed and a price."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value",
        help=f"dotted keys that replace values of the configuration; those that begin with `{PREFIX}` are inputs",
    )  # fmt: skip
    parser.add_argument("--inputs", metavar="NUMBERS", help="YAML file of inputs")
    calibrate_help = "folder of a run of this model, to take inputs from; several times: of several runs"
    parser.add_argument("--calibrate", metavar="RUN", action="append", default=[], help=calibrate_help)
    parser.add_argument("--price", type=float, help="of a device and hour")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths and latencies (default 0)")


def check_price(price: float | None) -> None:
    """Raise `ConfigError` for a price that is negative or not finite."""
    if price is not None and not 0 <= price < math.inf:
        raise problem("--price", f"{price:g} is no price", "write a number of at least 0")


class Progress:
    """Progress messages on standard error, at most one every `PROGRESS_SECONDS`."""

    def __init__(self) -> None:
        self.of = ""
        """Prefix of the messages: the row of a sweep that is being simulated."""
        self._said_at = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print ``text``, unless the last message is too recent."""
        if time.monotonic() - self._said_at >= PROGRESS_SECONDS:
            self._said_at = time.monotonic()
            say(self.of + text, error=True)


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the configuration, and those of inputs without their prefix."""
    numbers = [each.removeprefix(PREFIX) for each in overrides if each.startswith(PREFIX)]
    return [each for each in overrides if not each.startswith(PREFIX)], numbers


def simulated_config(file: str, overrides: Sequence[str]) -> PipelineConfig:
    """Load a configuration and check all but this machine. Raises `ConfigError`, also if it cannot be simulated."""
    told: list[str] = []
    config = loaded(lambda: read_config(file, overrides, told.append), here=False)
    check_elsewhere(config, LACKING if told else ())
    if not isinstance(config, PipelineConfig):
        raise problem("pipeline", f"`{config.pipeline}` has no rollouts", "simulate a run of `rlvr` or `agentic`")
    if isinstance(config, ImageConfig):
        raise problem("pipeline", "pictures are not simulated yet", "simulate a run of `rlvr` or `agentic`")
    return config


def _sweep(text: str) -> tuple[str, list[str]]:
    key, sign, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not sign or not found:
        raise problem("--sweep", f"`{text}` names no values", "write KEY=A,B such as ratio=0,1,2")
    return SHORT.get(key, key), found
