"""`roll train FILE --tune N`: at most N short probes of the real system, then the run with what measurably helped.

The first probe has the user's own settings. A simulation that is calibrated on the best probe so far names the next
change (`roll advise`). It is kept if the step was shorter by more than the noise, and the next change is sought from
there. Probes change nothing that affects what is learned. The ratio, which makes tokens older or fresher, is changed
only with `--max-lag`. A probe is a run of its own in `tune/` of the run's folder: without checkpoints, trackers,
validations, restarts and injected faults, and interrupted after `STEPS` steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from roll.check.config import check_config, loaded, read_config
from roll.cli.main import (
    BAD_CONFIGURATION,
    FAILURE,
    attempt_run,
    dotted_options,
    end_in_order_on_signals,
    refusal,
    run_to_its_end,
)
from roll.cli.simulate import Progress, simulated_config
from roll.configs import derived
from roll.configs.errors import ConfigError, count
from roll.configs.loader import dump_yaml, load_config, read_mapping
from roll.configs.plugins import problem
from roll.configs.run import AgenticConfig, ChaosConfig, PipelineConfig, PromptConfig, RestartsConfig, RunConfig
from roll.pipeline.resume import changes, named_run
from roll.simulation import advice
from roll.simulation.calibration import calibrated
from roll.simulation.inputs import Inputs
from roll.simulation.replay import steps_of
from roll.simulation.run import WARM_UP_STEPS, check_simulated
from roll.tracking.files import JsonLines, read_json_lines, say, write_atomically
from roll.tracking.logs import give_away_output
from roll.tracking.run_directory import RunDirectory, RunExists, RunUnusable, point_latest_to

STEPS = 10
"""Steps of a probe; the first `WARM_UP_STEPS` are not measured."""
LONGEST = 10 * STEPS
"""Least `max_steps` of a probe. It is interrupted long before: its last steps would have nothing to generate ahead."""
POLL_SECONDS = 0.1
ENDING_SECONDS = 120.0
"""Longest time that an interrupted probe takes to end; then it is killed."""
NOISE = 2.0
"""Standard errors by which a step has to be shorter for a change to be kept."""
DRAWS = 8
"""Simulations for the interval of a prediction."""
ADVICE_SECONDS = 60.0
"""Longest simulation between two probes."""
LAG_KEYS = ("async_generation_ratio", "max_staleness")
"""Keys that are changed only with `--max-lag`."""
_CHOSEN = """\
# Written by `roll train --tune`: the run replaces these keys of its file. probes.jsonl tells why.
"""


class TuneFailed(RuntimeError):
    """The first probe, which has the user's own settings, failed."""


@dataclass(frozen=True)
class Probe:
    """A probe; one line of `tune/probes.jsonl`."""

    number: int
    """Number from 1; its run is in `tune/probe-<number>`."""
    name: str
    overrides: list[str]
    """Overrides of the user's configuration, as on the command line."""
    predicted: list[float] | None
    """Predicted seconds of a step, and the ends of the interval. None for the first probe."""
    step_seconds: float | None = None
    """Mean measured seconds of a step; None if the probe failed."""
    error: float = 0.0
    """Standard error of the mean."""
    failure: str | None = None
    kept: bool = False
    """True if it became the best one."""

    def __str__(self) -> str:
        if self.step_seconds is None:
            return f"probe {self.number}, {self.name}: failed and skipped: {self.failure}"
        told = ""
        if self.predicted is not None:
            nominal, low, high = self.predicted
            told = f" (predicted {nominal:.3g} s, {low:.3g} to {high:.3g}); {'kept' if self.kept else 'not kept'}"
        return f"probe {self.number}, {self.name}: a step takes {self.step_seconds:.3g} s ± {self.error:.2g}{told}"


def tune(options: argparse.Namespace) -> int:
    """Tune the configuration on the command line, then run it; return the exit code."""
    reserved: Path | None = None
    try:
        end_in_order_on_signals()
        for name, number, least in (("--tune", options.tune, 2), ("--max-lag", options.max_lag, 0)):
            if number is not None and number < least:
                raise problem(name, f"{number} is too small", f"write {least} or more")
        own = loaded(partial(read_config, options.config, options.overrides, say))
        root, began = _folder(check_config(own))
        if root is None:
            reserved = root = RunDirectory.reserve(own.exp_name)
        chosen = _overrides_of(root, options, own, began=began)
    except ConfigError as error:
        if reserved is not None and not (reserved / "tune" / "probes.jsonl").exists():
            shutil.rmtree(reserved)
        say(refusal(options.config, error, "; the run was not started"), error=True)
        return BAD_CONFIGURATION
    except (TuneFailed, RunExists, RunUnusable, OSError) as error:
        say(str(error), error=True)
        return FAILURE
    except KeyboardInterrupt:
        again = "" if reserved is None else f" with output_dir={reserved}"
        say(f"interrupted; finished probes are not repeated by the same command{again}", error=True)
        return FAILURE
    place = [] if reserved is None else [f"output_dir={reserved}"]
    load = partial(read_config, options.config, [*options.overrides, *chosen, *place])

    def begins(run: RunDirectory) -> None:
        if reserved is not None:
            point_latest_to(run.root)

    return run_to_its_end(options.config, load, time.monotonic(), begins).exit_code


def _folder(config: RunConfig) -> tuple[Path | None, bool]:
    """Return the folder of the run, None if it has none yet, and True if the run has begun."""
    if config.resume_from_checkpoint is not False:
        try:
            run, _ = named_run(config)
        except FileNotFoundError as error:
            remedy = "give the folder of a run, or `output_dir` alone to go on with its probes"
            raise problem("resume_from_checkpoint", str(error), remedy) from None
        if run is not None:
            return run.root, True
    return (None if config.output_dir is None else Path(config.output_dir)), False


def _overrides_of(root: Path, options: argparse.Namespace, own: RunConfig, *, began: bool) -> list[str]:
    """Return the chosen overrides of the run in ``root``, after the probes that are still to be made."""
    folder = root / "tune"
    chosen = folder / "chosen.yaml"
    if began:
        told = "goes on with the settings that were chosen" if chosen.exists() else "began without probes"
        say(f"the run {told}; nothing is tuned")
        return _written(chosen) if chosen.exists() else []
    folder.mkdir(parents=True, exist_ok=True)
    with RunDirectory(root).held():
        tuning = Tuning(folder, options.config, options.overrides, own, options.max_lag)
        if chosen.exists():
            say(f"tuned already; delete {chosen} to make more probes")
        else:
            best = tuning.best_of(options.tune)
            write_atomically(chosen, _CHOSEN + dump_yaml(dotted_options(best.overrides)))
        overrides = _written(chosen)
        tuning.allowed(overrides)
    say(f"chosen  {' '.join(overrides) or 'the settings as they are'} ({chosen})\n")
    return overrides


def _written(path: Path) -> list[str]:
    """Return the overrides in a file of chosen settings."""

    def leaves(tree: Mapping[str, Any], above: str) -> Iterator[str]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from leaves(value, f"{above}{key}.")
            else:
                yield f"{above}{key}={json.dumps(value)}"

    return list(leaves(read_mapping(path), ""))


class Tuning:
    """The probes of a run, in its folder `tune`.

    ``probe`` runs a configuration for some steps; it may fail. Raises `ConfigError` for a run that cannot be simulated,
    and for probes of another configuration in the folder.
    """

    def __init__(
        self,
        folder: Path,
        file: str,
        overrides: Sequence[str],
        own: RunConfig,
        max_lag: int | None = None,
        probe: Callable[[PipelineConfig, int], None] | None = None,
    ) -> None:
        self._folder, self._file, self._overrides = folder, file, list(overrides)
        self._max_lag = max_lag
        self._probe = run_probe if probe is None else probe
        self._own = self._configured(())
        check_simulated(self._own)
        lag = derived.resolved_max_staleness(self._own)
        if max_lag is not None and lag > max_lag:
            message = f"the configuration already lets tokens be {count(lag, 'version')} old, more than {max_lag}"
            raise problem("--max-lag", message, f"write {lag} or more, or a smaller `async_generation_ratio`")
        path = folder / "probes.jsonl"
        self._done = [Probe(**each) for each in read_json_lines(path)] if path.exists() else []
        if self._done:
            self._refuse_other(load_config(RunDirectory(self._place(1)).config))

    def best_of(self, number: int) -> Probe:
        """Return the best one of at most ``number`` probes. Raises `TuneFailed` if the first one fails."""
        for each in self._done:
            say(str(each))
        while len(self._done) < number:
            change = self._next()
            if change is None:
                say("no other change is expected to help")
                break
            self._make(*change, number)
        if self._max_lag is None:
            say("not tried: other ratios, which make tokens older or fresher (`--max-lag N` allows them)")
        self.allowed(self._best.overrides)
        return self._best

    @property
    def _best(self) -> Probe:
        return [each for each in self._done if each.kept][-1]

    def _place(self, number: int) -> Path:
        return self._folder / f"probe-{number}"

    def _configured(self, overrides: Sequence[str]) -> PipelineConfig:
        """Return the user's configuration with overrides, as a probe."""
        return probe_config(simulated_config(self._file, [*self._overrides, *overrides]), self._folder)

    def allowed(self, overrides: Sequence[str]) -> PipelineConfig:
        """Return a probe's configuration. Raises `ConfigError` for changes that a probe must not make."""
        config = check_config(self._configured(overrides))
        for change in changes(self._own, config):
            is_lag = change.path in LAG_KEYS
            if change.judgement != "harmless" and not (is_lag and self._max_lag is not None):
                remedy = "allow it with `--max-lag N`" if is_lag else "change it yourself"
                raise problem(change.path, "it affects what is learned", remedy)
        if derived.total_devices(config) > derived.total_devices(self._own):
            raise problem("cluster", "the configuration has no more devices", "add them yourself")
        assert isinstance(config, PipelineConfig)
        lag = derived.resolved_max_staleness(config)
        if self._max_lag is not None and lag > self._max_lag:
            message = f"tokens may be {count(lag, 'version')} old with it, more than {self._max_lag}"
            raise problem("--max-lag", message, f"write {lag} or more, or delete {self._folder}")
        return config

    def _refuse_other(self, before: RunConfig) -> None:
        other = [change for change in changes(before, self._own) if change.path != "output_dir"]
        if other:
            message = f"it holds probes of another configuration ({other[0]})"
            raise problem(str(self._folder), message, "delete it, or name another `output_dir`")

    def _next(self) -> tuple[str, list[str], list[float] | None] | None:
        """Return name, overrides and prediction of the next probe; None if nothing else is expected to help."""
        if not self._done:
            return "as it is", [], None
        best = self._best
        inputs, _ = calibrated(self.allowed(best.overrides), Inputs(), [self._place(best.number)])
        trials = advice.Trials(
            lambda overrides: self.allowed(_merged(best.overrides, overrides)),
            inputs,
            max_lag=self._max_lag,
            draws=DRAWS,
            seconds=ADVICE_SECONDS,
            progress=Progress(),
        )
        tried = [set(each.overrides) for each in self._done]
        for row in advice.advise(trials):
            overrides = _merged(best.overrides, row.change.overrides)
            if row.sure and set(overrides) not in tried:
                made = row.prediction
                return row.change.name, overrides, [made.outcome.step_seconds, made.low, made.high]
        return None

    def _make(self, name: str, overrides: list[str], predicted: list[float] | None, number: int) -> None:
        """Make a probe and record it."""
        probe = Probe(len(self._done) + 1, name, overrides, predicted)
        place = self._place(probe.number)
        shutil.rmtree(place, ignore_errors=True)  # of an interrupted attempt
        written = f": {' '.join(overrides)}" if overrides else ""
        say(f"probe {probe.number} of at most {number}, {count(STEPS, 'step')} {name}{written} ...")
        self._probe(replace(self.allowed(overrides), output_dir=str(place)), STEPS)
        probe = measured(probe, place)
        if not self._done and probe.failure is not None:
            raise TuneFailed(f"the settings as they are failed: {probe.failure}")
        probe = replace(probe, kept=not self._done or is_shorter(probe, self._best))
        lines = JsonLines(self._folder / "probes.jsonl")
        lines.append(asdict(probe))
        lines.close()
        self._done.append(probe)
        say(str(probe))


def _merged(overrides: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return overrides of which later ones replace earlier ones of the same key."""
    merged = {each.partition("=")[0]: each for each in (*overrides, *more)}
    return list(merged.values())


def probe_config(config: PipelineConfig, place: Path) -> PipelineConfig:
    """Return the configuration of a probe in the folder ``place``."""
    aside: dict[str, Any] = {
        "output_dir": str(place),
        "max_steps": max(config.max_steps, LONGEST),
        "save_steps": 0,
        "eval_steps": 0,
        "resume_from_checkpoint": False,
        "restarts": RestartsConfig(),
        "chaos": ChaosConfig(),
        "track_with": [],
        "tracker_kwargs": {},
    }
    if isinstance(config, PromptConfig):
        aside["validation"] = None
    if isinstance(config, AgenticConfig):
        aside["val_env_manager"] = None
    return replace(config, **aside)


def measured(probe: Probe, place: Path) -> Probe:
    """Return a probe with the step times that its run recorded, or with the reason why there are too few."""
    times = [each["time/step"] for each in steps_of(place)][: STEPS - WARM_UP_STEPS]
    if len(times) == STEPS - WARM_UP_STEPS:
        return replace(probe, step_seconds=fmean(times), error=stdev(times) / math.sqrt(len(times)))
    cause = None
    with suppress(OSError, ValueError):
        cause = json.loads(RunDirectory(place).summary.read_text(encoding="utf-8")).get("error")
    return replace(probe, failure=f"{cause or 'its process ended early'} (its output: {place}.out)")


def is_shorter(probe: Probe, best: Probe) -> bool:
    """Return True if a probe's step is shorter than the best one's, by a worthwhile share and by more than noise."""
    if probe.step_seconds is None or best.step_seconds is None:
        return False
    saved = best.step_seconds - probe.step_seconds
    return saved > max(advice.LEAST_GAIN * best.step_seconds, NOISE * math.hypot(probe.error, best.error))


def run_probe(config: PipelineConfig, steps: int) -> None:
    """Run a configuration in a process of its own until it has made ``steps`` steps, or failed.

    Raises `KeyboardInterrupt` after an interrupted probe has ended.
    """
    process = get_context("spawn").Process(target=_attempt, args=(config, steps))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGINT)
        try:
            process.join(ENDING_SECONDS)
        finally:
            process.kill()
        raise


def _attempt(config: PipelineConfig, steps: int) -> None:
    """Run a probe. Entry point of its process."""
    os.setsid()  # Ctrl-C on a terminal reaches only the parent, which forwards it
    end_in_order_on_signals()
    place = Path(str(config.output_dir))
    give_away_output(place.parent, place.name)
    threading.Thread(target=_end_after, args=(RunDirectory(place).metrics, steps), daemon=True).start()
    sys.exit(attempt_run("the probe", lambda: config, time.monotonic()).exit_code)


def _end_after(metrics: Path, steps: int) -> None:
    """Interrupt this process once its run has recorded ``steps`` steps, or its parent has died."""
    parent = parent_process()
    while parent is not None and parent.is_alive():
        with suppress(OSError, ValueError):
            if any(each["step"] >= steps for each in read_json_lines(metrics)):
                break
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(ENDING_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)
