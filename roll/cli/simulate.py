"""`roll simulate FILE`: the time of a step, who waits, how stale tokens will be and what the run will cost.
`roll simulate --replay RUN`: the same of the recorded groups of a run, under another schedule.

Nothing is started. Neither a GPU nor the model is needed: the model's name or its `config.json` gives the sizes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from roll.check.config import LACKING, check_elsewhere, loaded, read_config
from roll.cli.convert import ORIGINS
from roll.cli.main import BAD_CONFIGURATION, FAILURE, SUCCESS, command_parser, refusal
from roll.configs.errors import ConfigError, choose_among
from roll.configs.loader import dump_config
from roll.configs.plugins import problem
from roll.configs.run import ImageConfig, PipelineConfig
from roll.tracking.files import say, write_atomically
from roll.tracking.run_directory import RunDirectory

if TYPE_CHECKING:
    from roll.simulation.inputs import Inputs
    from roll.simulation.replay import Recorded
    from roll.simulation.workload import GroupWork

PREFIX = "simulation."
"""Prefix of the names of inputs on the command line."""
SHORT = {"ratio": "async_generation_ratio"}
"""Names beside those of keys and inputs."""
ANEW = ("output_dir=null", "resume_from_checkpoint=false")
"""Overrides of a run's configuration: another run cannot have its folder."""
MOST_SPLITS = 8
"""Splits of the devices that a sweep over `split=auto` has, about."""
PROGRESS_SECONDS = 5.0
"""Seconds between progress messages of a long simulation."""

_EPILOG = """\
examples:
  roll simulate run.yaml
  roll simulate run.yaml async_generation_ratio=1 simulation.device=H200 simulation.lengths.median=3000
  roll simulate run.yaml --sweep ratio=0,0.5,1,2 --sweep split=auto
  roll simulate run_qwen3-8b.sh --from verl rewards.math.verifier=math
  roll simulate run.yaml --calibrate output/run/latest -o numbers.yaml
  roll simulate run.yaml --inputs numbers.yaml --price 2.5
  roll simulate --replay output/run/latest ratio=2
  roll simulate run.yaml --html simulated.html

Inputs are lengths, speeds and latencies; docs/simulation.md has them all, and says how far to trust the numbers.

exit codes: 0 simulated; 2 the configuration or an input is wrong, every problem named with a remedy; 1 OUT or PAGE
cannot be written.
"""


def main(arguments: Sequence[str]) -> int:
    """Simulate the run that is described on the command line; return the exit code."""
    parser = command_parser(
        "simulate",
        "Predict what a run takes: the real scheduler in virtual time, with models of what computes.",
        _EPILOG,
    )
    file_help = "YAML file of a run; keys: docs/configuration.md. With --replay, the run's own"
    parser.add_argument("config", metavar="FILE", nargs="?", help=file_help)
    take_inputs(parser)
    parser.add_argument(
        "--from", dest="origin", choices=list(ORIGINS), help="FILE is a configuration of this system (`roll convert`)"
    )
    replay_help = "folder of a run, whose recorded groups are simulated with its configuration and your changes"
    parser.add_argument("--replay", metavar="RUN", help=replay_help)
    parser.add_argument("-o", dest="out", metavar="OUT", help="write the inputs to this file, which must not exist")
    html_help = "write the page of `roll report` about the simulated run: lanes of who works and who waits"
    parser.add_argument("--html", metavar="PAGE", help=html_help)
    sweep_help = (
        "a table over values of a key or an input, of `ratio`, or of `split` (devices of the engine, or `auto`); "
        "several times: over all their combinations"
    )
    parser.add_argument("--sweep", metavar="KEY=A,B,...", action="append", default=[], help=sweep_help)
    parser.add_argument(
        "--draws",
        type=int,
        default=16,
        help="simulations for the interval (default 16; of a large run fewer; below 4: no interval)",
    )
    options = parser.parse_intermixed_args(arguments)
    if options.replay is not None:
        options.overrides[:0] = [] if options.config is None else [options.config]
        options.config = str(RunDirectory(Path(options.replay)).config)
    elif options.config is None:
        parser.error("give FILE, or --replay RUN")
    if options.replay is not None and options.origin is not None:
        parser.error("--replay takes the configuration of the run: leave --from out")
    try:
        options.source = options.config if options.origin is None else _translated(options.config, options.origin)
        return _simulate(options)
    except ConfigError as error:
        say(refusal(options.config, error), error=True)
        return BAD_CONFIGURATION


def _simulate(options: argparse.Namespace) -> int:
    from roll.simulation.inputs import dump_inputs, overridden
    from roll.simulation.prediction import left_out, origins, predict, report, table
    from roll.simulation.replay import refuse_given

    if options.draws < 0:
        raise problem("--draws", f"{options.draws} is no number of simulations", "write 0 or more")
    check_price_and_seed(options)
    if options.html is not None and options.sweep:
        raise problem("--html", "a page shows one simulation, and `--sweep` makes several", "leave one of them out")
    keys, numbers = split(options.overrides)
    keys = [*(ANEW if options.replay is not None else ()), *keys]
    config, inputs, replay = _prepared(options, keys, numbers)
    if options.out is not None:
        try:
            with Path(options.out).open("x", encoding="utf-8") as file:
                file.write(dump_inputs(inputs))
        except OSError as error:
            say(f"cannot write {options.out}: {error.strerror or error}", error=True)
            return FAILURE
    progress = Progress()
    replayed = () if replay is None else replay.groups
    simulated = partial(predict, draws=options.draws, seed=options.seed, progress=progress, replayed=replayed)
    if not options.sweep:
        told = report(config, inputs, simulated(config, inputs), options.price)
        say(told)
        return SUCCESS if options.html is None else _draw(options, config, inputs, replayed, told)
    axes = [_axis(text, config) for text in options.sweep]
    rows = []
    for point in product(*(values.items() for _, values in axes)):
        value = ", ".join(shown for shown, _ in point)
        change, number = split([override for _, overrides in point for override in overrides])
        swept = simulated_config(options.source, [*keys, *change])
        given = overridden(inputs, number)
        if replay is not None:
            refuse_given(given)
            _refuse_steps(change)
        progress.of = "".join(f"{key}={shown}, " for (key, _), (shown, _) in zip(axes, point, strict=True))
        rows.append((value, simulated(swept, given)))
    say(table(", ".join(key for key, _ in axes), rows, options.price))
    say("\n".join([*origins(inputs), *left_out(config, inputs)]))
    return SUCCESS


def _draw(
    options: argparse.Namespace, config: PipelineConfig, inputs: Inputs, replayed: Sequence[GroupWork], told: str
) -> int:
    """Write the page of a simulated run; return the exit code. ``told``: its report."""
    from roll.report.page import render_page
    from roll.report.simulated import simulated_run
    from roll.simulation.run import simulate

    with TemporaryDirectory() as folder:
        trace = Path(folder) / "timeline.json"
        outcome = simulate(config, inputs, seed=options.seed, replayed=replayed, trace=trace)
        run = simulated_run(
            Path(options.config), dump_config(config), trace, outcome.step_ends, outcome.lags, outcome.ledger, told
        )
    try:
        write_atomically(Path(options.html), render_page(run))
    except OSError as error:
        say(f"{options.html}: {error.strerror or error}", error=True)
        return FAILURE
    say(f"page       {options.html}")
    return SUCCESS


def _prepared(
    options: argparse.Namespace, keys: Sequence[str], numbers: Sequence[str]
) -> tuple[PipelineConfig, Inputs, Recorded | None]:
    """Return the configuration, the inputs and the recorded groups, and say how the replay of the run as it was meets
    the run."""
    from roll.simulation.calibration import calibrated
    from roll.simulation.inputs import read_inputs
    from roll.simulation.replay import recorded
    from roll.simulation.run import simulate

    inputs = read_inputs(options.inputs, numbers)
    runs = [Path(each) for each in options.calibrate]
    if options.replay is None:
        config = simulated_config(options.source, keys)
        inputs, notes = calibrated(config, inputs, runs) if runs else (inputs, [])
        if notes:
            say("\n".join(notes))
        return config, inputs, None
    require_run(options.replay)
    _refuse_steps(keys)
    replay = recorded(Path(options.replay), inputs)
    config = simulated_config(options.source, keys)
    as_it_was = simulated_config(options.source, ANEW)
    inputs, notes = calibrated(as_it_was, inputs, [*runs, Path(options.replay)])
    outcome = simulate(as_it_was, inputs, seed=options.seed, replayed=replay.groups)
    say("\n".join([replay.compared(outcome), *notes]))
    return config, inputs, replay


def _refuse_steps(keys: Sequence[str]) -> None:
    """Raise `ConfigError` for a number of steps, which a replay takes from the run."""
    if any(key.partition("=")[0] == "max_steps" for key in keys):
        raise problem("max_steps", "a replay has as many steps as the run recorded", "leave it out")


def require_run(folder: str) -> None:
    """Raise `ConfigError` for a folder that holds no run."""
    if not RunDirectory(Path(folder)).config.is_file():
        raise problem(folder, "there is no run in this folder", "give one with config.yaml and metrics.jsonl")


def take_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the commands that simulate: overrides, inputs, a seed and a price."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value",
        help=f"dotted keys that replace values of the configuration (`ratio`: {SHORT['ratio']}); those that begin with "
        f"`{PREFIX}` are inputs",
    )  # fmt: skip
    parser.add_argument("--inputs", metavar="NUMBERS", help="YAML file of inputs")
    calibrate_help = "folder of a run of this model, to take inputs from; several times: of several runs"
    parser.add_argument("--calibrate", metavar="RUN", action="append", default=[], help=calibrate_help)
    parser.add_argument("--price", type=float, help="of a device and hour")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths and latencies (default 0)")


def check_price_and_seed(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for a price that is negative or not finite, or a negative seed."""
    if options.price is not None and not 0 <= options.price < math.inf:
        raise problem("--price", f"{options.price:g} is no price", "write a number of at least 0")
    if options.seed < 0:
        raise problem("--seed", f"{options.seed} is no seed", "write 0 or more")


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
    keys = [each.partition("=") for each in overrides if not each.startswith(PREFIX)]
    return ["".join((SHORT.get(key, key), *rest)) for key, *rest in keys], numbers


def _translated(file: str, origin: str) -> dict[str, Any]:
    """Return another system's configuration as a tree of ours, and say how much of it that is. Raises `ConfigError`."""
    from roll.cli.convert import converted, read_text

    done = converted(read_text(file), file, origin)
    say(f"from       {origin}: {len(done.values)} keys; lost: {len(done.lost)} (`roll convert` names them)")
    return done.tree()


def simulated_config(source: str | dict[str, Any], overrides: Sequence[str]) -> PipelineConfig:
    """Load a configuration from a file, or from the tree of another system's, and check all but this machine.

    Raises `ConfigError`, also if it cannot be simulated.
    """
    told: list[str] = []
    config = loaded(lambda: read_config(source, overrides, told.append), here=False)
    check_elsewhere(config, LACKING if told or isinstance(source, dict) else ())
    if not isinstance(config, PipelineConfig):
        raise problem("pipeline", f"`{config.pipeline}` has no rollouts", "simulate a run of `rlvr` or `agentic`")
    if isinstance(config, ImageConfig):
        raise problem("pipeline", "pictures are not simulated yet", "simulate a run of `rlvr` or `agentic`")
    return config


def _axis(text: str, config: PipelineConfig) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Return the key of a sweep, and value -> overrides. Raises `ConfigError`."""
    from roll.simulation.advice import all_splits

    key, sign, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not sign or not found:
        raise problem("--sweep", f"`{text}` names no values", "write KEY=A,B such as ratio=0,1,2")
    if key != "split":
        key = SHORT.get(key, key)
        return key, {value: (f"{key}={value}",) for value in found}
    splits = {str(number): change.overrides for number, change in all_splits(config).items()}
    if found == ["auto"]:
        every = max(1, round(len(splits) / MOST_SPLITS))
        found = list(splits)[every // 2 :: every]
    for value in found:
        if value not in splits:
            raise problem("--sweep", f"the engine cannot have {value} devices", choose_among(value, splits))
    return key, {value: splits[value] for value in found}
