"""`roll advise RUN|FILE`: finds what slows a run down and which changes help, or the best settings of a configuration.

Each answer is a simulation (`roll simulate`) of a configuration that passes `roll check`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from roll.cli.main import BAD_CONFIGURATION, SUCCESS, command_parser, refusal
from roll.cli.simulate import (
    ANEW,
    Progress,
    check_price_and_seed,
    require_run,
    simulated_config,
    split,
    take_inputs,
)
from roll.configs.errors import ConfigError
from roll.configs.plugins import problem
from roll.tracking.files import read_json_lines, say
from roll.tracking.run_directory import RunDirectory

NOTHING = "no change that was tried gains more than the uncertainty"

_EPILOG = """\
examples:
  roll advise output/run/latest
  roll advise run.yaml --target gpu_hours --max-lag 1
  roll advise run.yaml --calibrate output/run/latest
  roll advise output/run/2026-01-01_10-00-00 --after output/run/latest

docs/simulation.md says how far to trust it.

exit codes: 0 simulated; 2 the configuration, the run or an input is wrong, every problem named with a remedy.
"""


def main(arguments: Sequence[str]) -> int:
    """Advise on the run or configuration that is named on the command line; return the exit code."""
    parser = command_parser("advise", "What holds a run up, and which changes would help: each is simulated.", _EPILOG)
    parser.add_argument("subject", metavar="RUN|FILE", help="folder of a run, or YAML file of one")
    take_inputs(parser)
    parser.add_argument("--target", choices=["throughput", "gpu_hours"], default="throughput", help="what is wanted")
    parser.add_argument("--max-lag", type=int, metavar="N", help="versions by which a token may be old at most")
    parser.add_argument("--draws", type=int, default=8, help="simulations for each interval (default 8; below 4: none)")
    parser.add_argument("--seconds", type=float, default=120.0, help="stop simulating after this time (default 120)")
    after_help = "folder of a run that followed RUN with changes: compare it with what would have been predicted"
    parser.add_argument("--after", metavar="OTHER_RUN", help=after_help)
    options = parser.parse_intermixed_args(arguments)
    try:
        return _advise(options)
    except ConfigError as error:
        say(refusal(options.subject, error), error=True)
        return BAD_CONFIGURATION


def _advise(options: argparse.Namespace) -> int:
    from roll.simulation import advice
    from roll.simulation.calibration import calibrated, slow_replica
    from roll.simulation.inputs import read_inputs

    check_price_and_seed(options)
    for name, least in (("draws", 0), ("seconds", 0), ("max_lag", 0)):
        value = vars(options)[name]
        if value is not None and not least <= value < math.inf:
            raise problem(f"--{name.replace('_', '-')}", f"{value} is too small or too large", "write 0 or more")
    keys, numbers = split(options.overrides)
    if options.after is not None:
        return _compare(options, keys, numbers)
    subject = Path(options.subject)
    runs = [*map(Path, options.calibrate), *([subject] if subject.is_dir() else [])]
    file = str(RunDirectory(subject).config) if subject.is_dir() else options.subject
    if subject.is_dir():
        require_run(options.subject)
    keys = [*(ANEW if subject.is_dir() else ()), *keys]
    config = simulated_config(file, keys)
    inputs = read_inputs(options.inputs, numbers)
    if runs:
        inputs, notes = calibrated(config, inputs, runs)
        say("\n".join(notes))
    trials = advice.Trials(
        lambda overrides: simulated_config(file, [*keys, *overrides]),
        inputs,
        target=options.target,
        max_lag=options.max_lag,
        draws=options.draws,
        seed=options.seed,
        seconds=options.seconds,
        progress=Progress(),
    )
    table = partial(advice.table_text, trials, price=options.price)
    if not subject.is_dir():
        rows = advice.search(trials)
        say(table(rows) if rows else NOTHING)
        say(advice.ending_text(trials, []))
        return SUCCESS
    records = read_json_lines(RunDirectory(subject).metrics)
    found = slow_replica(records)
    slow = None if found is None else found[0]
    saved = advice.causes(trials)
    rows = advice.advise(trials, slow)
    say(advice.cause_text(trials, saved, slow))
    advised = [row for row in rows if row.sure]
    say(table(advised) if advised else NOTHING)
    say(advice.ending_text(trials, [row for row in rows if not row.sure], advice.unknown_of(config, inputs, records)))
    return SUCCESS


def _compare(options: argparse.Namespace, keys: Sequence[str], numbers: Sequence[str]) -> int:
    """Say how the run that followed compares with what the first one predicts for its configuration."""
    from roll.report.files import read_run
    from roll.report.page import differences
    from roll.simulation import aftermath
    from roll.simulation.calibration import calibrated
    from roll.simulation.inputs import read_inputs
    from roll.simulation.prediction import origins, predict
    from roll.simulation.replay import steps_of

    if keys:
        message = f"`{keys[0]}` would change a run that is over"
        raise problem("--after", message, "leave it out: the configuration is that of OTHER_RUN")
    unused = {"--target": options.target != "throughput", "--max-lag": options.max_lag is not None}
    for name in [name for name, given in {**unused, "--price": options.price is not None}.items() if given]:
        raise problem(name, "a comparison with `--after` has no use for it", "leave it out")
    for folder in (options.subject, options.after):
        require_run(folder)
    runs = [RunDirectory(Path(folder)) for folder in (options.subject, options.after)]
    before, after = (simulated_config(str(run.config), ANEW) for run in runs)
    inputs, notes = calibrated(
        after, read_inputs(options.inputs, numbers), [*map(Path, options.calibrate), runs[0].root]
    )
    inputs = aftermath.inputs_after(inputs, before, after)
    predicted = predict(after, inputs, draws=options.draws, seed=options.seed, progress=Progress())
    first, second = (
        aftermath.measured(config, steps_of(run.root), with_validations=inputs.validation.seconds is not None)
        for config, run in zip((before, after), runs, strict=True)
    )
    changed = [" -> ".join((f"{row['key']} {row['values'][0]}", row["values"][1]))
               for row in differences([read_run(run.root).config for run in runs])]  # fmt: skip
    say("\n".join([*notes, f"changed    {', '.join(changed) or 'nothing'}"]))
    say(aftermath.comparison_text(predicted, first, second))
    say("\n".join(origins(inputs)))
    return SUCCESS
