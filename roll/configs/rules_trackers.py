"""Rules about trackers: known names, valid options, and their packages and keys present before anything loads.

The options are dataclasses beside each tracker's code, so a new tracker brings its own keys. Only the named trackers
are imported, and their libraries are not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, make_dataclass
from importlib.util import find_spec
from typing import Any

from pydantic import TypeAdapter, ValidationError

from roll.configs.derived import tracker_list
from roll.configs.errors import ConfigProblem
from roll.configs.explain import truth_value_problems, validation_problems
from roll.configs.schema import PipelineConfig
from roll.configs.wording import choose_among, is_secret, shown
from roll.tracking.plugins.registry import PLUG_INS, TENSORBOARD, plug_in_class, tracker_names

_KEYS = "tracker_kwargs"


@dataclass(frozen=True)
class ChosenTracker:
    """A plug-in tracker of a run."""

    name: str
    package: str | None
    install: str
    secret: str | None
    """The environment variable that must hold its key."""
    mode: str


def chosen_trackers(config: PipelineConfig) -> list[ChosenTracker]:
    """Return the plug-in trackers of a configuration, without those whose options are wrong."""
    chosen = []
    for name in tracker_list(config):
        plug_in = plug_in_class(PLUG_INS[name]) if name in PLUG_INS else None
        written = config.tracker_kwargs.get(name, {})
        if plug_in is not None and not list(_option_problems(name, plug_in.Options, written)):
            options = plug_in.Options(**written)
            secret, mode = plug_in.secret(options), plug_in.mode(options)
            chosen.append(ChosenTracker(name, plug_in.package, plug_in.install, secret, mode))
    return chosen


def tracker_words(config: PipelineConfig) -> list[str]:
    """Describe where metrics go besides `metrics.jsonl`."""
    words = [f"{tracker.name} ({tracker.mode})" for tracker in chosen_trackers(config)]
    return ["TensorBoard", *words] if tracker_list(config) else words


def trackers_are_known(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject unknown and repeated trackers."""
    names = tracker_list(config)
    as_list = not isinstance(config.track_with, str)
    for index, name in enumerate(names):
        if name not in tracker_names():
            path = f"track_with[{index}]" if as_list else "track_with"
            yield ConfigProblem(path, f"{shown(name)} is no tracker", choose_among(name, tracker_names()))
    if len(set(names)) != len(names):
        yield ConfigProblem("track_with", f"{shown(names)} names a tracker twice", "name each once")


def options_are_known(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject options of trackers that are unknown or unused, and unknown options."""
    for name, options in config.tracker_kwargs.items():
        path = f"{_KEYS}.{name}"
        if name == TENSORBOARD:
            yield ConfigProblem(path, "TensorBoard has no options: its events are in the run's folder", "remove it")
        elif name not in PLUG_INS:
            yield ConfigProblem(path, f"{shown(name)} is no tracker", choose_among(name, PLUG_INS))
        elif name not in tracker_list(config):
            remedy = f"add {name} to `track_with`, or remove these options"
            yield ConfigProblem(path, f"{shown(options)} has no effect: {name} is not used", remedy)
        else:
            yield from _option_problems(path, plug_in_class(PLUG_INS[name]).Options, options)


def _option_problems(path: str, kind: type, options: dict[str, Any]) -> Iterator[ConfigProblem]:
    secrets = [key for key in options if is_secret(key)]
    for key in secrets:
        remedy = "remove it here, and from the file's history; `docs/trackers.md` has the variable"
        yield ConfigProblem(f"{path}.{key}", "keys are taken from the environment only", remedy)
    tree = {key: value for key, value in options.items() if key not in secrets}
    problems = truth_value_problems(kind, tree)
    strict = make_dataclass(kind.__name__, [], bases=(kind,), namespace={"__pydantic_config__": {"extra": "forbid"}})
    try:
        TypeAdapter(strict).validate_python(tree)
    except ValidationError as error:
        known = {problem.path for problem in problems}
        problems += [item for item in validation_problems(error, kind, tree) if item.path not in known]
    for problem in problems:
        yield ConfigProblem(f"{path}.{problem.path}", problem.message, problem.remedy)


def trackers_are_here(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require the package of each tracker, and its key in the environment."""
    for tracker in chosen_trackers(config):
        if tracker.package is not None and not is_installed(tracker.package):
            message = f"{tracker.name} needs the package {tracker.package}, which is not installed"
            yield ConfigProblem("track_with", message, f"{tracker.install}, or remove {tracker.name}")
        if tracker.secret is not None and not os.environ.get(tracker.secret):
            message = f"{tracker.name} ({tracker.mode}) needs a key, and the variable {tracker.secret} is not set"
            remedy = f"set it, or choose {_KEYS}.{tracker.name} that send nothing: docs/trackers.md"
            yield ConfigProblem("track_with", message, remedy)


def is_installed(package: str) -> bool:
    """Return True if a package can be imported; a mere folder of that name, such as wandb's output, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
